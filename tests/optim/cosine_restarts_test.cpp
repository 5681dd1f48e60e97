#include <gtest/gtest.h>

#include <cmath>

#include "optim/schedule.h"

namespace shoal {
namespace {

std::unique_ptr<Schedule> make(const std::string& kind, const std::string& settings, int64_t total) {
  const Choice choice{kind, ScheduleRegistry::instance().make_options(kind)};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text("{" + settings + "}", "test", errors), "",
      [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  errors.throw_if_any();
  return ScheduleRegistry::make(choice, ScheduleContext{2, total});
}

TEST(CosineRestarts, FallsToTheMinimumInEachCycleAndStartsAgain) {
  const auto schedule = make("cosine_restarts", "warmup_steps: 2, min_ratio: 0, cycle_steps: 4", 100);
  EXPECT_DOUBLE_EQ(schedule->at(1), 1);
  EXPECT_DOUBLE_EQ(schedule->at(2), 2);
  for (const int64_t start : {2, 6, 10, 94}) {
    EXPECT_NEAR(schedule->at(start + 1), 1 + std::sqrt(0.5), 1e-12) << start;
    EXPECT_NEAR(schedule->at(start + 2), 1, 1e-12) << start;
    EXPECT_NEAR(schedule->at(start + 3), 1 - std::sqrt(0.5), 1e-12) << start;
    EXPECT_NEAR(schedule->at(start + 4), 0, 1e-12) << start;
  }
}

TEST(CosineRestarts, FarStepsAreNotWalkedTo) {
  const auto schedule = make("cosine_restarts", "warmup_steps: 2, min_ratio: 0, cycle_steps: 4", 100);
  EXPECT_NEAR(schedule->at(2 + 4 * int64_t{100'000'000'000} + 2), 1, 1e-12);
}

TEST(CosineRestarts, CyclesGrowByTheirFactor) {
  const auto schedule =
      make("cosine_restarts", "min_ratio: 0.5, cycle_steps: 2, cycle_growth: 3", 100);  // 2, 6, 18 steps
  for (const int64_t end : {2, 8, 26}) {
    EXPECT_NEAR(schedule->at(end), 1, 1e-12) << end;
    EXPECT_GT(schedule->at(end + 1), 1.9) << end;
  }
  EXPECT_NEAR(schedule->at(5), 1.5, 1e-12);
  EXPECT_NEAR(schedule->at(17), 1.5, 1e-12);
}

TEST(CosineRestarts, OneCycleIsTheCosineSchedule) {
  const auto one = make("cosine_restarts", "warmup_steps: 3, cycle_steps: 17", 20);
  const auto cosine = make("cosine", "warmup_steps: 3", 20);
  for (int64_t step = 1; step <= 20; step++) EXPECT_NEAR(one->at(step), cosine->at(step), 1e-12) << step;
}

TEST(CosineRestarts, RefusesCyclesThatShrink) {
  EXPECT_THROW(make("cosine_restarts", "cycle_growth: 0.5", 10), UsageError);
  EXPECT_THROW(make("cosine_restarts", "cycle_steps: 0", 10), UsageError);
}

}  // namespace
}  // namespace shoal
