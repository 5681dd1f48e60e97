// Gradients of grouped products under exact sums: the rows of a group come from several sequences, and the
// gradient of each sequence is a summand of its own. For core/ops/linear.h and core/ops/bf16_linear.h.
#pragma once

#include <cstdint>
#include <span>

#include "core/autograd/exact_sum.h"

namespace shoal {

/// For each part that has rows: product(first, last, out) writes into `out`, of `shape` (the gradient of one
/// group), what rows [first, last) give, and that is added to the group's share of `sum`. rows_per_part: as
/// many parts of each of the `groups`, in the order of the rows.
template <class Product>
void add_parts(const ExactSum& sum, int64_t groups, std::span<const int64_t> rows_per_part,
               const Shape& shape, DType dtype, const Product& product) {
  if (groups == 0) return;
  const Device device = sum.high.device();
  const int64_t parts = std::ssize(rows_per_part) / groups, size = shape.numel();
  const Tensor out = Tensor::empty(shape, dtype, device);
  int64_t first = 0;
  for (int64_t p = 0; p < std::ssize(rows_per_part); p++) {
    const int64_t last = first + rows_per_part[static_cast<size_t>(p)];
    if (last > first) {
      product(first, last, out);
      exact_add(device, sum.part(p / parts * size, size), out);
    }
    first = last;
  }
}

}  // namespace shoal
