#include "launch/rank_invariant.h"

#include <functional>
#include <tuple>

#include "core/autograd/exact_sum.h"

namespace shoal {

namespace {

/// Of the sums of a gradient: a tied embedding is used twice.
constexpr int64_t kMaxSequences = ExactSum::kMaxSummands / 2;

void check_layout(const ParallelOptions& parallel,
                  const std::function<void(const char* key, const std::string& problem)>& add) {
  for (const auto& [key, ranks, what] :
       {std::tuple{"parallel.tp", parallel.tp, "the inner dimension of matrix products"},
        std::tuple{"parallel.etp", parallel.etp, "the inner dimension of the experts' products"},
        std::tuple{"parallel.cp", parallel.cp, "the sums over the tokens of a sequence"}}) {
    if (ranks > 1)
      add(key, str("expected 1, because it cuts ", what,
                   ", whose parts are rounded before they are added, got ", ranks, "; use dp, ep and pp"));
  }
  if (parallel.zero > 1)
    add("parallel.zero", str("expected 0 or 1, because exact sums of gradients are not divided, got ",
                             parallel.zero, "; set zero: 1"));
}

}  // namespace

void check_rank_invariant(const TrainConfig& config, const ConfigNode& tree, ConfigErrors& errors) {
  if (!config.run.rank_invariant()) return;
  const auto add = [&](const std::string& key, const std::string& problem) {
    errors.add(key, origin_of(tree, key), "with run.deterministic: rank_invariant " + problem);
  };
  if (config.run.device != "cpu")
    add("run.device", str("expected cpu, because exact sums have no kernels of other devices, got ",
                          config.run.device, "; set run.deterministic: same_layout"));
  check_layout(config.parallel, add);
  for (const LayoutDependence& d : config.model_options().layout_dependences()) add("model." + d.key, d.fix);
  if (config.data.global_batch > kMaxSequences)
    add("data.global_batch",
        str("expected at most ", kMaxSequences, " sequences, got ", config.data.global_batch, "; lower it"));
}

}  // namespace shoal
