#include "models/attention.h"

#include "core/ops/attention.h"
#include "core/ops/linear.h"
#include "core/ops/rows.h"
#include "parallel/context_attention.h"

namespace shoal {

int64_t AttentionShape::num_params() const {
  const int64_t rows = (heads + 2 * kv_heads) * head_size, inner = heads * head_size;
  return rows * hidden_size + inner * hidden_size + (bias ? rows + hidden_size : 0);
}

AttentionLayer::AttentionLayer(const AttentionShape& shape, PositionEncoding& position,
                               const TokenSplit& split, const BuildContext& context)
    : shape_(shape), position_(position), split_(split), share_(shape.share(split)) {
  const int64_t D = shape.hidden_size, G = shape.kv_heads, C = shape.head_size, queries = shape.heads / G;
  qkv_ = &add_parameter(context, "qkv.weight", Shape{G, queries + 2, C, D}, Init::normal(shape.init_std),
                        ParamKind::matrix, Placement::tensor(0, static_cast<int>(G)));
  if (shape.bias) {
    qkv_bias_ = &add_parameter(context, "qkv.bias", Shape{G, queries + 2, C}, Init::zeros(), ParamKind::bias,
                               Placement::tensor(0, static_cast<int>(G)));
  }
  out_ = &add_parameter(context, "out.weight", Shape{D, G, queries * C}, Init::normal(shape.output_init_std),
                        ParamKind::matrix, Placement::nested(1, static_cast<int>(G), 2));
  out_->column_dims = 2;
  if (shape.bias) out_bias_ = &add_parameter(context, "out.bias", Shape{D}, Init::zeros(), ParamKind::bias);
}

HeadShare AttentionShape::share(const TokenSplit& split) const {
  AxisCoords coords;
  coords[Axis::tp] = split.coord();
  const auto G = static_cast<int>(kv_heads);
  HeadShare share;
  share.groups = shard_range(kv_heads, part_of({0, Axis::tp, G}, coords));
  share.queries = shard_range(heads / kv_heads, part_of({0, Axis::tp, G, true}, coords));
  return share;
}

AttentionSpec AttentionLayer::spec(int64_t batch, int64_t seq) const {
  const int64_t queries = share_.queries.end - share_.queries.begin;
  AttentionSpec spec;
  spec.batch = batch;
  spec.seq = seq;
  spec.kv_heads = share_.groups.end - share_.groups.begin;
  spec.heads = spec.kv_heads * queries;
  spec.head_size = shape_.head_size;
  position_.adjust(spec);
  if (spec.alibi_slopes_H.defined()) {
    const int64_t first = share_.groups.begin * (shape_.heads / shape_.kv_heads) + share_.queries.begin;
    spec.alibi_slopes_H = spec.alibi_slopes_H.flat(first, spec.heads);
  }
  return spec;
}

Tensor AttentionLayer::project(const Tensor& x_TD) const {
  const ProfileSection section("attention projections");
  const int64_t rows = qkv_->value.numel() / shape_.hidden_size;
  const Tensor bias = qkv_bias_ ? qkv_bias_->value.view({rows}) : Tensor{};
  const Tensor qkv = linear(x_TD, qkv_->value.view({rows, shape_.hidden_size}), bias);
  const int64_t C = shape_.head_size, queries = shape_.heads / shape_.kv_heads;
  const auto [begin, end] = share_.queries;
  if (end - begin == queries) return qkv;
  // Ranks that share a key/value head all project it and its queries, and attend with queries of their own.
  return take_columns(qkv, {{begin * C, end * C}, {queries * C, (queries + 2) * C}});
}

Tensor AttentionLayer::rotate(const Tensor& qkv, const AttentionSpec& spec, const Tensor& positions_T) {
  const ProfileSection section("positions");
  return position_.rotate(qkv, spec, positions_T);
}

/// spec: of whole sequences.
Tensor AttentionLayer::attend(const Tensor& qkv, const AttentionSpec& spec) const {
  const ProfileSection section("attention");
  const ContextSplit& context = split_.context();
  return context.is_split() ? context_attention(qkv, spec, context) : attention(qkv, spec);
}

Tensor AttentionLayer::output(const Tensor& y) const {
  const ProfileSection section("attention projections");
  const Tensor bias = out_bias_ ? out_bias_->value : Tensor{};
  const int64_t D = shape_.hidden_size;
  return split_.linear_scatter(y, out_->value.view({D, out_->value.numel() / D}), bias);
}

Tensor AttentionLayer::forward(const Tensor& x_TD, const ModelBatch& batch) {
  AttentionSpec s = spec(batch.batch, split_.context().own(batch.seq).rows());
  const Tensor all_TD = split_.gather(x_TD, batch.num_tokens());
  const Tensor qkv = rotate(project(all_TD), s, batch.positions_T);
  s.seq = batch.seq;
  s.document_BS = batch.document_BS;
  return output(attend(qkv, s));
}

Tensor AttentionLayer::decode(const Tensor& x_TD, const Tensor& positions_T, DecodeState& state,
                              size_t layer) {
  const int64_t tokens = positions_T.numel();
  const AttentionSpec s = spec(state.batch, tokens / state.batch);
  const Tensor qkv = rotate(project(split_.gather(x_TD, tokens)), s, positions_T);
  const Tensor y = Tensor::empty({tokens, s.heads * s.head_size}, x_TD.dtype(), x_TD.device());
  const auto& decode = qkv.dtype() == DType::bf16 ? bf16_attention_decode : attention_decode;
  decode(x_TD.device(), DecodeArgs{qkv, state.keys[layer], state.values[layer], y, state.length}, s);
  return output(y);
}

}  // namespace shoal
