// Cosine with warm restarts (Loshchilov & Hutter, arXiv:1608.03983, section 3): after the warm-up the rate
// falls along half a cosine to its minimum, then starts again from the peak; each cycle may be longer than
// the one before.
#include <cmath>
#include <numbers>

#include "optim/schedule.h"

namespace shoal {

namespace {

struct CosineRestartsOptions final : WarmupOptions {
  int64_t cycle_steps = 1000;
  double cycle_growth = 1;
  void fields(FieldVisitor& v) override {
    WarmupOptions::fields(v);
    v("cycle_steps", cycle_steps, "steps of the first cycle, which begins after the warm-up",
      in_range(1, kMaxCount));
    v("cycle_growth", cycle_growth, "each cycle is this many times as long as the one before",
      in_range(1, 100));
  }
};

class CosineRestarts final : public WarmupSchedule {
 public:
  CosineRestarts(const CosineRestartsOptions& options, const ScheduleContext& context)
      : WarmupSchedule(options, context),
        first_length_(static_cast<double>(options.cycle_steps)),
        growth_(options.cycle_growth) {}

 protected:
  double shape(double, int64_t steps_after_warmup) const override {
    double step = static_cast<double>(steps_after_warmup), length = first_length_;
    if (growth_ == 1 && step > length) step -= (std::ceil(step / length) - 1) * length;
    while (step > length) {  // few: cycles grow
      step -= length;
      length *= growth_;
    }
    return between(0.5 * (1 + std::cos(std::numbers::pi * step / length)));
  }

 private:
  double first_length_, growth_;  // steps; factor from cycle to cycle
};

const bool registered = ScheduleRegistry::add<CosineRestartsOptions>(
    "cosine_restarts", "warm-up, then cosine cycles that restart at the peak (arXiv:1608.03983)",
    [](const CosineRestartsOptions& o, const ScheduleContext& c) {
      return std::make_unique<CosineRestarts>(o, c);
    });

}  // namespace

}  // namespace shoal
