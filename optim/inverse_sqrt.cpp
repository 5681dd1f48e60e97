// Inverse square root schedule (Vaswani et al., arXiv:1706.03762, eq. 3): after W warm-up steps the rate
// falls as sqrt(W / step), down to min_ratio. It does not depend on the length of the training.
#include <algorithm>
#include <cmath>

#include "optim/schedule.h"

namespace shoal {

namespace {

class InverseSqrt final : public WarmupSchedule {
 public:
  using WarmupSchedule::WarmupSchedule;

 protected:
  double shape(double, int64_t steps_after_warmup) const override {
    const auto warmup = static_cast<double>(std::max<int64_t>(1, options().warmup_steps));
    const double step = warmup + static_cast<double>(steps_after_warmup);
    return std::max(options().min_ratio, std::sqrt(warmup / step));
  }
};

const bool registered = ScheduleRegistry::add<WarmupOptions>(
    "inverse_sqrt", "warm-up, then sqrt(warmup_steps / step) (arXiv:1706.03762)",
    [](const WarmupOptions& o, const ScheduleContext& c) { return std::make_unique<InverseSqrt>(o, c); });

}  // namespace

}  // namespace shoal
