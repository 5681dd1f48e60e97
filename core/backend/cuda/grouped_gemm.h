// Products of many small groups of rows in one launch: tensor cores, bf16 operands, f32 sums. For experts
// with few rows each, where one call of cuBLAS per expert would be bound by launches.
#pragma once

#include <cstdint>
#include <span>

#include "core/tensor/tensor.h"

namespace shoal::cuda {

/// y[rows of g] = x[rows of g] * op(matrices[g]); matrices: [inputs, outputs] each or, transposed, [outputs,
/// inputs]. x_RI, matrices: bf16; y_RO: bf16 (rounded once) or f32. Shapes are the caller's to check.
void grouped_rows_product(const Tensor& x, const Tensor& matrices, bool transposed, const Tensor& y,
                          std::span<const int64_t> rows);

/// c_GNK[g] (+)= a_RN[rows of g]^T * b_RK[rows of g]. a, b: bf16; c: f32. An empty group writes zeros, or
/// adds nothing.
void grouped_reduce_product(bool accumulate, const Tensor& a, const Tensor& b, const Tensor& c,
                            std::span<const int64_t> rows);

}  // namespace shoal::cuda
