// Matrix products: linear layers and grouped (per-expert) linear layers, on one small GEMM interface.
// Weight gradients accumulate (+=) straight into the leaf's gradient buffer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// y_TN = x_TK * weight_NK^T (+ bias_N). Leading dimensions of x are kept. bias may be undefined. x is f32 or
/// f64 like the weight, or bf16 with an f32 weight: then y is bf16 (core/ops/bf16_linear.h), or f32 for
/// linear_f32.
Tensor linear(const Tensor& x_TK, const Tensor& weight_NK, const Tensor& bias_N = {});
Tensor linear_f32(const Tensor& x_TK, const Tensor& weight_NK);
/// x_TN + bias_N, for results of linear that were summed over ranks. x: f32, f64 or bf16.
Tensor add_row_bias(const Tensor& x_TN, const Tensor& bias_N);

/// Rows of x are sorted by group; group g has rows_per_group[g] >= 0 consecutive rows, summing to R.
/// y_RN: rows of group g times weight_GNK[g]^T (+ bias_GN[g]). Empty groups are allowed and get zero
/// gradients. rows_per_part [G, P]: the rows of each group come from P sequences, so many from each (empty:
/// from one); matters where parameters have exact sums.
Tensor grouped_linear(const Tensor& x_RK, const Tensor& weight_GNK, std::span<const int64_t> rows_per_group,
                      const Tensor& bias_GN = {}, std::span<const int64_t> rows_per_part = {});

/// C[m, n] = sum_k op(A)[m, k] * op(B)[k, n] (+ C when accumulate). Row-major; A is [m, k] or, transposed,
/// [k, m]; B is [k, n] or, transposed, [n, k]. All f32 or all f64.
struct Gemm {
  bool transpose_a = false, transpose_b = false, accumulate = false;
};
/// Cost of so many multiply-adds on operands of a dtype.
inline Cost product_cost(int64_t multiply_adds, DType operands, double bytes) {
  const double flops = 2 * static_cast<double>(multiply_adds);
  return operands == DType::bf16 ? Cost{0, flops, bytes} : Cost{flops, 0, bytes};
}
/// Bytes of the matrices of a stack [G, ..] that some rows use.
double used_bytes(const Tensor& stack, std::span<const int64_t> rows);
inline constinit Kernel<void(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c)> gemm(
    "gemm", [](Gemm how, const Tensor& a, const Tensor& b, const Tensor& c) {
      const int64_t k = a.size(how.transpose_a ? 0 : 1);
      return product_cost(c.numel() * k, a.dtype(), bytes_of(a, b, c) + (how.accumulate ? bytes_of(c) : 0));
    });

/// Whether the bits of a row of gemm's result in this dtype depend on that row of `a` and on `b` alone.
inline constinit Kernel<bool(DType dtype)> rows_are_independent("rows_are_independent");

/// One GEMM per group, with the rows of each group as the variable dimension.
///   rows:    c_RN[rows of g] = a_RK[rows of g] * op(b_G..[g])       (forward: transpose_b = true; dx: false)
///   reduce:  c_GNK[g] (+)= a_RN[rows of g]^T * b_RK[rows of g]       (weight gradient)
/// Dtypes as for gemm.
inline constinit Kernel<void(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c,
                             std::span<const int64_t> rows)>
    grouped_gemm_rows("grouped_gemm_rows", [](Gemm, const Tensor& a, const Tensor& b, const Tensor& c,
                                              std::span<const int64_t> rows) {
      return product_cost(a.numel() * c.size(1), a.dtype(), bytes_of(a, c) + used_bytes(b, rows));
    });
inline constinit Kernel<void(Gemm how, const Tensor& a, const Tensor& b, const Tensor& c,
                             std::span<const int64_t> rows)>
    grouped_gemm_reduce("grouped_gemm_reduce", [](Gemm how, const Tensor& a, const Tensor& b, const Tensor& c,
                                                  std::span<const int64_t> rows) {
      const double results = how.accumulate ? 2 * used_bytes(c, rows) : bytes_of(c);
      return product_cost(a.numel() * b.size(1), a.dtype(), bytes_of(a, b) + results);
    });

/// y[r, :] += bias[group of r, :]; one group: rows = {R}. y may be bf16 with an f32 bias; so may dy.
inline constinit Kernel<void(const Tensor& y, const Tensor& bias, std::span<const int64_t> rows)> add_bias(
    "add_bias", [](const Tensor& y, const Tensor& bias, std::span<const int64_t>) {
      return Cost{.bytes = 2 * bytes_of(y) + bytes_of(bias)};
    });
/// dbias[g, :] += sum of dy over the rows of g.
inline constinit Kernel<void(const Tensor& dy, const Tensor& dbias, std::span<const int64_t> rows)> bias_bwd(
    "bias_bwd");

}  // namespace shoal
