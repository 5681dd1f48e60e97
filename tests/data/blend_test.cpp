#include "data/blend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/base/error.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

/// The greedy rule step by step, in floating point.
std::vector<int64_t> greedy(std::vector<double> weights, int64_t steps) {
  double sum = 0;
  for (const double w : weights) sum += w;
  std::vector<int64_t> taken(weights.size()), picks;
  for (int64_t n = 0; n < steps; n++) {
    size_t best = 0;
    double best_deficit = -1e300;
    for (size_t i = 0; i < weights.size(); i++) {
      const double deficit =
          weights[i] / sum * static_cast<double>(std::max<int64_t>(n, 1)) - static_cast<double>(taken[i]);
      if (weights[i] > 0 && deficit > best_deficit + 1e-12) {
        best = i;
        best_deficit = deficit;
      }
    }
    taken[best]++;
    picks.push_back(static_cast<int64_t>(best));
  }
  return picks;
}

TEST(Blend, FollowsMegatronsGreedyRuleWithinOnePeriod) {
  for (const auto& weights :
       std::vector<std::vector<double>>{{1}, {0.5, 0.5}, {0.3, 0.7}, {.2, .3, .5}, {3, 1, 1}}) {
    const Blend blend(weights);
    const auto expected = greedy(weights, blend.period());
    std::vector<int64_t> taken(weights.size());
    for (int64_t n = 0; n < blend.period(); n++) {
      const auto pick = blend.at(n);
      EXPECT_EQ(pick.stream, expected[static_cast<size_t>(n)]) << "step " << n;
      EXPECT_EQ(pick.sample, taken[static_cast<size_t>(pick.stream)]++);
    }
  }
}

TEST(Blend, DT_11_CountsStayWithinOneOfTheTarget) {
  const std::vector<std::vector<double>> cases = {
      {.999, .001}, {.5, 0, .5}, {2, 3}, {1.5, 2.5, 1}, {1.0 / 3, 2.0 / 3}, {0.123456789, 0.876543211},
      {1e-7, 1}};
  for (const auto& weights : cases) {
    double sum = 0;
    for (const double w : weights) sum += w;
    const Blend blend(weights);
    std::vector<int64_t> taken(weights.size());
    for (int64_t n = 0; n < 1000; n++) {
      for (size_t i = 0; i < weights.size(); i++) {
        ASSERT_EQ(blend.taken(static_cast<int64_t>(i), n), taken[i])
            << "stream " << i << " before step " << n;
      }
      const auto pick = blend.at(n);
      ASSERT_EQ(pick.sample, taken[static_cast<size_t>(pick.stream)]++);
      for (size_t i = 0; i < weights.size(); i++) {
        ASSERT_LE(std::abs(static_cast<double>(taken[i]) - weights[i] / sum * static_cast<double>(n + 1)),
                  1.0)
            << n;
      }
    }
  }
}

TEST(Blend, DT_11_WeightZeroIsNeverTakenAndExactSharesAreExact) {
  const Blend blend({0, .999, .001, 0});
  EXPECT_EQ(blend.period(), 1000);
  EXPECT_EQ(blend.taken(0, 1'000'000), 0);
  EXPECT_EQ(blend.taken(1, 1'000'000), 999'000);
  EXPECT_EQ(blend.taken(2, 1'000'000), 1000);
  const Blend one({0, 5});
  EXPECT_EQ(one.at(12).stream, 1);
  EXPECT_EQ(one.at(12).sample, 12);
}

TEST(Blend, DT_07_AnyIndexIsReachedDirectly) {
  const Blend blend({.25, .75});
  const int64_t n = (int64_t{1} << 40) + 1;
  EXPECT_EQ(blend.taken(0, n - 1), int64_t{1} << 38);
  const auto pick = blend.at(n);
  EXPECT_EQ(pick.sample, blend.taken(pick.stream, n));
  EXPECT_GT(pick.sample, int64_t{1} << 37);
}

TEST(Blend, UnusableWeightsAreRefused) {
  using testing::error_of;
  EXPECT_NE(error_of<UsageError>([] {
              Blend({-1, 2});
            }).find(">= 0, got -1 for source 0"),
            std::string::npos);
  EXPECT_NE(error_of<UsageError>([] { Blend({0, 0}); }).find("at least one positive"), std::string::npos);
  EXPECT_NE(error_of<UsageError>([] { Blend({}); }).find("at least one positive"), std::string::npos);
  EXPECT_THROW(Blend({std::nan(""), 1}), UsageError);
  EXPECT_THROW(Blend({std::numeric_limits<double>::infinity(), 1}), UsageError);
}

}  // namespace
}  // namespace shoal
