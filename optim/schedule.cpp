#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace shoal {

void WarmupOptions::fields(FieldVisitor& v) {
  v("warmup_steps", warmup_steps, "the rate rises linearly to its peak over this many steps",
    in_range(0, kMaxCount));
  v("min_ratio", min_ratio, "rate at the end, as a share of the peak", in_range(0, 1));
}

double WarmupSchedule::at(int64_t step) const {
  const int64_t warmup = options_.warmup_steps, s = std::max<int64_t>(step, 1);
  if (s <= warmup) return context_.peak * static_cast<double>(s) / static_cast<double>(warmup);
  const auto span = static_cast<double>(std::max<int64_t>(1, context_.total_steps - warmup));
  const double progress = std::clamp(static_cast<double>(s - warmup) / span, 0.0, 1.0);
  return context_.peak * shape(progress, s - warmup);
}

namespace {

class Constant final : public WarmupSchedule {
 public:
  using WarmupSchedule::WarmupSchedule;

 protected:
  double shape(double, int64_t) const override { return 1; }
};

class Linear final : public WarmupSchedule {
 public:
  using WarmupSchedule::WarmupSchedule;

 protected:
  double shape(double progress, int64_t) const override { return between(1 - progress); }
};

class Cosine final : public WarmupSchedule {
 public:
  using WarmupSchedule::WarmupSchedule;

 protected:
  double shape(double progress, int64_t) const override {
    return between(0.5 * (1 + std::cos(std::numbers::pi * progress)));
  }
};

struct WsdOptions final : WarmupOptions {
  double decay_share = 0.2;
  std::string decay = "linear";
  void fields(FieldVisitor& v) override {
    WarmupOptions::fields(v);
    v("decay_share", decay_share, "share of all steps, at the end, in which the rate falls", in_range(0, 1));
    v("decay", decay, "how it falls", one_of({"linear", "cosine", "sqrt"}));
  }
};

/// Warm-up, stable, decay (Hu et al., arXiv:2404.06395, section 4); "sqrt" is 1 - sqrt(p) (arXiv:2405.18392).
class Wsd final : public WarmupSchedule {
 public:
  Wsd(const WsdOptions& options, const ScheduleContext& context)
      : WarmupSchedule(options, context), wsd_(options) {}

 protected:
  double shape(double, int64_t steps_after_warmup) const override {
    const auto decay_steps =
        static_cast<double>(std::llround(wsd_.decay_share * static_cast<double>(context().total_steps)));
    const auto left =
        static_cast<double>(context().total_steps - options().warmup_steps - steps_after_warmup);
    if (decay_steps <= 0 || left >= decay_steps) return 1;
    const double p = std::clamp(1 - left / decay_steps, 0.0, 1.0);
    if (wsd_.decay == "cosine") return between(0.5 * (1 + std::cos(std::numbers::pi * p)));
    return between(wsd_.decay == "sqrt" ? 1 - std::sqrt(p) : 1 - p);
  }

 private:
  WsdOptions wsd_;
};

template <class S, class O = WarmupOptions>
bool add(const char* name, const char* doc) {
  return ScheduleRegistry::add<O>(
      name, doc, [](const O& o, const ScheduleContext& c) { return std::make_unique<S>(o, c); });
}
const bool registered[] = {
    add<Constant>("constant", "warm-up, then the peak for ever"),
    add<Linear>("linear", "warm-up, then a straight line to the minimum"),
    add<Cosine>("cosine", "warm-up, then half a cosine to the minimum (arXiv:1608.03983)"),
    add<Wsd, WsdOptions>("wsd", "warm-up, stable, decay (arXiv:2404.06395)"),
};

}  // namespace

}  // namespace shoal
