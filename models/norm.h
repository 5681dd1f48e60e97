// The normalisation layer chosen by the config: rms_norm or layer_norm, with or without the residual
// addition.
#pragma once

#include <utility>

#include "core/autograd/saved.h"
#include "core/base/profiler.h"
#include "core/nn/module.h"
#include "core/ops/norm.h"

namespace shoal {

struct NormShape {
  int64_t size = 0;
  bool layer_norm = false;  // else rms_norm
  bool bias = false;        // layer_norm only
  double eps = 1e-5;
  bool recompute = false;  // the result is made again in backward
  int64_t num_params() const { return size * (layer_norm && bias ? 2 : 1); }
};

class Norm final : public Module {
 public:
  Norm(const NormShape& shape, const BuildContext& context)
      : shape_(shape), y_dtype_(context.compute_dtype()) {
    weight_ = &add_parameter(context, "weight", Shape{shape.size}, Init::ones(), ParamKind::norm);
    if (shape.layer_norm && shape.bias) {
      bias_ = &add_parameter(context, "bias", Shape{shape.size}, Init::zeros(), ParamKind::bias);
    }
  }
  /// In the computing dtype.
  Tensor forward(const Tensor& x_TD) const {
    return apply_again(shape_.recompute, x_TD, [this](const Tensor& x) { return normalize(x); });
  }
  /// {norm(x + residual), x + residual}; the sum keeps the residual's dtype.
  NormResult forward(const Tensor& x_TD, const Tensor& residual_TD) const {
    const ProfileSection section("norms");
    return with_recipe_of_y(shape_.layer_norm
                                ? add_layer_norm(x_TD, residual_TD, weight_->value, bias(), shape_.eps)
                                : add_rms_norm(x_TD, residual_TD, weight_->value, shape_.eps));
  }
  /// {norm(x), x}, of an x that is carried on.
  NormResult carry(const Tensor& x_TD) const {
    const ProfileSection section("norms");
    return with_recipe_of_y(shape_.layer_norm
                                ? carry_layer_norm(x_TD, weight_->value, bias(), shape_.eps, y_dtype_)
                                : carry_rms_norm(x_TD, weight_->value, shape_.eps, y_dtype_));
  }

 private:
  NormResult with_recipe_of_y(NormResult result) const {
    if (shape_.recompute) {
      result.y_TD = with_recipe(std::move(result.y_TD), result.sum_TD,
                                [this](const Tensor& sum_TD) { return normalize(sum_TD); });
    }
    return result;
  }
  Tensor normalize(const Tensor& x_TD) const {
    const ProfileSection section("norms");
    return shape_.layer_norm ? layer_norm(x_TD, weight_->value, bias(), shape_.eps, y_dtype_)
                             : rms_norm(x_TD, weight_->value, shape_.eps, y_dtype_);
  }
  Tensor bias() const { return bias_ ? bias_->value : Tensor{}; }
  NormShape shape_;
  DType y_dtype_;
  Parameter *weight_, *bias_ = nullptr;
};

}  // namespace shoal
