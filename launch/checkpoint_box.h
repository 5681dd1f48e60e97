// Rectangular pieces of a logical tensor in global coordinates: intersection, coverage, and the contiguous
// runs that two row-major buffers share. Plain arithmetic; the checkpoint writer and reader use it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/nn/placement.h"

namespace shoal {

/// "[0, 4] + [2, 8]" (start + extent).
std::string box_text(const Box& box);

/// Empty when they share no element. Both must have the same number of dimensions.
std::optional<Box> intersect(const Box& a, const Box& b);

/// Elements [begin, end) of the row-major buffer of `box`, as boxes one after the other: at most 2 dims - 1.
std::vector<Box> boxes_of_range(const Box& box, ShardRange range);

/// "" when the pieces cover a tensor of this shape exactly once; otherwise what is missing or doubled.
std::string coverage_problem(const Shape& shape, const std::vector<Box>& pieces);

/// Calls run(offset_a, offset_b, count) for the longest runs of `part` that are contiguous in the row-major
/// buffers of both a and b (offsets and counts in elements, offset_a ascending). `part` lies inside both.
void for_each_run(const Box& part, const Box& a, const Box& b,
                  const std::function<void(int64_t, int64_t, int64_t)>& run);

}  // namespace shoal
