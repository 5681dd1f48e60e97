// The one kernel autograd itself needs: summing gradients.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// to += from, elementwise; equal numel. to: f32, f64, bf16 or i64; from: the same dtype, or bf16 into f32,
/// or f32 into f64.
inline constinit Kernel<void(const Tensor& to, const Tensor& from)> accumulate(
    "accumulate",
    [](const Tensor& to, const Tensor& from) { return Cost{.bytes = 2 * bytes_of(to) + bytes_of(from)}; });

}  // namespace shoal
