// RMSNorm (Zhang & Sennrich, arXiv:1910.07467, eq. 4) and LayerNorm (Ba et al., arXiv:1607.06450, eq. 4) over
// the last dimension, alone or fused with the residual addition in front. Statistics and weights are f32 (f64
// for f64 inputs). Dtypes of x, residual, y: all f32, all f64, all bf16, or mixed precision: a residual
// stream of f32 with x of bf16 (or no residual and x of f32) and y of bf16. The sum has the dtype of the
// residual.
#pragma once

#include <utility>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// y = x / sqrt(mean(x^2) + eps) * weight
Tensor rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps, DType y_dtype);
inline Tensor rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps) {
  return rms_norm(x_TD, weight_D, eps, x_TD.dtype());
}
/// y = (x - mean) / sqrt(var + eps) * weight + bias; bias may be undefined.
Tensor layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps,
                  DType y_dtype);
inline Tensor layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps) {
  return layer_norm(x_TD, weight_D, bias_D, eps, x_TD.dtype());
}

struct NormResult {
  Tensor y_TD;    // the normalised sum
  Tensor sum_TD;  // x + residual: the new residual stream
};
/// y has the dtype of x.
NormResult add_rms_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D, double eps);
NormResult add_layer_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D,
                          const Tensor& bias_D, double eps);

/// {norm(x), x}: as the two above without a residual, for an x that is also carried on. Its gradient has the
/// bits of a sum's: what reached it by other ways is added in the same place.
NormResult carry_rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps, DType y_dtype);
NormResult carry_layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps,
                            DType y_dtype);

struct NormForward {
  Tensor x, residual;     // residual may be undefined
  Tensor weight, bias;    // bias may be undefined
  Tensor y, sum;          // sum is written when residual is defined
  Tensor mean_T, rstd_T;  // statistics, written; mean is undefined for rms_norm
  double eps;
};
struct NormBackward {
  Tensor dy;    // gradient of y
  Tensor dsum;  // gradient that reached sum by other ways; may be undefined; dx gets it added
  Tensor x;     // the normalised input (sum when there was a residual)
  Tensor weight, mean_T, rstd_T;
  Tensor dx;              // written, in the dtype of x (the sum); may be undefined
  Tensor dx_low;          // dx in bf16, for the bf16 summand of an f32 sum; may be undefined
  Tensor dweight, dbias;  // accumulated; may be undefined
};
inline Cost norm_fwd_cost(const NormForward& n) {
  return {.bytes = bytes_of(n.x, n.residual, n.weight, n.bias, n.y, n.residual ? n.sum : Tensor{}, n.mean_T,
                            n.rstd_T)};
}
inline Cost norm_bwd_cost(const NormBackward& n) {
  return {.bytes = bytes_of(n.dy, n.dsum, n.x, n.weight, n.mean_T, n.rstd_T, n.dx, n.dx_low) +
                   2 * bytes_of(n.dweight, n.dbias)};
}
inline constinit Kernel<void(const NormForward&)> rms_norm_fwd("rms_norm_fwd", &norm_fwd_cost);
inline constinit Kernel<void(const NormBackward&)> rms_norm_bwd("rms_norm_bwd", &norm_bwd_cost);
inline constinit Kernel<void(const NormForward&)> layer_norm_fwd("layer_norm_fwd", &norm_fwd_cost);
inline constinit Kernel<void(const NormBackward&)> layer_norm_bwd("layer_norm_bwd", &norm_bwd_cost);

}  // namespace shoal
