// The attention layer: packed projection, position encoding, attention, output projection. Multi-head,
// grouped-query and multi-query differ only in the number of key/value heads.
#pragma once

#include <cstdint>

#include "core/nn/module.h"
#include "models/model.h"
#include "models/position.h"

namespace shoal {

struct AttentionShape {
  int64_t hidden_size = 0, heads = 0, kv_heads = 0, head_size = 0;  // D, H, G, C
  bool bias = false;
  double init_std = 0.02, output_init_std = 0.02;
  int64_t num_params() const;
};

class AttentionLayer final : public Module {
 public:
  AttentionLayer(const AttentionShape& shape, PositionEncoding& position, const BuildContext& context);
  Tensor forward(const Tensor& x_TD, const ModelBatch& batch);
  /// New tokens only; reads and extends layer `layer` of the state. positions_T: of the new tokens.
  Tensor decode(const Tensor& x_TD, const Tensor& positions_T, DecodeState& state, size_t layer);

 private:
  Tensor project(const Tensor& x_TD) const;
  Tensor rotate(const Tensor& qkv, const AttentionSpec& spec, const Tensor& positions_T);
  static Tensor attend(const Tensor& qkv, const AttentionSpec& spec);
  Tensor output(const Tensor& y) const;
  AttentionSpec spec(int64_t batch, int64_t seq) const;

  AttentionShape shape_;
  PositionEncoding& position_;  // owned by the model
  Parameter *qkv_, *out_, *qkv_bias_ = nullptr, *out_bias_ = nullptr;
};

}  // namespace shoal
