// The sum of a tensor, for kernels that need one of their own results.
#pragma once

#include "core/tensor/tensor.h"

namespace shoal::cuda {

/// out (f64 scalar) += the sum of all elements of x, added in double in an order that depends on numel only;
/// both on one device.
void add_sum(const Tensor& x, const Tensor& out);

}  // namespace shoal::cuda
