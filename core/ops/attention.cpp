#include "core/ops/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/autograd/tape.h"
#include "core/ops/linear.h"

namespace shoal {

namespace {

void check_packed(const char* where, const Tensor& qkv, const AttentionSpec& spec) {
  SHOAL_CHECK(spec.batch >= 0 && spec.seq >= 0 && spec.kv_heads >= 1 && spec.heads >= 1 &&
                  spec.heads % spec.kv_heads == 0 && spec.head_size >= 1,
              where, ": expected kv_heads that divide heads and a head size >= 1, got heads ", spec.heads,
              ", kv_heads ", spec.kv_heads, ", head size ", spec.head_size);
  const int64_t per_row = spec.kv_heads * (spec.heads / spec.kv_heads + 2) * spec.head_size;
  SHOAL_CHECK(qkv.dims() >= 2 && qkv.size(0) == spec.batch * spec.seq && qkv.numel() == qkv.size(0) * per_row,
              where, ": expected packed qkv [B*S, G, H/G + 2, C] = [", spec.batch * spec.seq, ", ",
              spec.kv_heads, ", ", spec.heads / spec.kv_heads + 2, ", ", spec.head_size, "], got ",
              qkv.shape());
}

void check_masks(const AttentionSpec& spec) {
  SHOAL_CHECK(!spec.alibi_slopes_H ||
                  (spec.alibi_slopes_H.numel() == spec.heads && spec.alibi_slopes_H.dtype() == DType::f32),
              "attention: expected ", spec.heads, " f32 ALiBi slopes, got ", spec.alibi_slopes_H.shape(), " ",
              spec.alibi_slopes_H.dtype());
  if (!spec.document_BS) return;
  SHOAL_CHECK(spec.document_BS.numel() == spec.batch * spec.seq && spec.document_BS.dtype() == DType::i32,
              "attention: expected i32 document ids [", spec.batch, ", ", spec.seq, "], got ",
              spec.document_BS.shape(), " ", spec.document_BS.dtype());
  if (spec.document_BS.device().type != DeviceType::cpu) return;
  const int32_t* ids = spec.document_BS.data<int32_t>();
  for (int64_t b = 0; b < spec.batch; b++, ids += spec.seq) {
    const int32_t* bad = std::is_sorted_until(ids, ids + spec.seq);
    SHOAL_CHECK(bad == ids + spec.seq, "attention: document ids must ascend along a row, but row ", b,
                " has ", *(bad - 1), " before ", *bad, " at position ", bad - ids);
  }
}

struct Attention final : Function {
  AttentionSpec spec;
  Tensor qkv, y, lse;

  const char* name() const override { return "attention"; }

  Tensor forward(const Tensor& qkv_in) {
    y = Tensor::empty({spec.batch * spec.seq, spec.heads * spec.head_size}, qkv_in.dtype(), qkv_in.device());
    lse = Tensor::empty({spec.batch * spec.seq, spec.heads}, stats_dtype(qkv_in.dtype()), qkv_in.device());
    const auto& forward = qkv_in.dtype() == DType::bf16 ? bf16_attention_fwd : attention_fwd;
    forward(qkv_in.device(), qkv_in, spec, y, lse);
    if (needs_grad(0)) qkv = qkv_in;
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor dqkv = Tensor::empty_like(qkv);
    const auto& backward = qkv.dtype() == DType::bf16 ? bf16_attention_bwd : attention_bwd;
    backward(qkv.device(), {.dy = grad_outputs[0], .qkv = qkv, .y = y, .lse = lse, .dqkv = dqkv}, spec);
    return {dqkv};
  }
};

struct Rope final : Function {
  AttentionSpec spec;
  RopeSpec rope_spec;
  Tensor table, positions;

  const char* name() const override { return "rope"; }

  Tensor forward(const Tensor& qkv) {
    rope_fwd(qkv.device(), qkv, spec, rope_spec, table, positions, /*inverse=*/false);
    Tensor rotated = qkv;
    rotated.recipe = nullptr;  // was for what it held before
    return rotated;
  }

  // A rotation is orthogonal: its gradient is the rotation back.
  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const Tensor dx = dy.is_sole_owner() ? dy : dy.clone();
    rope_fwd(dx.device(), dx, spec, rope_spec, table, positions, /*inverse=*/true);
    return {dx};
  }
};

int64_t rotary_size_of(const RopeSpec& spec, int64_t head_size) {
  const int64_t size = spec.rotary_size == 0 ? head_size : spec.rotary_size;
  SHOAL_CHECK(size >= 2 && size % 2 == 0 && size <= head_size,
              "rope: expected an even rotary size of at most the head size (", head_size, "), got ", size);
  return size;
}

}  // namespace

Tensor attention(const Tensor& qkv, const AttentionSpec& spec) {
  check_packed("attention", qkv, spec);
  check_masks(spec);
  Attention function;
  function.spec = spec;
  return apply(std::move(function), qkv);
}

double attended_pairs(const AttentionSpec& spec) {
  const auto within = [&](int64_t length) {
    const auto n = static_cast<double>(length);
    return spec.causal ? n * (n + 1) / 2 : n * n;
  };
  if (!spec.document_BS) return static_cast<double>(spec.batch) * within(spec.seq);
  const Tensor host = spec.document_BS.to(Device{});
  const int32_t* ids = host.data<int32_t>();
  double pairs = 0;
  for (int64_t b = 0; b < spec.batch; b++, ids += spec.seq) {
    for (int64_t begin = 0, s = 1; s <= spec.seq; s++) {
      if (s < spec.seq && ids[s] == ids[begin]) continue;
      pairs += within(s - begin);
      begin = s;
    }
  }
  return pairs;
}

namespace {
Cost products_of_pairs(int64_t products, const AttentionSpec& spec, DType dtype, double bytes) {
  const auto pairs = static_cast<int64_t>(attended_pairs(spec));
  return product_cost(products * pairs * spec.heads * spec.head_size, dtype, bytes);
}
}  // namespace

Cost attention_fwd_cost(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) {
  return products_of_pairs(2, spec, qkv.dtype(), bytes_of(qkv, y, lse));
}

Cost attention_bwd_cost(const AttentionBackward& args, const AttentionSpec& spec) {
  return products_of_pairs(5, spec, args.qkv.dtype(),
                           bytes_of(args.dy, args.qkv, args.y, args.lse, args.dqkv));
}

std::vector<float> alibi_slopes(int64_t heads) {
  SHOAL_CHECK(heads >= 1, "alibi_slopes: expected at least 1 head, got ", heads);
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(heads)));
  // The geometric series of a power of two; other counts take the rest from every second slope of the next.
  const auto slope = [](int64_t i, int64_t n) {
    return static_cast<float>(std::exp2(-8.0 * static_cast<double>(i + 1) / static_cast<double>(n)));
  };
  std::vector<float> slopes;
  for (int64_t i = 0; i < power; i++) slopes.push_back(slope(i, power));
  for (int64_t i = 0; i < heads - power; i++) slopes.push_back(slope(2 * i, 2 * power));
  return slopes;
}

Tensor rope_table(const RopeSpec& spec, int64_t head_size, int64_t num_positions, DType dtype,
                  Device device) {
  const int64_t rotary = rotary_size_of(spec, head_size), pairs = rotary / 2;
  return dispatch_float(dtype, "rope_table", [&]<class T>() {
    std::vector<T> table(static_cast<size_t>(2 * num_positions * pairs));
    for (int64_t position = 0; position < num_positions; position++) {
      for (int64_t i = 0; i < pairs; i++) {
        const double angle =
            static_cast<double>(position) *
            std::pow(spec.theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary));
        const auto at = static_cast<size_t>(position * pairs + i);
        table[at] = static_cast<T>(std::cos(angle));
        table[at + static_cast<size_t>(num_positions * pairs)] = static_cast<T>(std::sin(angle));
      }
    }
    return Tensor::from(table, {2, num_positions, pairs}, device);
  });
}

Tensor rope(const Tensor& qkv, const AttentionSpec& spec, const RopeSpec& rope_spec, const Tensor& table,
            const Tensor& positions_T) {
  check_packed("rope", qkv, spec);
  const int64_t pairs = rotary_size_of(rope_spec, spec.head_size) / 2;
  SHOAL_CHECK(table.dims() == 3 && table.size(0) == 2 && table.size(2) == pairs &&
                  table.dtype() == stats_dtype(qkv.dtype()),
              "rope: expected a table [2, positions, ", pairs, "] of ", stats_dtype(qkv.dtype()), ", got ",
              table.shape(), " ", table.dtype(), "; make it with rope_table");
  SHOAL_CHECK(positions_T.numel() == qkv.size(0) && positions_T.dtype() == DType::i32, "rope: expected ",
              qkv.size(0), " i32 positions, got ", positions_T.shape(), " ", positions_T.dtype());
  Rope function;
  function.spec = spec;
  function.rope_spec = rope_spec;
  function.table = table;
  function.positions = positions_T;
  return apply(std::move(function), qkv);
}

}  // namespace shoal
