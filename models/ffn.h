// Feed-forward networks: the dense one, and the activations that experts share with it.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/registry.h"
#include "core/nn/module.h"
#include "core/tensor/tensor.h"
#include "parallel/token_split.h"

namespace shoal {

/// What stands between the up and the down projection. Stateless. Registered by name: swiglu, geglu, silu,
/// gelu, relu.
class FfnActivation {
 public:
  virtual ~FfnActivation() = default;
  /// Gated: the input is [rows, 2F] = [gate | up], the output [rows, F].
  virtual bool gated() const = 0;
  virtual Tensor forward(const Tensor& h) const = 0;
};
using FfnActivationRegistry = Registry<FfnActivation>;

/// 8/3 D rounded up to 128 for gated activations (same parameters as 4 D), else 4 D.
int64_t auto_ffn_hidden(int64_t hidden_size, bool gated);

/// What is made again instead of being kept: `model.recompute`.
struct Recompute {
  bool norms = false;           // results of the norms
  bool activations = false;     // what the down projections of FFNs and experts read
  bool up_projections = false;  // what their activations read
  bool block = false;           // all but the input of each block
  bool packed_weights = false;  // bf16 copies of weights
};

struct FfnShape {
  int64_t hidden_size = 0;  // D
  int64_t ffn_hidden = 0;   // F
  bool bias = false;
  double init_std = 0.02, output_init_std = 0.02;
  Recompute recompute;
};

/// y_TD = W2 f(W1 x). W1 is [2, F, D] when gated (gate rows, then up rows), else [F, D]; W2 is [D, F]. F is
/// cut over the group of `split`, which must outlive this.
class Ffn final : public Module {
 public:
  Ffn(const FfnShape& shape, const Choice& activation, const TokenSplit& split, const BuildContext& context);
  /// x and the result: this rank's rows of `num_tokens`. Collective over the group of the split.
  Tensor forward(const Tensor& x_TD, int64_t num_tokens) const;
  /// What one half of such a pass sends; numbers between layers have that dtype.
  void count(int64_t num_tokens, DType compute, PassHalf half) const;

 private:
  FfnShape shape_;
  const TokenSplit& split_;
  std::unique_ptr<FfnActivation> activation_;
  Parameter *w1_, *w2_, *b1_ = nullptr, *b2_ = nullptr;
};

}  // namespace shoal
