// Sums whose bits do not depend on the order or the grouping of their summands: each summand is rounded to a
// multiple of 2^-62 and added to fixed-point numbers, in which additions are exact. A sum in pieces (of other
// ranks) is summed as two plain arrays. For gradients and losses under run.deterministic: rank_invariant.
#pragma once

#include <cstdint>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// One sum for each element: high * 2^-12 + low * 2^-62. A summand that is not below 2^24 in magnitude, or
/// not finite, leaves NaN there for good. Exact for up to 2^17 summands in all and, between two carries
/// (which exact_add and exact_value make), 2^12 parts summed elementwise.
struct ExactSum {
  Tensor high;  // f64, whole numbers or NaN
  Tensor low;   // i64

  static constexpr double kMaxSummand = 1 << 24;
  static constexpr int64_t kMaxSummands = 1 << 17, kMaxParts = 1 << 12;

  static ExactSum zeros(int64_t count, Device device) {
    return {Tensor::zeros({count}, DType::f64, device), Tensor::zeros({count}, DType::i64, device)};
  }
  explicit operator bool() const { return high.defined(); }
  /// Elements [first, first + count).
  ExactSum part(int64_t first, int64_t count) const {
    return {high.flat(first, count), low.flat(first, count)};
  }
  void set_zero() const {
    high.set_zero();
    low.set_zero();
  }
};

/// sum += summand, elementwise; f32 or f64, of as many elements.
inline constinit Kernel<void(const ExactSum& sum, const Tensor& summand)> exact_add(
    "exact_add", [](const ExactSum& sum, const Tensor& summand) {
      return Cost{.bytes = 2 * bytes_of(sum.high, sum.low) + bytes_of(summand)};
    });
/// out = the sum, rounded to f64 and, when out is f32, from there to f32: a function of the sum alone, not of
/// how it was made.
inline constinit Kernel<void(const ExactSum& sum, const Tensor& out)> exact_value(
    "exact_value",
    [](const ExactSum& sum, const Tensor& out) { return Cost{.bytes = bytes_of(sum.high, sum.low, out)}; });

/// The sum of squares of many numbers, i64 [kSize]: limbs of 48 bits for 2^40, 2^-8, 2^-56 and 2^-104, then
/// how many numbers were left out, because they were not finite or not below 2^38.
struct ExactSquares {
  static constexpr int64_t kLimbs = 4, kSize = kLimbs + 1;
  static constexpr int kBits = 48, kTopExponent = 40;
};
/// sums += the squares of x (f32 or f64), each rounded to f64 and to a multiple of 2^-104.
inline constinit Kernel<void(const Tensor& x, const Tensor& sums)> exact_add_squares(
    "exact_add_squares", [](const Tensor& x, const Tensor&) { return Cost{.bytes = bytes_of(x)}; });
/// The sum, rounded to f64 (f64 scalar); NaN when numbers were left out. `sums` may be a sum of several.
inline constinit Kernel<void(const Tensor& sums, const Tensor& out)> exact_squares_value(
    "exact_squares_value");

}  // namespace shoal
