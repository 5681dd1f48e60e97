// CPU kernels of core/ops/embedding.h.
#include "core/ops/embedding.h"

#include <cstring>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

void check_ids(const int32_t* ids, int64_t num_ids, int64_t vocab) {
  for (int64_t t = 0; t < num_ids; t++) {
    SHOAL_CHECK(ids[t] >= 0 && ids[t] < vocab, "embedding: expected ids in [0, ", vocab, "), got ", ids[t],
                " at position ", t, "; does the tokenizer's vocabulary fit the table?");
  }
}

void embedding_fwd_impl(const Tensor& weight, const Tensor& ids, const Tensor& y, const TablePart& part) {
  const int32_t* id = ids.data<int32_t>();
  check_ids(id, ids.numel(), part.vocab);
  const int64_t first = part.first, num_rows = weight.size(0);
  const int64_t width = weight.size(1);
  const int64_t row_bytes = width * dtype_size(weight.dtype());
  const std::byte* from = weight.bytes();
  std::byte* to = y.bytes();
  cpu::parallel_rows(ids.numel(), width, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const int64_t row = id[t] - first;
      if (row >= 0 && row < num_rows) {
        std::memcpy(to + t * row_bytes, from + row * row_bytes, static_cast<size_t>(row_bytes));
      } else {
        std::memset(to + t * row_bytes, 0, static_cast<size_t>(row_bytes));
      }
    }
  });
}

// Each worker owns some columns and walks all tokens, so every element is summed in token order.
constexpr int64_t kColumnBlock = 64;

template <class Grad, class Sum>
void add_rows(const Grad* dy, const int32_t* ids, int64_t num_ids, const TablePart& part,
              const Tensor& table) {
  const int64_t width = table.size(1), num_rows = table.size(0), first_row = part.first;
  Sum* dweight = table.data<Sum>();
  const int64_t num_blocks = (width + kColumnBlock - 1) / kColumnBlock;
  const int64_t grain = num_ids * kColumnBlock >= cpu::kBlockElements ? 1 : num_blocks;
  parallel_for(num_blocks, grain, [=](int64_t first, int64_t last) {
    const int64_t begin = first * kColumnBlock, end = std::min(width, last * kColumnBlock);
    for (int64_t t = 0; t < num_ids; t++) {
      const int64_t row = ids[t] - first_row;
      if (row < 0 || row >= num_rows) continue;
      Sum* to = dweight + row * width;
      const Grad* from = dy + t * width;
#pragma omp simd
      for (int64_t d = begin; d < end; d++) to[d] += static_cast<Sum>(from[d]);
    }
  });
}

void embedding_bwd_impl(const Tensor& dy, const Tensor& ids, const Tensor& dweight, const TablePart& part) {
  const int32_t* id = ids.data<int32_t>();
  const int64_t num_ids = ids.numel();
  check_ids(id, num_ids, part.vocab);
  if (dy.dtype() == DType::bf16)
    return add_rows<BFloat16, float>(dy.data<BFloat16>(), id, num_ids, part, dweight);
  dispatch_float(dy.dtype(), "embedding",
                 [&]<class T>() { add_rows<T, T>(dy.data<T>(), id, num_ids, part, dweight); });
}

const bool added[] = {
    embedding_fwd.add(DeviceType::cpu, &embedding_fwd_impl, kIsaLevel),
    embedding_bwd.add(DeviceType::cpu, &embedding_bwd_impl, kIsaLevel),
};

SHOAL_KERNELS_END
