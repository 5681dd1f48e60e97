// Where a parameter lives: which mesh axes shard it. Plain data; the mesh itself is in parallel/mesh.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/tensor/types.h"

namespace shoal {

/// The axes of the two views of the same ranks: dense {tp, cp, dp, pp} and expert {etp, ep, edp, pp}.
enum class Axis : uint8_t { tp, cp, dp, pp, etp, ep, edp };
inline constexpr int kNumAxes = 7;
const char* axis_name(Axis axis);

/// This rank's index on an axis and the axis' size.
struct AxisCoord {
  int index = 0, size = 1;
};
struct AxisCoords {
  std::array<AxisCoord, kNumAxes> coords{};
  AxisCoord& operator[](Axis axis) { return coords[static_cast<size_t>(axis)]; }
  const AxisCoord& operator[](Axis axis) const { return coords[static_cast<size_t>(axis)]; }
};

/// Ranks of a stage hold a parameter by their coordinates in one of the grids.
enum class Grid : uint8_t { dense, expert };

/// One dimension of a parameter that is cut over an axis.
struct ShardedDim {
  int dim = -1;  // -1: none
  Axis axis = Axis::tp;
  /// The dimension is cut into at most so many parts, whose number divides the axis then: neighbours on it
  /// hold the same part. 0: a part for each rank of the axis.
  int max_parts = 0;
  /// Cuts over the neighbours that hold the same of `max_parts` parts.
  bool within = false;
};

/// Which part of a parameter a rank holds. Ranks of a stage that hold the same part are replicas: their
/// gradients are summed.
struct Placement {
  static constexpr int kMaxSharded = 2;
  Grid grid = Grid::dense;
  std::array<ShardedDim, kMaxSharded> sharded{};

  static Placement replicated() { return {}; }
  /// Dimension `dim` is split over tp.
  static Placement tensor(int dim, int max_parts = 0) {
    return {Grid::dense, {ShardedDim{dim, Axis::tp, max_parts, false}}};
  }
  /// Dimension `dim` is split over tp in at most `max_parts` parts, and `inner` over the ranks of each part.
  static Placement nested(int dim, int max_parts, int inner) {
    return {Grid::dense,
            {ShardedDim{dim, Axis::tp, max_parts}, ShardedDim{inner, Axis::tp, max_parts, true}}};
  }
  /// Experts are dimension 0 of the parameter, split over ep.
  static Placement expert() { return {Grid::expert, {ShardedDim{0, Axis::ep}}}; }
  /// Experts are dimension 0; each is cut along `dim` over etp.
  static Placement expert(int dim) {
    return {Grid::expert, {ShardedDim{0, Axis::ep}, ShardedDim{dim, Axis::etp}}};
  }
};

/// Which of how many parts of a sharded dimension a rank with these coordinates holds.
AxisCoord part_of(const ShardedDim& sharded, const AxisCoords& coords);

/// The slice of dimension `size` that shard `coord` holds: sizes differ by at most one, larger ones first.
struct ShardRange {
  int64_t begin = 0, end = 0;
};
ShardRange shard_range(int64_t size, AxisCoord coord);

/// A rectangular piece of a global tensor: elements start[d] <= i[d] < start[d] + extent[d].
struct Box {
  Shape start, extent;
  int64_t numel() const { return extent.numel(); }
  bool operator==(const Box&) const = default;
  /// All of a tensor.
  static Box whole(const Shape& shape);
};
/// What a rank with these coordinates holds of a tensor.
Box box_of(const Shape& global_shape, const Placement& placement, const AxisCoords& coords);

}  // namespace shoal
