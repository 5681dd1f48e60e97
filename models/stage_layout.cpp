#include "models/stage_layout.h"

#include <algorithm>
#include <numeric>

#include "core/base/error.h"

namespace shoal {

namespace {

/// Each stage takes as many layers as it may within `limit`, and leaves one for each stage behind it. Empty
/// when the last one gets too much.
std::vector<int64_t> fill_stages(const std::vector<double>& costs, double first, double last, int num_stages,
                                 double limit) {
  std::vector<int64_t> counts;
  auto at = costs.begin();
  for (int stage = 0; stage < num_stages; stage++) {
    const int64_t behind = num_stages - 1 - stage;
    double sum = (stage == 0 ? first : 0) + (behind == 0 ? last : 0);
    int64_t count = 0;
    while (costs.end() - at > behind && (count == 0 || behind == 0 || sum + *at <= limit)) {
      sum += *at++;
      count++;
    }
    if (sum > limit) return {};
    counts.push_back(count);
  }
  return counts;
}

}  // namespace

std::vector<int64_t> balanced_stages(const std::vector<double>& layer_costs, double first, double last,
                                     int num_stages) {
  SHOAL_CHECK(num_stages >= 1 && std::ssize(layer_costs) >= num_stages, "pipeline: expected at least ",
              num_stages, " layers for as many stages, got ", layer_costs.size());
  double low = 0, high = std::accumulate(layer_costs.begin(), layer_costs.end(), first + last);
  std::vector<int64_t> best = fill_stages(layer_costs, first, last, num_stages, high);
  constexpr int kHalvings = 60;  // as far as doubles tell costs apart
  for (int i = 0; i < kHalvings; i++) {
    const double middle = (low + high) / 2;
    std::vector<int64_t> counts = fill_stages(layer_costs, first, last, num_stages, middle);
    if (counts.empty()) {
      low = middle;
    } else {
      high = middle;
      best = std::move(counts);
    }
  }
  if (num_stages == 1) return best;
  // The stages in front of the last one as even as they can be by themselves.
  const std::vector<double> others(layer_costs.begin(), layer_costs.end() - best.back());
  std::vector<int64_t> counts = balanced_stages(others, first, 0, num_stages - 1);
  counts.push_back(best.back());
  return counts;
}

std::vector<StageLayers> stage_ranges(const std::vector<int64_t>& layers_per_stage) {
  std::vector<StageLayers> ranges;
  int64_t begin = 0;
  for (const int64_t count : layers_per_stage) {
    ranges.push_back({begin, begin + count});
    begin += count;
  }
  return ranges;
}

}  // namespace shoal
