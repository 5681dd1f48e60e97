// Learning-rate schedules: pure functions of the step, so resuming needs no state. Registered by name.
//   step s counts from 1 (the first step). Warm-up over W steps: peak * s / W for s <= W (so no step has rate
//   0). After it, the shape runs over progress p = (s - W) / (total - W), clamped to [0, 1]: past the end the
//   rate stays.
#pragma once

#include <cstdint>
#include <memory>

#include "core/base/registry.h"

namespace shoal {

struct ScheduleContext {
  double peak = 1e-3;
  int64_t total_steps = 1;
};

class Schedule {
 public:
  virtual ~Schedule() = default;
  /// The learning rate of step s >= 1.
  virtual double at(int64_t step) const = 0;
};
using ScheduleRegistry = Registry<Schedule, const ScheduleContext&>;

/// Options that all schedules share.
struct WarmupOptions : Options {
  int64_t warmup_steps = 0;
  double min_ratio = 0.1;
  void fields(FieldVisitor& v) override;
};

/// Warm-up, then peak * shape(progress).
class WarmupSchedule : public Schedule {
 public:
  WarmupSchedule(const WarmupOptions& options, const ScheduleContext& context)
      : options_(options), context_(context) {}
  double at(int64_t step) const final;

 protected:
  /// Factor on the peak after `steps_after_warmup` steps; progress in [0, 1].
  virtual double shape(double progress, int64_t steps_after_warmup) const = 0;
  const WarmupOptions& options() const { return options_; }
  const ScheduleContext& context() const { return context_; }
  /// min_ratio at f = 0, 1 at f = 1.
  double between(double f) const { return options_.min_ratio + (1 - options_.min_ratio) * f; }

 private:
  WarmupOptions options_;
  ScheduleContext context_;
};

}  // namespace shoal
