// run.deterministic: rank_invariant: every layout over dp, ep, pp, micro-batches and dispatchers gives the
// bits of one rank.
#include <cmath>

#include "core/base/threads.h"
#include "core/ops/elementwise.h"
#include "tests/parity/expect_parity.h"
#include "tests/parity/layouts.h"
#include "tests/support/error_of.h"
#include "tests/support/rank_invariant.h"

namespace shoal::testing {
namespace {

struct Layout {
  int world;
  ParityCase run;
};

std::vector<Layout> layouts() {
  return {
      {1, {.accumulation = 3, .dispatcher = "all_gather", .model = ""}},
      {2, {.ep = 1, .accumulation = 2, .model = ""}},
      {2, {.ep = 2, .model = "", .zero = 1}},
      {2, {.ep = 2, .accumulation = 3, .dispatcher = "all_gather", .model = ""}},
      {2, {.ep = 2, .recompute = "block", .model = "", .chunks = 2}},
      {3, {.ep = 3, .accumulation = 2, .model = ""}},
      {3, {.ep = 1, .dispatcher = "local", .model = "", .zero = 1}},
      {4, {.ep = 2, .accumulation = 2, .model = "", .zero = 1}},
      {4,
       {.ep = 4,
        .dispatcher = "hierarchical",
        .recompute = "[norms, activations, up_projections]",
        .model = ""}},
      {4, {.ep = 2, .dispatcher = "all_gather", .empty_ranks = true, .model = ""}},
      {6, {.ep = 3, .accumulation = 2, .model = ""}},
      {6, {.ep = 6, .model = "", .chunks = 3}},
      {8, {.ep = 4, .model = "", .zero = 1}},
      {8, {.ep = 2, .accumulation = 2, .empty_ranks = true, .model = ""}},
      {2, {.accumulation = 2, .model = "", .pp = 2}},
      {3, {.model = "", .pp = 3, .schedule = "zero_bubble"}},
      {4, {.ep = 2, .model = "", .pp = 2, .schedule = "gpipe", .zero = 1}},
  };
}

void expect_bits_of_one_rank(ParityCase settings, const std::vector<Layout>& on) {
  settings.rank_invariant = true;
  const ParityResult want = run_case(on_one_rank(settings), 1);
  for (const Layout& layout : on) {
    ParityCase c = settings;
    c.ep = layout.run.ep;
    c.pp = layout.run.pp;
    c.virtual_stages = layout.run.virtual_stages;
    c.schedule = layout.run.schedule;
    c.accumulation = layout.run.accumulation;
    c.dispatcher = layout.run.dispatcher;
    c.chunks = layout.run.chunks;
    c.recompute = layout.run.recompute;
    c.empty_ranks = layout.run.empty_ranks;
    c.zero = layout.run.zero;
    EXPECT_TRUE(equal_bits(run_case(c, layout.world), want)) << c.name(layout.world) << ' ' << c.model;
  }
}

TEST_F(RankInvariant, EveryLayoutGivesTheBitsOfOneRank) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    for (const char* balance : {"sequence", "global", "z_loss", "bias"})
      expect_bits_of_one_rank({.balance = balance, .dtype = dtype, .model = ""}, layouts());
  }
}

// Without the mode the same comparisons find the order of sums: this is what they would miss if they were
// blind.
TEST_F(RankInvariant, WithoutItTheSameComparisonsFindTheOrderOfSums) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    const ParityCase settings{.balance = "bias", .dtype = dtype, .model = ""};
    const ParityResult want = run_case(on_one_rank(settings), 1);
    EXPECT_TRUE(equal_bits(run_case(on_one_rank(settings), 1), want));
    for (const Layout& layout : layouts()) {
      ParityCase c = layout.run;
      c.balance = settings.balance;
      c.dtype = dtype;
      EXPECT_FALSE(equal_bits(run_case(c, layout.world), want)) << c.name(layout.world);
    }
  }
}

/// One of each kind of layout.
std::vector<Layout> few_layouts() {
  return {
      {1, {.accumulation = 4, .dispatcher = "all_gather", .model = ""}},
      {3, {.ep = 3, .model = "", .zero = 1}},
      {4, {.ep = 2, .accumulation = 2, .model = "", .chunks = 2}},
      {4, {.ep = 2, .dispatcher = "all_gather", .empty_ranks = true, .model = "", .pp = 2}},
  };
}

TEST_F(RankInvariant, EveryKindOfModelGivesTheBitsOfOneRank) {
  std::vector<std::string> models = uneven_models();
  models.emplace_back("moe: {num_experts: 7, top_k: 3, hidden: 9, shared_experts: 1}, bias: true");
  models.emplace_back("moe: {num_experts: 0}, tie_embeddings: false, norm: {kind: layer_norm}, bias: true");
  models.emplace_back("moe: {num_experts: 16, top_k: 5, hidden: 4}, hidden_size: 20, position: sinusoidal");
  for (const std::string& model : models) {
    const bool dense = model.find("num_experts: 0") != std::string::npos;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      std::vector<Layout> on = few_layouts();
      for (Layout& layout : on)
        if (dense) layout.run.ep = layout.run.chunks = 1;
      expect_bits_of_one_rank({.balance = "none", .dtype = dtype, .model = model}, on);
    }
  }
}

TEST_F(RankInvariant, CapacityDocumentsAndPaddedExpertsGiveTheBitsOfOneRank) {
  for (const char* capacity : {"position", "probability"})
    expect_bits_of_one_rank({.balance = "sequence",
                             .capacity = capacity,
                             .dtype = DType::f32,
                             .model = "",
                             .seq = 13,
                             .documents = true},
                            few_layouts());
  const std::vector<Layout> padded = {{3, {.ep = 3, .model = ""}},
                                      {4, {.ep = 2, .accumulation = 2, .model = "", .zero = 1}}};
  ParityCase settings{
      .balance = "bias", .capacity = "position", .dtype = DType::bf16, .model = "", .pad = true};
  expect_bits_of_one_rank(settings, padded);
}

TEST_F(RankInvariant, EveryOptimizerAndSchedulesOfStagesGiveTheBitsOfOneRank) {
  for (const auto& [kind, settings] : {std::pair{"lion", "{weight_decay: 0.3}"},
                                       {"sgd", "{momentum: 0.9, nesterov: true, weight_decay: 0.1}"}}) {
    expect_bits_of_one_rank(
        {.dtype = DType::f32, .model = "", .optimizer = parity_choice<OptimizerRegistry>(kind, settings)},
        few_layouts());
  }
  expect_bits_of_one_rank(
      {.dtype = DType::f32, .model = "", .optimizer = parity_choice<OptimizerRegistry>("muon", "{}")},
      {{2, {.ep = 2, .model = ""}},
       {3, {.ep = 3, .accumulation = 2, .model = ""}},
       {4, {.ep = 2, .model = "", .pp = 2}}});
  expect_bits_of_one_rank({.balance = "global", .dtype = DType::bf16, .model = "layers: 4"},
                          {{2, {.model = "", .pp = 2, .virtual_stages = 2, .schedule = "interleaved"}},
                           {4, {.ep = 2, .model = "", .pp = 2, .schedule = "zero_bubble", .zero = 1}},
                           {4, {.model = "", .pp = 4, .schedule = "gpipe"}},
                           {6, {.ep = 3, .recompute = "block", .model = "", .pp = 2}}});
}

TEST_F(RankInvariant, EvaluationGivesTheBitsOfOneRank) {
  const auto losses = [](bool invariant, int world, bool one_batch) {
    TrainEngine::LossSum sum;
    run_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
      ParityCase c{.ep = world, .dtype = DType::f32, .model = ""};
      c.rank_invariant = invariant;
      const Mesh mesh(comm, parity_layout(c, world));
      TrainEngine engine(parity_engine(c), mesh);
      const ShardRange mine = shard_range(7, {comm->rank(), world});
      std::vector<ModelBatch> batches = {parity_batch(0, mine.begin, mine.end)};
      if (!one_batch)
        batches = {parity_batch(0, mine.begin, mine.begin + 1), parity_batch(0, mine.begin + 1, mine.end)};
      const TrainEngine::LossSum all = engine.evaluate(batches);
      if (comm->rank() == 0) sum = all;
    });
    return sum.loss;
  };
  const double want = losses(true, 1, true);
  EXPECT_NEAR(want, losses(false, 1, true), 1e-5 * want);
  for (const int world : {1, 2, 3}) EXPECT_EQ(losses(true, world, false), want) << world;
}

TEST_F(RankInvariant, AnyNumberOfThreadsGivesTheSameBits) {
  ParityCase c{.ep = 2,
               .accumulation = 2,
               .balance = "bias",
               .dtype = DType::f32,
               .model = "hidden_size: 64, moe: {num_experts: 8, top_k: 2, hidden: 96}",
               .seq = 64};
  c.rank_invariant = true;
  const ParityResult want = run_case(on_one_rank(c), 1);
  for (const int threads : {2, 3}) {
    ParityResult got;
    run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      set_num_threads(threads);
      ParityResult mine = run_parity(c, world);
      set_num_threads(1);
      if (world->rank() == 0) got = std::move(mine);
    });
    EXPECT_TRUE(equal_bits(got, want)) << threads;
  }
}

TEST_F(RankInvariant, AGradientThatIsNotFiniteIsSeenOnEveryRankAndSkipsTheStep) {
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    ParityCase c{.ep = 3, .dtype = DType::f32, .model = "moe: {num_experts: 3, top_k: 1, hidden: 7}"};
    c.rank_invariant = true;
    const Mesh mesh(world, parity_layout(c, 3));
    TrainEngine engine(parity_engine(c), mesh);
    const std::vector<ModelBatch> batches = {parity_batch(0, world->rank(), world->rank() + 1)};
    ASSERT_TRUE(engine.step(batches, 1e-3).updated);
    // One rank's copy of a weight of the last layer: only its own tokens give gradients that are not finite.
    if (world->rank() == 1)
      for (Parameter* p : engine.parameters())
        if (p->name == "final_norm.weight") p->value.data<float>()[0] = 3e38F;
    const StepResult result = engine.step(batches, 1e-3);
    EXPECT_FALSE(result.updated);
    EXPECT_FALSE(std::isfinite(result.grad_norm) && std::isfinite(result.loss));
    int64_t bad = 0;
    for (Parameter* p : engine.parameters()) bad += all_finite(p->own_grad()) ? 0 : 1;
    EXPECT_GT(bad, 0);
  });
}

TEST_F(RankInvariant, SumsThatDependOnNodesAndDividedGradientsAreRefused) {
  const auto error = [](ParityCase c) {
    c.rank_invariant = true;
    return error_of([&] { run_case(c, 4); });
  };
  EXPECT_NE(error({.ep = 4, .dispatcher = "hierarchical", .model = "", .ranks_per_node = 2})
                .find("parallel.dispatcher"),
            std::string::npos);
  EXPECT_NE(error({.ep = 2, .model = "", .zero = 2}).find("exact sums of gradients that are not divided"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
