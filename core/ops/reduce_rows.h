// The arithmetic of reductions between ranks, for parts that lie in one tensor: what a device sums after
// ranks have exchanged their parts, in the order that all communicators keep.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

enum class RowReduction : uint8_t { sum, max, min };  // as ReduceOp of parallel/

/// out_N[i] = parts_RN[0, i] op parts_RN[1, i] op ..., left to right; every dtype. bf16 is summed in f32 and
/// rounded once. max and min of floats are NaN when any part is NaN. `out` may be a row of `parts`.
inline constinit Kernel<void(const Tensor& parts_RN, RowReduction op, const Tensor& out_N)> reduce_rows(
    "reduce_rows");

/// Throws Error unless parts is [R, N] with R >= 1, and out has N elements of the same dtype.
inline void check_reduce_rows(const Tensor& parts_RN, const Tensor& out_N) {
  SHOAL_CHECK(parts_RN.dims() == 2 && parts_RN.size(0) >= 1 && parts_RN.size(1) == out_N.numel() &&
                  parts_RN.dtype() == out_N.dtype(),
              "reduce_rows: expected parts ", out_N.dtype(), " [R, ", out_N.numel(), "] for out ",
              out_N.shape(), ", got ", parts_RN.dtype(), ' ', parts_RN.shape());
}

}  // namespace shoal
