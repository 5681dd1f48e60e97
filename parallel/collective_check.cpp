#include "parallel/collective_check.h"

#include <cstdlib>
#include <string_view>

#include "core/base/error.h"
#include "core/base/text.h"

namespace shoal {

namespace {

constexpr int64_t kSignatureWidth = 5;

CollectiveSignature unpack_signature(const int64_t* v) {
  return {static_cast<CollectiveKind>(v[0]), static_cast<DType>(v[1]), static_cast<ReduceOp>(v[2]),
          static_cast<int>(v[3]), v[4]};
}

void compare_rows(const CheckedGroup& group, const Tensor& all, int64_t width) {
  const int64_t* rows = all.data<int64_t>() + kSignatureWidth;
  for (int from = 0; from < group.size; from++) {
    for (int to = 0; to < group.size; to++) {
      const int64_t sent = rows[from * width + to], wanted = rows[to * width + group.size + from];
      if (sent != wanted)
        throw Error(row_mismatch_message(group.name, group.call_number, from, sent, to, wanted));
    }
  }
}

}  // namespace

bool collective_checks_enabled() {
  static const bool enabled = [] {
    const char* text = std::getenv("SHOAL_CHECK_COLLECTIVES");
    const std::string_view value = text == nullptr ? "" : text;
    if (value == "1") return true;
    if (value.empty() || value == "0") return false;
    throw UsageError(str("SHOAL_CHECK_COLLECTIVES: expected 0 or 1, got '", value, "'"));
  }();
  return enabled;
}

void compare_calls(const CheckedGroup& group, const CollectiveCall& call) {
  const CollectiveSignature& s = call.signature;
  const int64_t width = kSignatureWidth + 2 * group.size;
  std::vector<int64_t> mine = {static_cast<int64_t>(s.kind), static_cast<int64_t>(s.dtype),
                               static_cast<int64_t>(s.op), s.root, s.count};
  mine.insert(mine.end(), call.send_rows.begin(), call.send_rows.end());
  mine.insert(mine.end(), call.recv_rows.begin(), call.recv_rows.end());
  mine.resize(static_cast<size_t>(width));
  CollectiveCall gather;
  gather.signature = {CollectiveKind::all_gather, DType::i64, ReduceOp::sum, 0, width};
  gather.in = Tensor::from(mine, {width});
  gather.out = Tensor::empty({group.size, width}, DType::i64);
  const Tensor all = gather.out;
  group.begin(std::move(gather)).wait();
  const CollectiveSignature first = unpack_signature(all.data<int64_t>());
  for (int r = 1; r < group.size; r++) {
    const CollectiveSignature other = unpack_signature(all.data<int64_t>() + r * width);
    if (!(first == other)) throw Error(mismatch_message(group.name, group.call_number, 0, first, r, other));
  }
  if (s.kind == CollectiveKind::all_to_all) compare_rows(group, all, width);
}

}  // namespace shoal
