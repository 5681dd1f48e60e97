// Where a parameter lives: which mesh axes shard it. Plain data; the mesh itself is in parallel/mesh.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

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

/// Dense parameters are replicated over dp; expert parameters are sharded over ep and replicated over edp.
enum class Grid : uint8_t { dense, expert };

struct Placement {
  Grid grid = Grid::dense;
  int shard_dim = -1;  // -1: whole on every rank of its grid
  Axis shard_axis = Axis::tp;

  static Placement replicated() { return {}; }
  /// Experts are dimension 0 of the parameter, split over ep.
  static Placement expert() { return {Grid::expert, 0, Axis::ep}; }
  /// The axis over which this parameter is replicated, so over which its gradient is summed.
  Axis replica_axis() const { return grid == Grid::dense ? Axis::dp : Axis::edp; }
};

/// The slice of dimension `size` that shard `coord` holds: sizes differ by at most one, larger ones first.
struct ShardRange {
  int64_t begin = 0, end = 0;
};
ShardRange shard_range(int64_t size, AxisCoord coord);

}  // namespace shoal
