// The attention layer: packed projection, position encoding, attention, output projection. Multi-head,
// grouped-query and multi-query differ only in the number of key/value heads.
#pragma once

#include <cstdint>

#include "core/nn/module.h"
#include "models/model.h"
#include "models/position.h"
#include "parallel/token_split.h"

namespace shoal {

/// The heads with which a rank attends: key/value heads, and of each of them these queries. Several groups
/// have all their queries; ranks that outnumber the key/value heads share each of them.
struct HeadShare {
  ShardRange groups, queries;
};

struct AttentionShape {
  int64_t hidden_size = 0, heads = 0, kv_heads = 0, head_size = 0;  // D, H, G, C
  bool bias = false;
  double init_std = 0.02, output_init_std = 0.02;
  int64_t num_params() const;
  HeadShare share(const TokenSplit& split) const;
};

class AttentionLayer final : public Module {
 public:
  /// Heads are cut over the group of `split`, which must outlive the layer.
  AttentionLayer(const AttentionShape& shape, PositionEncoding& position, const TokenSplit& split,
                 const BuildContext& context);
  /// x and the result: this rank's rows. Collective over the groups of the split.
  Tensor forward(const Tensor& x_TD, const ModelBatch& batch);
  /// New tokens only; reads and extends layer `layer` of the state. positions_T: of all ranks' new tokens.
  Tensor decode(const Tensor& x_TD, const Tensor& positions_T, DecodeState& state, size_t layer);
  /// What one half of a pass of a micro-batch sends; numbers between layers have that dtype.
  void count(const PassSizes& sizes, DType compute, PassHalf half) const;
  /// Of a micro-batch, those that this rank shares with its tp group.
  int64_t num_tokens(const PassSizes& sizes) const {
    return sizes.batch * split_.context().own(sizes.seq).rows();
  }

 private:
  Tensor project(const Tensor& x_TD) const;
  Tensor rotate(const Tensor& qkv, const AttentionSpec& spec, const Tensor& positions_T);
  Tensor attend(const Tensor& qkv, const AttentionSpec& spec) const;
  Tensor output(const Tensor& y) const;
  AttentionSpec spec(int64_t batch, int64_t seq) const;

  AttentionShape shape_;
  PositionEncoding& position_;  // owned by the model
  const TokenSplit& split_;
  HeadShare share_;
  Parameter *qkv_, *out_, *qkv_bias_ = nullptr, *out_bias_ = nullptr;
};

}  // namespace shoal
