// Sums and copies between the memories of ranks, for the collectives. "Streamed" bytes go past the caches: a
// store to a line that another core has read waits until that core has dropped it, which on some placements
// of two cores takes ten times as long as the way through main memory. Streamed stores are complete on
// return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/tensor/kernel.h"

namespace shoal {

/// every outs[j][i] = parts[0][i] + parts[1][i] + ..., left to right, `count` elements; f32, f64, bf16
/// (summed in f32, rounded once). Two parts or more. Outputs may be parts. The first `num_streamed` outputs
/// are streamed.
inline constinit Kernel<void(DType dtype, std::span<const std::byte* const> parts,
                             std::span<std::byte* const> outs, size_t num_streamed, int64_t count)>
    sum_parts("sum_parts");
/// memcpy, streamed unless it is small.
inline constinit Kernel<void(std::byte* to, const std::byte* from, int64_t bytes)> stream_bytes(
    "stream_bytes");

}  // namespace shoal
