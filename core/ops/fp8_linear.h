// Grouped linear layers (experts) whose three products, y = x W^T, dx = dy W and dW = dy^T x, are made of fp8
// operands (core/ops/fp8.h) with sums in f32. Weights, their gradients and what flows between layers keep
// their types. Scales are those of the values at hand: no history is kept, so that a step depends on nothing
// but its inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/ops/fp8.h"
#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// What shares a scale.
///   tensor  each of x, W and dy of a group. x and W are e4m3, dy is e5m2.
///   block   128 neighbours along the sum of x and dy, 128 x 128 of W; all e4m3 (the recipe of DeepSeek-V3).
enum class Fp8Scaling : uint8_t { tensor, block };

/// Copies of a weight for y = x W^T and for dx = dy W. Kept by who owns the weight, until its value changes
/// (Leaf::packed_fresh).
struct Fp8Weight {
  Fp8Operand forward, backward;
};

/// As grouped_linear (core/ops/linear.h). x: bf16 or f32, and y is of its type; the weight [G, N, K] and the
/// bias [G, N] (may be undefined) are f32. kept: for this weight and scaling only; null: copies are made for
/// each call.
Tensor fp8_grouped_linear(const Tensor& x_RK, const Tensor& weight_GNK,
                          std::span<const int64_t> rows_per_group, const Tensor& bias_GN, Fp8Scaling scaling,
                          const std::shared_ptr<Fp8Weight>& kept = nullptr);

/// scales[g] = fp8_scale(the largest finite |x| of the rows of g). x_RC: f32 or bf16; scales: f32 [G].
inline constinit Kernel<void(const Tensor& x, std::span<const int64_t> rows, Fp8Format format,
                             const Tensor& scales)>
    fp8_scales("fp8_scales");

/// Fills the operands that are defined, of fp8_along_rows and fp8_along_columns, from x_RC (f32 or bf16).
/// Scales of the kind `matrix` are given in `scales`; those of the others are written: fp8_scale(the largest
/// finite one of |x| that share it). Where x is not finite the code is NaN or, in e5m2, infinity. Two
/// operands are of one format and, when either is `block`, both are.
inline constinit Kernel<void(const Tensor& x, std::span<const int64_t> rows, const Fp8Operand& along_rows,
                             const Fp8Operand& along_columns)>
    fp8_quantize("fp8_quantize", [](const Tensor& x, std::span<const int64_t>, const Fp8Operand& along_rows,
                                    const Fp8Operand& along_columns) {
      return Cost{.bytes = bytes_of(x, along_rows.codes, along_columns.codes)};
    });

/// c_g (+)= a_g b_g^T for the matrices of each group, [m, k] and [n, k]; c: f32 or bf16 (rounded once, never
/// added to), the matrices [m, n] of the groups behind each other. `block` times `block` is not possible.
inline constinit Kernel<void(bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c)>
    fp8_gemm("fp8_gemm", [](bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c) {
      double multiply_adds = 0;
      for (size_t g = 0; g < a.matrices.size(); g++) {
        const Fp8Matrix& of_a = a.matrices[g];
        multiply_adds += static_cast<double>(of_a.outer) * static_cast<double>(of_a.sum) *
                         static_cast<double>(b.matrices[g].outer);
      }
      const double bytes = bytes_of(a.codes, b.codes, c) + (accumulate ? bytes_of(c) : 0);
      return Cost{0, 2 * multiply_adds, bytes};
    });

/// Throws Error unless the arguments of fp8_gemm fit each other.
void check_fp8_gemm(bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c);

}  // namespace shoal
