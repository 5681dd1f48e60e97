#include "core/ops/attention_part.h"

#include "core/autograd/tape.h"
#include "core/ops/linear.h"

namespace shoal {

namespace {

void check_part(const Tensor& qkv, const Tensor& kv, const AttentionSpec& spec, const AttentionPart& part) {
  SHOAL_CHECK(spec.kv_heads >= 1 && spec.heads % spec.kv_heads == 0 && spec.head_size >= 1,
              "attention_part: expected kv_heads that divide heads and a head size >= 1, got heads ",
              spec.heads, ", kv_heads ", spec.kv_heads, ", head size ", spec.head_size);
  const int64_t queries = spec.batch * part.queries.rows(), keys = spec.batch * part.keys.rows();
  const int64_t pair = spec.kv_heads * 2 * spec.head_size, row = pair + spec.heads * spec.head_size;
  SHOAL_CHECK(qkv.size(0) == queries && qkv.numel() == queries * row,
              "attention_part: expected packed qkv [B*Lq, G, H/G + 2, C] = [", queries, ", ", spec.kv_heads,
              ", ", spec.heads / spec.kv_heads + 2, ", ", spec.head_size, "], got ", qkv.shape());
  SHOAL_CHECK(kv.dtype() == qkv.dtype() && kv.size(0) == keys && kv.numel() == keys * pair,
              "attention_part: expected kv [B*Lk, G, 2, C] = [", keys, ", ", spec.kv_heads, ", 2, ",
              spec.head_size, "] of ", qkv.dtype(), ", got ", kv.shape(), " ", kv.dtype());
  for (const PositionRuns& runs : {part.queries, part.keys}) {
    SHOAL_CHECK(runs.count[0] >= 0 && runs.count[1] >= 0 && runs.begin[0] >= 0 &&
                    runs.begin[0] + runs.count[0] <= runs.begin[1] &&
                    runs.begin[1] + runs.count[1] <= spec.seq,
                "attention_part: expected two runs of ascending positions below ", spec.seq, ", got [",
                runs.begin[0], ", +", runs.count[0], ") and [", runs.begin[1], ", +", runs.count[1], ")");
  }
}

struct AttentionPartFunction final : Function {
  AttentionSpec spec;
  AttentionPart part;
  Tensor qkv, kv, y, lse;

  const char* name() const override { return "attention_part"; }

  Tensor forward(const Tensor& qkv_in, const Tensor& kv_in) {
    const int64_t rows = spec.batch * part.queries.rows();
    y = Tensor::empty({rows, spec.heads * spec.head_size}, qkv_in.dtype(), qkv_in.device());
    lse = Tensor::empty({rows, spec.heads}, stats_dtype(qkv_in.dtype()), qkv_in.device());
    const auto& kernel = qkv_in.dtype() == DType::bf16 ? bf16_attention_part_fwd : attention_part_fwd;
    kernel(qkv_in.device(), {qkv_in, kv_in, y, lse}, spec, part);
    qkv = qkv_in;
    kv = kv_in;
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor dqkv = Tensor::zeros(qkv.shape(), qkv.dtype(), qkv.device()), dkv = Tensor::empty_like(kv);
    const auto& kernel = qkv.dtype() == DType::bf16 ? bf16_attention_part_bwd : attention_part_bwd;
    kernel(qkv.device(), {dy[0], qkv, kv, y, lse, dqkv, dkv}, spec, part);
    return {dqkv, dkv};
  }
};

Cost products(int64_t count, const AttentionSpec& spec, const AttentionPart& part, DType dtype,
              double bytes) {
  const auto pairs = static_cast<int64_t>(attended_pairs(spec, part));
  return product_cost(count * pairs * spec.heads * spec.head_size, dtype, bytes);
}

}  // namespace

Tensor attention_part(const Tensor& qkv, const Tensor& kv, const AttentionSpec& spec,
                      const AttentionPart& part) {
  check_part(qkv, kv, spec, part);
  AttentionPartFunction function;
  function.spec = spec;
  function.part = part;
  return apply(std::move(function), qkv, kv);
}

double attended_pairs(const AttentionSpec& spec, const AttentionPart& part) {
  double pairs = 0;
  for (int64_t q = 0; q < part.queries.rows(); q++) {
    const int64_t seen = spec.causal ? part.keys.rows_below(part.queries.position(q) + 1) : part.keys.rows();
    pairs += static_cast<double>(seen);
  }
  return pairs * static_cast<double>(spec.batch);
}

Cost attention_part_fwd_cost(const AttentionPartForward& args, const AttentionSpec& spec,
                             const AttentionPart& part) {
  return products(2, spec, part, args.qkv.dtype(), bytes_of(args.qkv, args.kv, args.y, args.lse));
}

Cost attention_part_bwd_cost(const AttentionPartBackward& args, const AttentionSpec& spec,
                             const AttentionPart& part) {
  return products(5, spec, part, args.qkv.dtype(),
                  bytes_of(args.dy, args.qkv, args.kv, args.y, args.lse, args.dqkv, args.dkv));
}

}  // namespace shoal
