// Which layers of a model belong to which pipeline stage.
#pragma once

#include <cstdint>
#include <vector>

namespace shoal {

/// Layers [begin, end) of one stage.
struct StageLayers {
  int64_t begin = 0, end = 0;
};

/// Numbers of consecutive layers of each of num_stages stages, at least one each, such that the largest cost
/// of a stage is as small as it can be. `first` is added to the first stage (the embedding), `last` to the
/// last one (head and loss). Throws Error when there are fewer layers than stages.
std::vector<int64_t> balanced_stages(const std::vector<double>& layer_costs, double first, double last,
                                     int num_stages);

/// The same as ranges.
std::vector<StageLayers> stage_ranges(const std::vector<int64_t>& layers_per_stage);

}  // namespace shoal
