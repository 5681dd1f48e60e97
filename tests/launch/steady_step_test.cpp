// A steady training step takes nothing from the system: no memory, and no page that was not touched before,
// although the router sends other numbers of rows to the experts in every step.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <set>

#include "core/base/random.h"
#include "core/base/threads.h"
#include "launch/engine.h"
#include "parallel/moe/dispatcher.h"
#include "tests/support/tiny_model.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kPlainAllocations = true;
#else
constexpr bool kPlainAllocations = false;
#endif

namespace shoal::testing {
namespace {

constexpr int64_t kVocab = 300, kSeq = 64, kRows = 8;
constexpr uint64_t kSeed = 41;
constexpr int kWarmUp = 6, kWindows = 4, kSteps = 3;

const char* const kDense = "layers: 3, hidden_size: 96, heads: 4, kv_heads: 2";
const char* const kMoe =
    "layers: 3, hidden_size: 96, heads: 4, kv_heads: 2, init: {std: 0.3}, moe: {num_experts: 8, top_k: 2, "
    "hidden: "
    "160, shared_experts: 1, first_dense: 1, router: {kind: top_k, score: sigmoid, bias_rate: 0.01}}";
const char* const kPadded =
    "layers: 2, hidden_size: 96, heads: 4, moe: {num_experts: 8, top_k: 2, hidden: 160, first_dense: 1, "
    "capacity_factor: 1.2, pad_to_capacity: true}";

struct Setting {
  const char* model;
  const char* recompute;
  bool bf16;
  int threads, ranks;
  int64_t chunks = 1;
  ZeroStage zero = ZeroStage::none;
  int64_t accumulation = 1;
  std::string text() const {
    return str(model, ", recompute ", recompute, bf16 ? ", bf16, " : ", f32, ", threads, " threads, ", ranks,
               " ranks, ", chunks, " chunks, zero ", static_cast<int>(zero), ", seed ", kSeed);
  }
};

/// Few different tokens, others in each step, so that few experts get most rows, and never the same ones.
ModelBatch batch_of_step(uint64_t step, int rank) {
  const RandomStream random(kSeed, str("step ", step, " rank ", rank));
  const auto first = static_cast<int32_t>(random.below(0, kVocab - 8));
  std::vector<std::vector<int32_t>> rows(kRows);
  uint64_t at = 1;
  for (auto& row : rows)
    for (int64_t s = 0; s < kSeq; s++) row.push_back(first + static_cast<int32_t>(random.below(at++, 8)));
  return batch_of(rows);
}

int64_t page_faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt + usage.ru_majflt;
}

struct Seen {
  int64_t allocations = 0;                // requests to the system in all windows
  int64_t least_faults = INT64_MAX;       // in the best window: the kernel may move a page now and then
  std::set<std::vector<int64_t>> counts;  // of the experts
};

Choice all_to_all_choice(int64_t chunks) {
  Choice choice{"all_to_all", DispatcherRegistry::instance().make_options("all_to_all")};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text(str("{chunks: ", chunks, "}"), "test", errors), "",
      [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  errors.throw_if_any();
  return choice;
}

Seen train(const Setting& s, const std::shared_ptr<Communicator>& world) {
  ParallelLayout layout;
  layout.dp = layout.ep = world->size();
  const Mesh mesh(world, layout);
  EngineOptions options;
  options.model = Choice{"transformer", transformer_options(str(s.model, ", recompute: ", s.recompute))};
  options.optimizer = Choice{"adamw", nullptr};
  options.dispatcher = all_to_all_choice(s.chunks);
  options.vocab_size = kVocab;
  options.seq_len = kSeq;
  options.bf16 = s.bf16;
  options.zero = s.zero;
  TrainEngine engine(options, mesh);
  std::vector<ModelBatch> batches;
  for (int i = 0; i < kWarmUp + kWindows * kSteps; i++)
    batches.push_back(batch_of_step(static_cast<uint64_t>(i), world->rank()));
  Seen seen;
  const auto step = [&](int i) {
    const std::vector<ModelBatch> micro_batches(static_cast<size_t>(s.accumulation),
                                                batches[static_cast<size_t>(i)]);
    const StepResult result = engine.step(micro_batches, 1e-4);
    for (const MoeStepStats& layer : result.moe) seen.counts.insert(layer.counts_E);
  };
  for (int i = 0; i < kWarmUp; i++) step(i);
  const MemoryStats before = device_runtime(DeviceType::cpu).stats();
  const auto window = [&](int w) {
    const int64_t faults = page_faults();
    for (int i = 0; i < kSteps; i++) step(kWarmUp + w % kWindows * kSteps + i);
    seen.least_faults = std::min(seen.least_faults, page_faults() - faults);
  };
  for (int w = 0; w < kWindows; w++) window(w);
  // A busy kernel moves pages more often; steps that take pages do so in each window.
  for (int w = 0; w < 10 * kWindows && !world->all_true(seen.least_faults == 0); w++) window(w);
  seen.allocations =
      device_runtime(DeviceType::cpu).stats().num_system_allocations - before.num_system_allocations;
  return seen;
}

TEST(SteadyStep, TakesNoMemoryAndNoPageFromTheSystem) {
  if (kPlainAllocations) GTEST_SKIP() << "sanitizers use plain allocations";
  constexpr const char* kSelected = "[norms, activations, up_projections, packed_weights]";
  for (const Setting& s : {Setting{kDense, "none", false, 1, 1},
                           {kDense, "none", true, 2, 1},
                           {kDense, kSelected, true, 1, 1},
                           {kMoe, "none", false, 2, 1},
                           {kMoe, "none", true, 1, 1},
                           {kMoe, kSelected, false, 1, 1},
                           {kMoe, kSelected, true, 2, 1},
                           {kMoe, "block", false, 1, 1},
                           {kMoe, "none", false, 1, 2},
                           {kMoe, "none", false, 1, 2, 3},
                           {kMoe, kSelected, true, 1, 2, 2},
                           {kPadded, "none", false, 1, 2, 2},
                           {kMoe, kSelected, true, 1, 2},
                           {kMoe, "block", true, 1, 2},
                           {kMoe, "none", true, 1, 2, 1, ZeroStage::optimizer_state},
                           {kMoe, "none", false, 1, 2, 1, ZeroStage::gradients},
                           {kDense, kSelected, true, 1, 2, 1, ZeroStage::gradients, 2},
                           {kMoe, "none", true, 1, 2, 1, ZeroStage::parameters},
                           {kDense, "block", false, 1, 2, 1, ZeroStage::parameters, 2}}) {
    set_num_threads(s.threads);
    Seen seen;
    run_ranks(s.ranks, [&](const std::shared_ptr<Communicator>& world) {
      Seen mine = train(s, world);
      if (world->rank() == 0) seen = std::move(mine);
    });
    set_num_threads(1);
    EXPECT_EQ(seen.allocations, 0) << s.text();
    EXPECT_EQ(seen.least_faults, 0) << s.text();
    if (s.model == kMoe) {
      EXPECT_GT(seen.counts.size(), static_cast<size_t>(kWindows * kSteps)) << "same rows each step";
    }
  }
}

}  // namespace
}  // namespace shoal::testing
