// FFN activations. Gated ones take [rows, 2F]: the gate half, then the up half.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

enum class Activation : uint8_t { silu, gelu, relu };  // gelu: the exact erf form

/// y = f(x), elementwise.
Tensor activate(const Tensor& x, Activation f);
/// y_RF = f(gate) * up, where x_R2F = [gate | up]. With silu this is SwiGLU (Shazeer, arXiv:2002.05202, eq.
/// 6).
Tensor gated_activate(const Tensor& x_R2F, Activation f);

inline constinit Kernel<void(const Tensor& x, Activation f, const Tensor& y)> activate_fwd("activate_fwd");
inline constinit Kernel<void(const Tensor& dy, const Tensor& x, Activation f, const Tensor& dx)> activate_bwd(
    "activate_bwd");
inline constinit Kernel<void(const Tensor& x, Activation f, const Tensor& y)> gated_activate_fwd(
    "gated_activate_fwd");
inline constinit Kernel<void(const Tensor& dy, const Tensor& x, Activation f, const Tensor& dx)>
    gated_activate_bwd("gated_activate_bwd");

}  // namespace shoal
