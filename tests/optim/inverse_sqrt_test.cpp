#include <gtest/gtest.h>

#include "optim/schedule.h"

namespace shoal {
namespace {

std::unique_ptr<Schedule> make(int64_t warmup, double min_ratio, int64_t total) {
  auto options = std::make_shared<WarmupOptions>();
  options->warmup_steps = warmup;
  options->min_ratio = min_ratio;
  return ScheduleRegistry::make({"inverse_sqrt", options}, ScheduleContext{2, total});
}

TEST(InverseSqrt, RisesToThePeakThenFallsWithTheRootOfTheStep) {
  const auto schedule = make(4, 0, 100);
  EXPECT_DOUBLE_EQ(schedule->at(1), 0.5);
  EXPECT_DOUBLE_EQ(schedule->at(4), 2);
  EXPECT_DOUBLE_EQ(schedule->at(16), 1);
  EXPECT_DOUBLE_EQ(schedule->at(64), 0.5);
}

TEST(InverseSqrt, DoesNotDependOnTheLengthOfTheTrainingAndStopsAtItsMinimum) {
  for (const int64_t step : {1, 7, 30}) EXPECT_EQ(make(4, 0, 10)->at(step), make(4, 0, 1000)->at(step));
  EXPECT_DOUBLE_EQ(make(1, 0.5, 10)->at(1000), 1);
}

}  // namespace
}  // namespace shoal
