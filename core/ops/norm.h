// RMSNorm (Zhang & Sennrich, arXiv:1910.07467, eq. 4) and LayerNorm (Ba et al., arXiv:1607.06450, eq. 4) over
// the last dimension, alone or fused with the residual addition in front. Statistics are f32 (f64 for f64
// inputs).
#pragma once

#include <utility>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// y = x / sqrt(mean(x^2) + eps) * weight
Tensor rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps);
/// y = (x - mean) / sqrt(var + eps) * weight + bias; bias may be undefined.
Tensor layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps);

struct NormResult {
  Tensor y_TD;    // the normalised sum
  Tensor sum_TD;  // x + residual: the new residual stream
};
NormResult add_rms_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D, double eps);
NormResult add_layer_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D,
                          const Tensor& bias_D, double eps);

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
  Tensor dx;              // written; may be undefined
  Tensor dweight, dbias;  // accumulated; may be undefined
};
inline constinit Kernel<void(const NormForward&)> rms_norm_fwd("rms_norm_fwd");
inline constinit Kernel<void(const NormBackward&)> rms_norm_bwd("rms_norm_bwd");
inline constinit Kernel<void(const NormForward&)> layer_norm_fwd("layer_norm_fwd");
inline constinit Kernel<void(const NormBackward&)> layer_norm_bwd("layer_norm_bwd");

}  // namespace shoal
