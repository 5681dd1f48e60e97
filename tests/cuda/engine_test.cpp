// The whole engine with every tensor on the device: losses, gradients, updated weights and router state of
// the CPU.
#include <mutex>

#include "core/tensor/stream.h"
#include "parallel/device_world.h"
#include "tests/cuda/standin/streams.h"
#include "tests/cuda/support.h"
#include "tests/parity/layouts.h"
#include "tests/support/parity.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using standin::Policy;

class CudaEngine : public ::testing::Test {
 protected:
  CudaEngine() { log::set_quiet(true); }
  void TearDown() override {
    standin::set_options({});
    log::set_quiet(false);
  }
};

/// What rank 0 of so many ranks gets.
ParityResult run_on(Device device, ParityCase c, int ranks = 1) {
  c.device = device;
  ParityResult result;
  run_ranks(ranks, [&](const std::shared_ptr<Communicator>& host) {
    const NarrowLaunches narrow(64, 8);  // fewer threads to emulate
    const ParityResult mine = run_parity(c, device_world(host, device));
    if (host->rank() == 0) result = mine;
  });
  return result;
}

TEST_F(CudaEngine, OneRankTrainsAsOnTheCpu) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const auto& [balance, capacity] :
         {std::pair{"bias", "off"}, {"global", "position"}, {"sequence", "probability"}}) {
      const ParityCase c{.balance = balance, .capacity = capacity, .dtype = dtype, .model = ""};
      standin::set_options({Policy::lazy, 0, 1});
      EXPECT_TRUE(same_result(run_on(kCuda, c), run_on(kCpu, c), dtype == DType::f64 ? 1e-11 : 1e-4))
          << c.name(1);
    }
  }
}

// Sums of bf16 products are in another order than on the CPU, which after some steps sends a token elsewhere.
TEST_F(CudaEngine, OneRankTrainsInMixedPrecisionLikeOnTheCpu) {
  const ParityCase c{.balance = "bias", .dtype = DType::bf16, .model = ""};
  standin::set_options({Policy::lazy, 0, 1});
  const ParityResult got = run_on(kCuda, c), want = run_on(kCpu, c);
  EXPECT_EQ(got.counts.front(), want.counts.front());
  EXPECT_TRUE(close(got.losses, want.losses, {1e-2, 0}));
  EXPECT_TRUE(close(got.grad_norms, want.grad_norms, {5e-2, 0}));
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (const auto& [name, values] : want.gradients) {
    double largest = 0;
    for (const double v : values) largest = std::max(largest, std::abs(v));
    EXPECT_TRUE(close(got.gradients.at(name), values, {0, 3e-2 * largest})) << name;
  }
}

// The same with fp8 experts, by fp8 products of the library: a sum that is rounded differently may get
// another code.
TEST_F(CudaEngine, OneRankTrainsFp8ExpertsLikeOnTheCpu) {
  for (const auto& [precision, dtype] : {std::pair{"fp8", DType::bf16}, std::pair{"fp8_block", DType::f32}}) {
    const ParityCase c{
        .dtype = dtype,
        .model = str("moe: {num_experts: 8, top_k: 2, hidden: 16, expert_precision: ", precision, "}")};
    standin::set_options({Policy::lazy, 0, 1});
    const ParityResult got = run_on(kCuda, c), want = run_on(kCpu, c);
    EXPECT_EQ(got.counts.front(), want.counts.front());
    EXPECT_TRUE(close(got.losses, want.losses, {1e-2, 0})) << precision;
    EXPECT_TRUE(close(got.grad_norms, want.grad_norms, {5e-2, 0})) << precision;
    ASSERT_EQ(got.gradients.size(), want.gradients.size());
    for (const auto& [name, values] : want.gradients) {
      double largest = 0;
      for (const double v : values) largest = std::max(largest, std::abs(v));
      EXPECT_TRUE(close(got.gradients.at(name), values, {0, 3e-2 * largest})) << name;
    }
  }
}

TEST_F(CudaEngine, RecomputationAndOtherModelsTrainAsOnTheCpu) {
  for (const char* model :
       {"bias: true, norm: {kind: layer_norm, placement: post}, position: learned, ffn: {activation: gelu}",
        "tie_embeddings: false, position: alibi, ffn: {activation: geglu}, kv_heads: 2",
        "position: sinusoidal, moe: {num_experts: 8, top_k: 1, hidden: 8, every: 2, router: {kind: top_k, "
        "normalize: false}}"}) {
    const ParityCase c{.accumulation = 2, .recompute = "[norms, activations]", .model = model};
    standin::set_options({Policy::lazy, 0, 1});
    EXPECT_TRUE(same_result(run_on(kCuda, c), run_on(kCpu, c), 1e-11)) << model;
  }
}

TEST_F(CudaEngine, MuonTrainsAsOnTheCpu) {
  const ParityCase c{.dispatcher = "local",
                     .balance = "bias",
                     .model = "",
                     .optimizer = parity_choice<OptimizerRegistry>("muon", "{eps: 1e-3}")};
  ParityCase spread = c;
  spread.ep = 2;
  spread.dispatcher = "all_to_all";
  standin::set_options({Policy::lazy, 0, 1});
  const ParityResult want = run_on(kCpu, c);
  EXPECT_TRUE(same_result(run_on(kCuda, c), want, 1e-11));
  EXPECT_TRUE(same_result(run_on(kCuda, spread, 2), want, 1e-11));
}

TEST_F(CudaEngine, TheOrderInWhichTheDeviceWorksChangesNoBit) {
  const ParityCase c{.balance = "bias", .dtype = DType::f32, .model = ""};
  const ParityResult eager = run_on(kCuda, c);
  for (const standin::Options& policy :
       {standin::Options{Policy::lazy, 0, 1}, {Policy::favour, 1, 1}, {Policy::random, 0, 1}}) {
    const CachedMemory cached;
    standin::set_options(policy);
    EXPECT_TRUE(same_result(run_on(kCuda, c), eager, 0)) << "policy " << static_cast<int>(policy.policy);
  }
}

TEST_F(CudaEngine, ZeroStagesTrainAsOneRankOfTheCpu) {
  const ParityCase one{.dispatcher = "local", .balance = "bias", .model = ""};
  const ParityResult want = run_on(kCpu, one);
  for (const auto& [ranks, zero, accumulation] : {std::tuple{2, 1, 1}, {2, 2, 2}, {3, 2, 1}, {2, 3, 2}}) {
    const CachedMemory cached;
    const ParityCase c{.accumulation = accumulation, .balance = "bias", .model = "", .zero = zero};
    standin::set_options({Policy::random, 0, 1});
    EXPECT_TRUE(same_result(run_on(kCuda, c, ranks), want, 1e-11)) << c.name(ranks);
  }
}

// The CUDA column of the parity table; each layout under another policy of the streams.
TEST_F(CudaEngine, LayoutsTrainAsOneRankOfTheCpu) {
  const standin::Options policies[] = {{Policy::lazy, 0, 1}, {Policy::random, 0, 1}, {Policy::favour, 1, 1}};
  std::map<std::string, ParityResult> references;
  size_t turn = 0;
  for (const LayoutCase& layout : layouts_of_every_device()) {
    const ParityCase& c = layout.run;
    const ParityCase one{.dispatcher = "local",
                         .balance = c.balance,
                         .capacity = c.capacity,
                         .dtype = c.dtype,
                         .model = c.model};
    const std::string key = one.name(1) + c.model;
    if (!references.contains(key)) references[key] = run_on(kCpu, one);
    const CachedMemory cached;
    standin::set_options(policies[turn++ % std::size(policies)]);
    EXPECT_TRUE(
        same_result(run_on(kCuda, c, layout.world), references[key], c.dtype == DType::f64 ? 1e-11 : 1e-4))
        << c.name(layout.world) << ' ' << c.model;
  }
}

// In more orders: CudaDispatcher.
TEST_F(CudaEngine, ExpertsInPartsTrainWithTheBitsOfTheWhole) {
  const CachedMemory cached;
  ParityCase c{.ep = 2, .balance = "bias", .dtype = DType::bf16, .model = ""};
  const ParityResult whole = run_on(kCuda, c, 2);
  c.chunks = 3;
  standin::set_options({Policy::lazy, 0, 1});
  EXPECT_TRUE(same_result(run_on(kCuda, c, 2), whole, 0)) << c.name(2);
}

TEST_F(CudaEngine, PaddingToTheCapacityTrainsAsOnTheCpu) {
  const ParityCase one{.dispatcher = "local", .balance = "bias", .capacity = "position", .model = ""};
  const ParityResult want = run_on(kCpu, one);
  for (const auto& [ranks, ep, chunks, policy] :
       {std::tuple{1, 1, 1, Policy::lazy}, {2, 2, 1, Policy::random}, {2, 2, 2, Policy::lazy}}) {
    const CachedMemory cached;
    const ParityCase c{
        .ep = ep, .balance = "bias", .capacity = "position", .model = "", .chunks = chunks, .pad = true};
    standin::set_options({policy, 0, 1});
    EXPECT_TRUE(same_result(run_on(kCuda, c, ranks), want, 1e-11)) << c.name(ranks);
  }
}

/// A step as the steps below take it.
struct StepCase {
  int64_t moe_layers = 1, accumulation = 1;
  int ranks = 1;  // ep too
  ParityCase run = {.dispatcher = "local", .balance = "bias", .dtype = DType::f32, .model = ""};
};

/// Waits of the host for the device in the second step, of the last rank.
uint64_t waits_of_a_step(StepCase step) {
  ParityCase& c = step.run;
  c.device = kCuda;
  c.model = str("layers: ", step.moe_layers + 1);
  uint64_t waits = 0;
  run_ranks(step.ranks, [&](const std::shared_ptr<Communicator>& host) {
    ParallelLayout layout;
    layout.dp = layout.ep = step.ranks;
    const Mesh mesh(device_world(host, kCuda), layout);
    EngineOptions options;
    options.model = parity_model(c);
    options.optimizer = parity_optimizer();
    options.dispatcher = parity_dispatcher(c);
    options.vocab_size = kParityVocab;
    options.seq_len = kParitySeq;
    options.device = kCuda;
    TrainEngine engine(options, mesh);
    std::vector<ModelBatch> batches;
    for (int64_t a = 0; a < step.accumulation; a++) {
      batches.push_back(parity_batch(a, 2 * host->rank(), 2 * host->rank() + 2, kCuda));
      batches.back().num_labels = batches.back().count_labels();  // as batches of the loader have it
      batches.back().valid_BS = {};
    }
    engine.step(batches, 1e-3);
    const uint64_t before = standin::counts().host_waits;
    engine.step(batches, 1e-3);
    if (host->rank() + 1 == host->size()) waits = standin::counts().host_waits - before;
  });
  return waits;
}

TEST_F(CudaEngine, AStepWaitsForCountsOfDispatchesAndForTheSumsAtItsEndOnly) {
  standin::set_options({Policy::lazy, 0, 1});
  const uint64_t base = waits_of_a_step({});
  EXPECT_EQ(waits_of_a_step({.moe_layers = 2}) - base, 1U) << "for each MoE layer";
  EXPECT_EQ(waits_of_a_step({.accumulation = 2}) - base, 1U) << "and each micro-batch";
  EXPECT_EQ(base, 5U)
      << "one layer, the sums, and three reads of the routers' statistics, of which the first waits";
}

TEST_F(CudaEngine, PaddedToTheCapacityAStepWaitsForTheSumsAtItsEndOnly) {
  standin::set_options({Policy::lazy, 0, 1});
  StepCase step;
  step.run.capacity = "position";
  step.run.pad = true;
  for (const auto& [dispatcher, ranks, chunks, several] : {std::tuple{"local", 1, 1, 1},
                                                           {"all_to_all", 1, 1, 2},
                                                           {"all_to_all", 2, 1, 1},
                                                           {"all_to_all", 2, 2, 2}}) {
    step.run.dispatcher = dispatcher;
    step.run.chunks = chunks;
    step.ranks = ranks;
    step.moe_layers = step.accumulation = several;
    EXPECT_EQ(waits_of_a_step(step), 4U) << step.run.name(ranks);
  }
}

TEST_F(CudaEngine, ARunIsSavedAndResumedOnTheDevice) {
  standin::set_options({Policy::lazy, 0, 1});
  const CachedMemory cached;
  const std::vector<std::string> settings = {"run.device=cuda", "parallel.ep=auto", "run.steps=6"};
  TinyRun run;
  const RunOutcome whole = run.train(2, settings);
  run.forget(6);
  const RunOutcome resumed = run.train(2, settings);
  EXPECT_EQ(resumed.end, TrainEnd::done);
  EXPECT_EQ(whole.state, resumed.state);
  EXPECT_EQ(whole.rows, resumed.rows);
  const RunOutcome cpu = TinyRun().train(1, {"run.steps=6"});
  EXPECT_NEAR(whole.last_loss, cpu.last_loss, 1e-3 * cpu.last_loss);
}

}  // namespace
}  // namespace shoal::testing
