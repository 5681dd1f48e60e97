// Parts of tensors by rows and columns.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// Rows [begin, end) of the first dimension, as a copy; other rows of x get zero gradients. Any dtype.
Tensor take_rows(const Tensor& x, int64_t begin, int64_t end);

struct ColumnRange {
  int64_t begin = 0, end = 0;
};
/// These columns of x [R, W], one range after the other; other columns get zero gradients. f32, f64, bf16.
Tensor take_columns(const Tensor& x, const std::vector<ColumnRange>& ranges);

/// to[:, first_to + i] = from[:, first_from + i] for i < width, of matrices with equal rows and dtype.
struct CopyColumns {
  Tensor from, to;
  int64_t first_from = 0, first_to = 0, width = 0;
};
inline constinit Kernel<void(const CopyColumns&)> copy_columns("copy_columns", [](const CopyColumns& c) {
  return Cost{.bytes = 2 * static_cast<double>(c.from.num_rows() * c.width * dtype_size(c.from.dtype()))};
});

}  // namespace shoal
