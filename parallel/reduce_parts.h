// The arithmetic of the reductions: the same fixed order for every communicator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/tensor/types.h"
#include "parallel/communicator.h"

namespace shoal {

/// out[i] = parts[0][i] op parts[1][i] op ..., left to right. bf16 is summed in f32 and rounded once. out may
/// be one of the parts. max and min of floats are NaN when any part is NaN.
void reduce_parts(DType dtype, ReduceOp op, std::span<const std::byte* const> parts, std::byte* out,
                  int64_t count);

}  // namespace shoal
