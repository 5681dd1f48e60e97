#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace shoal {
namespace {

std::unique_ptr<Schedule> make(const std::string& kind, const std::string& settings, double peak,
                               int64_t total) {
  Choice choice{kind, ScheduleRegistry::instance().make_options(kind)};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text("{" + settings + "}", "test", errors), "",
      [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  errors.throw_if_any();
  return ScheduleRegistry::make(choice, ScheduleContext{peak, total});
}

void expect_rates(const Schedule& schedule, const std::vector<double>& rates, double tolerance) {
  for (size_t i = 0; i < rates.size(); i++)
    EXPECT_NEAR(schedule.at(static_cast<int64_t>(i) + 1), rates[i], tolerance) << "step " << i + 1;
}

TEST(Schedule, LR_01_CosineWithWarmupWastesNoStep) {
  const auto cosine = make("cosine", "warmup_steps: 4, min_ratio: 0.1", 1, 10);
  expect_rates(*cosine, {0.25, 0.5, 0.75, 1, 0.9397, 0.775, 0.55, 0.325, 0.1603, 0.1}, 5e-5);
}

TEST(Schedule, LR_05_PastTheEndTheRateStaysAtItsMinimum) {
  for (const char* kind : {"cosine", "linear", "wsd"}) {
    const auto schedule = make(kind, "warmup_steps: 2, min_ratio: 0.1", 2, 10);
    for (int64_t step = 10; step <= 25; step++)
      EXPECT_DOUBLE_EQ(schedule->at(step), 0.2) << kind << " step " << step;
  }
}

TEST(Schedule, ConstantStaysAtThePeakAfterWarmup) {
  expect_rates(*make("constant", "warmup_steps: 2", 0.5, 4), {0.25, 0.5, 0.5, 0.5, 0.5}, 0);
}

TEST(Schedule, LinearFallsInAStraightLine) {
  expect_rates(*make("linear", "warmup_steps: 1, min_ratio: 0", 1, 5), {1, 0.75, 0.5, 0.25, 0}, 1e-15);
}

TEST(Schedule, WsdIsFlatUntilItsDecayBegins) {
  const auto wsd = make("wsd", "warmup_steps: 2, min_ratio: 0, decay_share: 0.4", 1, 10);
  expect_rates(*wsd, {0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0}, 1e-15);
  const auto root = make("wsd", "min_ratio: 0, decay_share: 0.4, decay: sqrt", 1, 10);
  EXPECT_NEAR(root->at(7), 1 - std::sqrt(0.25), 1e-15);
}

TEST(Schedule, ATrainingShorterThanItsWarmupOnlyWarmsUp) {
  expect_rates(*make("cosine", "warmup_steps: 10", 1, 4), {0.1, 0.2, 0.3, 0.4}, 1e-15);
}

}  // namespace
}  // namespace shoal
