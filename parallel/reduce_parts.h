// The arithmetic of the reductions: the same fixed order for every communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/tensor/types.h"
#include "parallel/communicator.h"

namespace shoal {

/// every outs[j][i] = parts[0][i] op parts[1][i] op ..., left to right. bf16 is summed in f32 and rounded
/// once. Outputs may be parts. max and min of floats are NaN when any part is NaN. The first `num_streamed`
/// outputs are other ranks' to read (core/ops/reduce.h).
void reduce_parts(DType dtype, ReduceOp op, std::span<const std::byte* const> parts,
                  std::span<std::byte* const> outs, size_t num_streamed, int64_t count);
inline void reduce_parts(DType dtype, ReduceOp op, std::span<const std::byte* const> parts, std::byte* out,
                         int64_t count) {
  reduce_parts(dtype, op, parts, std::span<std::byte* const>(&out, 1), 0, count);
}

}  // namespace shoal
