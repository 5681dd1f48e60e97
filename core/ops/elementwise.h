// Elementwise and row-wise helpers. x and y have equal shapes; dtypes f32, f64 (bf16 storage where stated).
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

Tensor add(const Tensor& x, const Tensor& y);
Tensor mul(const Tensor& x, const Tensor& y);
Tensor scale(const Tensor& x, double factor);
Tensor sigmoid(const Tensor& x);
/// y[r, :] = x[r, :] * scale[r] for each row r; scale_T has one element per row. (Gated shared expert.)
Tensor scale_rows(const Tensor& x_TD, const Tensor& scale_T);
/// Sum of all elements, as a scalar of x's dtype; fixed order.
Tensor sum(const Tensor& x);
/// A copy in another float dtype; the gradient is cast back.
Tensor cast(const Tensor& x, DType dtype);

inline constinit Kernel<void(const Tensor& x, const Tensor& y, const Tensor& out)> add_fwd("add_fwd");
inline constinit Kernel<void(const Tensor& x, const Tensor& y, const Tensor& out)> mul_fwd("mul_fwd");
inline constinit Kernel<void(const Tensor& x, double factor, const Tensor& out)> scale_fwd("scale_fwd");
/// out = a x + b y; out may be x or y. f32 or f64.
inline constinit Kernel<void(double a, const Tensor& x, double b, const Tensor& y, const Tensor& out)> axpby(
    "axpby", [](double, const Tensor& x, double, const Tensor& y, const Tensor& out) {
      return Cost{.bytes = bytes_of(x, y, out)};
    });
/// out[r] = 1 / (the root of the sum of squares of row r + eps), summed in double in a fixed order; 0 for a
/// row of zeros when eps is 0. f32 or f64.
inline constinit Kernel<void(const Tensor& x_RN, double eps, const Tensor& out_R)> inverse_row_norms(
    "inverse_row_norms", [](const Tensor& x, double, const Tensor&) { return Cost{.bytes = bytes_of(x)}; });
inline constinit Kernel<void(const Tensor& x, const Tensor& out)> sigmoid_fwd("sigmoid_fwd");
inline constinit Kernel<void(const Tensor& dy, const Tensor& y, const Tensor& dx)> sigmoid_bwd("sigmoid_bwd");
inline constinit Kernel<void(const Tensor& x, const Tensor& scale, const Tensor& out)> scale_rows_fwd(
    "scale_rows_fwd");
/// dx and/or dscale may be undefined.
inline constinit Kernel<void(const Tensor& dy, const Tensor& x, const Tensor& scale, const Tensor& dx,
                             const Tensor& dscale)>
    scale_rows_bwd("scale_rows_bwd");
inline constinit Kernel<void(const Tensor& x, const Tensor& out)> sum_fwd("sum_fwd");
inline constinit Kernel<void(const Tensor& x, const Tensor& out)> cast_fwd("cast_fwd");
inline constinit Kernel<void(const Tensor& out, double value)> fill("fill");
/// x *= factor, a scalar tensor of x's dtype or of stats_dtype(x), in place; x is not touched when it is 1.
inline constinit Kernel<void(const Tensor& x, const Tensor& factor)> scale_by("scale_by");
/// sum (f64 scalar) += the sum of squares of all elements in double, fixed order (gradient norm).
inline constinit Kernel<void(const Tensor& x, const Tensor& sum)> add_squares("add_squares");
/// count (i64 scalar) += how many elements are not finite.
inline constinit Kernel<void(const Tensor& x, const Tensor& count)> count_not_finite("count_not_finite");

// The same for a single tensor, as numbers: these wait for the device.
double sum_squares(const Tensor& x);
bool all_finite(const Tensor& x);

}  // namespace shoal
