// Splits of layers over pipeline stages.
#include "models/stage_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/base/random.h"
#include "tests/support/error_of.h"

namespace shoal {
namespace {

using Counts = std::vector<int64_t>;

double largest_cost(const std::vector<double>& costs, double first, double last, const Counts& counts) {
  double largest = 0;
  size_t at = 0;
  for (size_t stage = 0; stage < counts.size(); stage++) {
    double sum = (stage == 0 ? first : 0) + (stage + 1 == counts.size() ? last : 0);
    for (int64_t i = 0; i < counts[stage]; i++) sum += costs[at++];
    largest = std::max(largest, sum);
  }
  return largest;
}

TEST(StageLayout, EqualLayersAreSpreadEvenlyAndAHeadTakesThePlaceOfLayers) {
  const std::vector<double> eight(8, 1.0);
  EXPECT_EQ(balanced_stages(eight, 0, 0, 4), (Counts{2, 2, 2, 2}));
  EXPECT_EQ(balanced_stages(eight, 0, 2, 5), (Counts{2, 2, 2, 1, 1}));
  EXPECT_EQ(balanced_stages({1, 1, 1, 1, 4}, 0, 0, 2), (Counts{4, 1}));
  EXPECT_EQ(balanced_stages({1, 1}, 100, 100, 2), (Counts{1, 1}));
}

TEST(StageLayout, NoOtherSplitHasASmallerLargestStage) {
  const RandomStream random(3, "costs");
  for (uint64_t trial = 0; trial < 60; trial++) {
    const auto n = static_cast<int64_t>(3 + random.below(3 * trial, 6));
    const int stages = static_cast<int>(1 + random.below(3 * trial + 1, 4));
    if (n < stages) continue;
    std::vector<double> costs;
    for (int64_t l = 0; l < n; l++)
      costs.push_back(random.uniform(1000 + 10 * trial + static_cast<uint64_t>(l)));
    const double first = random.uniform(5000 + trial), last = 2 * random.uniform(6000 + trial);
    double best = 1e9;
    Counts counts(static_cast<size_t>(stages), 1);
    const std::function<void(size_t, int64_t)> try_all = [&](size_t stage, int64_t left) {
      if (stage + 1 == counts.size()) {
        counts[stage] = left;
        best = std::min(best, largest_cost(costs, first, last, counts));
        return;
      }
      for (int64_t c = 1; left - c >= stages - 1 - static_cast<int64_t>(stage); c++) {
        counts[stage] = c;
        try_all(stage + 1, left - c);
      }
    };
    try_all(0, n);
    const Counts got = balanced_stages(costs, first, last, stages);
    EXPECT_EQ(std::accumulate(got.begin(), got.end(), int64_t{0}), n);
    EXPECT_GE(*std::ranges::min_element(got), 1);
    EXPECT_NEAR(largest_cost(costs, first, last, got), best, 1e-9) << "trial " << trial;
  }
}

TEST(StageLayout, RefusesMoreStagesThanLayers) {
  EXPECT_NE(testing::error_of([] {
              balanced_stages({1, 1}, 0, 0, 3);
            }).find("at least 3 layers"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
