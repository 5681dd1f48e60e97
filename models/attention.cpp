#include "models/attention.h"

#include "core/ops/attention.h"
#include "core/ops/linear.h"

namespace shoal {

int64_t AttentionShape::num_params() const {
  const int64_t rows = (heads + 2 * kv_heads) * head_size, inner = heads * head_size;
  return rows * hidden_size + inner * hidden_size + (bias ? rows + hidden_size : 0);
}

AttentionLayer::AttentionLayer(const AttentionShape& shape, PositionEncoding& position,
                               const BuildContext& context)
    : shape_(shape), position_(position) {
  const int64_t D = shape.hidden_size, G = shape.kv_heads, C = shape.head_size,
                per_group = shape.heads / G + 2;
  qkv_ = &add_parameter(context, "qkv.weight", Shape{G, per_group, C, D}, Init::normal(shape.init_std));
  if (shape.bias)
    qkv_bias_ = &add_parameter(context, "qkv.bias", Shape{G, per_group, C}, Init::zeros(), ParamKind::bias);
  out_ =
      &add_parameter(context, "out.weight", Shape{D, shape.heads * C}, Init::normal(shape.output_init_std));
  if (shape.bias) out_bias_ = &add_parameter(context, "out.bias", Shape{D}, Init::zeros(), ParamKind::bias);
}

AttentionSpec AttentionLayer::spec(int64_t batch, int64_t seq) const {
  AttentionSpec spec;
  spec.batch = batch;
  spec.seq = seq;
  spec.heads = shape_.heads;
  spec.kv_heads = shape_.kv_heads;
  spec.head_size = shape_.head_size;
  position_.adjust(spec);
  return spec;
}

Tensor AttentionLayer::project(const Tensor& x_TD) const {
  const ProfileSection section("attention projections");
  const int64_t rows = (shape_.heads + 2 * shape_.kv_heads) * shape_.head_size;
  const Tensor bias = qkv_bias_ ? qkv_bias_->value.view({rows}) : Tensor{};
  return linear(x_TD, qkv_->value.view({rows, shape_.hidden_size}), bias);
}

Tensor AttentionLayer::rotate(const Tensor& qkv, const AttentionSpec& spec, const Tensor& positions_T) {
  const ProfileSection section("positions");
  return position_.rotate(qkv, spec, positions_T);
}

Tensor AttentionLayer::attend(const Tensor& qkv, const AttentionSpec& spec) {
  const ProfileSection section("attention");
  return attention(qkv, spec);
}

Tensor AttentionLayer::output(const Tensor& y) const {
  const ProfileSection section("attention projections");
  return linear(y, out_->value, out_bias_ ? out_bias_->value : Tensor{});
}

Tensor AttentionLayer::forward(const Tensor& x_TD, const ModelBatch& batch) {
  AttentionSpec s = spec(batch.batch, batch.seq);
  s.document_BS = batch.document_BS;
  const Tensor qkv = rotate(project(x_TD), s, batch.positions_T);
  return output(attend(qkv, s));
}

Tensor AttentionLayer::decode(const Tensor& x_TD, const Tensor& positions_T, DecodeState& state,
                              size_t layer) {
  const int64_t tokens = x_TD.num_rows();
  const AttentionSpec s = spec(state.batch, tokens / state.batch);
  const Tensor qkv = rotate(project(x_TD), s, positions_T);
  const Tensor y = Tensor::empty({tokens, shape_.heads * shape_.head_size}, x_TD.dtype(), x_TD.device());
  const auto& decode = qkv.dtype() == DType::bf16 ? bf16_attention_decode : attention_decode;
  decode(x_TD.device(), DecodeArgs{qkv, state.keys[layer], state.values[layer], y, state.length}, s);
  return output(y);
}

}  // namespace shoal
