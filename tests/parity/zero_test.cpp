// Sharded optimizer state, gradients and weights (parallel.zero): every stage gives the bits of replicas that
// do everything alike, in less memory, and checkpoints of any stage and layout load under any other.
#include <map>

#include "tests/parity/expect_parity.h"
#include "tests/support/sanitized.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

/// Equal bits, but for the norm, whose squares are added in an order that depends on the pieces.
::testing::AssertionResult same_bits(ParityResult got, const ParityResult& want) {
  if (!close(got.grad_norms, want.grad_norms, {1e-13, 0}))
    return ::testing::AssertionFailure() << "gradient norms differ";
  got.grad_norms = want.grad_norms;
  return same_result(got, want, 0);
}

void expect_stages_alike(ParityCase c, int world) {
  const ParityResult want = run_case(c, world);
  for (const int zero : {1, 2, 3}) {
    c.zero = zero;
    EXPECT_TRUE(same_bits(run_case(c, world), want)) << c.name(world);
  }
}

struct Layout {
  int world, ep, tp;
  const char* model;
};

// Replicas in groups of 2, 3, 4, 6 and 8; parameters, parts and pieces that nothing divides.
const Layout kLayouts[] = {
    {2, 1, 1, ""},
    {3, 1, 1, "moe: {num_experts: 3, top_k: 2, hidden: 7}"},
    {4, 2, 1, "bias: true"},
    {4, 2, 2, "kv_heads: 2"},
    {6, 2, 1, "norm: {kind: layer_norm}, position: learned"},
    {6, 2, 3, "heads: 6, kv_heads: 3, head_size: 4, hidden_size: 18, bias: true, ffn: {hidden: 7}"},
    {8, 4, 2, "kv_heads: 2, tie_embeddings: false"},
    {4, 1, 4, "heads: 4, kv_heads: 1"},
};

TEST(Zero, StagesGiveTheBitsOfReplicasThatDoEverythingAlike) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Layout& l : kLayouts)
      expect_stages_alike({.ep = l.ep, .tp = l.tp, .balance = "bias", .dtype = dtype, .model = l.model},
                          l.world);
  }
  // In f64 clipping passes on the last bits of the norm.
  expect_stages_alike({.ep = 2, .balance = "global", .model = "", .clip_norm = 0}, 4);
}

TEST(Zero, SumsOverMicroBatchesHaveTheSameBitsWhileGradientsAreKeptInFull) {
  ParityCase c{
      .ep = 2, .accumulation = 2, .balance = "bias", .dtype = DType::f32, .empty_ranks = true, .model = ""};
  const ParityResult want = run_case(c, 4);
  c.zero = 1;
  EXPECT_TRUE(same_bits(run_case(c, 4), want));
  c.zero = 2;  // each micro-batch is reduced: another order of the sums
  const ParityResult reduced_often = run_case(c, 4);
  EXPECT_TRUE(same_result(reduced_often, want, 1e-5));
  c.zero = 3;
  EXPECT_TRUE(same_bits(run_case(c, 4), reduced_often));
}

TEST(Zero, StagesGiveTheResultOfOneRank) {
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const Layout& l : kLayouts) {
      const ParityCase one{.dispatcher = "local", .balance = "sequence", .dtype = dtype, .model = l.model};
      const ParityResult want = run_case(one, 1);
      for (const auto& [zero, accumulation] : {std::pair<int, int64_t>{1, 1}, {2, 2}, {3, 2}}) {
        ParityCase c = one;
        c.ep = l.ep;
        c.tp = l.tp;
        c.dispatcher = "all_to_all";
        c.zero = zero;
        c.accumulation = accumulation;
        EXPECT_TRUE(same_result(run_case(c, l.world), want, dtype == DType::f64 ? 1e-11 : 1e-5))
            << c.name(l.world);
      }
    }
  }
}

TEST(Zero, EveryOptimizerUpdatesPieces) {
  for (const auto& [kind, settings] : {std::pair{"adamw", "{weight_decay: 0.3, decay_embeddings: true}"},
                                       {"lion", "{weight_decay: 0.3}"},
                                       {"sgd", "{momentum: 0.9, nesterov: true, weight_decay: 0.1}"},
                                       {"sgd", "{momentum: 0}"}}) {
    expect_stages_alike(
        {.dtype = DType::f32, .model = "", .optimizer = parity_choice<OptimizerRegistry>(kind, settings)}, 3);
  }
}

TEST(Zero, StagesOfAPipelineGiveTheBitsOfEachOtherAndTheResultOfOneRank) {
  struct Row {
    int world, ep, tp, cp, pp, virtual_stages;
    int64_t accumulation;
    const char *schedule, *recompute;
  };
  for (const Row& r : {Row{4, 1, 1, 1, 2, 1, 1, "1f1b", "none"},
                       {4, 2, 1, 1, 2, 1, 4, "1f1b", "none"},
                       {6, 3, 1, 1, 2, 1, 3, "1f1b", "block"},
                       {4, 1, 1, 1, 2, 1, 4, "gpipe", "none"},
                       {4, 2, 1, 1, 2, 2, 4, "interleaved", "none"},
                       {8, 2, 2, 1, 2, 2, 2, "interleaved", "block"},
                       {4, 1, 1, 1, 2, 1, 4, "zero_bubble", "none"},
                       {8, 2, 1, 2, 2, 1, 3, "zero_bubble", "[norms, activations, up_projections]"},
                       {6, 1, 1, 1, 3, 1, 4, "zero_bubble", "block"}}) {
    for (const char* model :
         {"layers: 4, heads: 4, kv_heads: 2", "layers: 4, bias: true, tie_embeddings: false"}) {
      ParityCase c{.ep = r.ep, .tp = r.tp, .cp = r.cp, .accumulation = r.accumulation, .balance = "bias"};
      c.recompute = r.recompute;
      c.model = model;
      c.pp = r.pp;
      c.virtual_stages = r.virtual_stages;
      c.schedule = r.schedule;
      c.clip_norm = 0;  // clipping passes on the last bits of the norm
      c.zero = 2;
      expect_parity(c, r.world);
      const ParityResult want = run_case(c, r.world);
      c.zero = 3;
      EXPECT_TRUE(same_bits(run_case(c, r.world), want)) << c.name(r.world);
    }
  }
}

TEST(Zero, DecodingAndEvaluationHaveTheBitsOfWholeWeights) {
  struct Row {
    int world, ep, tp, pp;
  };
  for (const Row& r : {Row{2, 1, 1, 1}, {3, 1, 1, 1}, {4, 2, 2, 1}, {4, 2, 1, 2}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      ParityCase c{.ep = r.ep, .tp = r.tp, .dtype = dtype, .model = "heads: 4, kv_heads: 2", .pp = r.pp};
      const std::vector<double> want = decode_and_evaluate(c, r.world);
      c.zero = 3;
      EXPECT_EQ(decode_and_evaluate(c, r.world), want) << c.name(r.world);
    }
  }
}

TEST(Zero, RecomputationDoesNotSeeWhereGradientsAre) {
  for (const char* recompute : {"block", "[norms, activations, up_projections, packed_weights]"})
    expect_stages_alike(
        {.ep = 2, .balance = "global", .recompute = recompute, .dtype = DType::bf16, .model = ""}, 4);
}

struct StageLayout {
  int world, ep, tp, zero;
};

/// Steps [first, last), from the checkpoint of step `first` if that is not 0; leaves one of step `last`.
/// Returns the state at the beginning and at the end by global tensor.
using State = std::map<std::string, std::vector<double>>;
std::pair<State, State> train(const StageLayout& run, int64_t first, int64_t last,
                              const std::filesystem::path& folder) {
  std::pair<State, State> states;
  run_ranks(run.world, [&](const std::shared_ptr<Communicator>& world) {
    ParallelLayout layout;
    layout.tp = run.tp;
    layout.dp = run.world / run.tp;
    layout.ep = run.ep;
    layout.edp = run.world / run.ep;
    const Mesh mesh(world, layout);
    const ParityCase c{.balance = "bias", .dtype = DType::f32, .model = "kv_heads: 2", .zero = run.zero};
    TrainEngine engine(parity_engine(c), mesh);
    CheckpointStore store({.folder = folder, .keep_last = 0}, *world);
    if (first > 0) {
      const auto found = store.find(first);
      ASSERT_TRUE(found.has_value());
      store.load(*found, engine.state());
      engine.optimizer().set_num_steps(first);
    }
    const auto global = [&] {
      State state;
      for (const StateTensor& t : engine.state())
        state[t.name] = gather_global(HeldPart(t.value, t.is_flat ? t.boxes : std::vector{t.box}),
                                      t.global_shape, *world);
      return state;
    };
    State begin = global();
    const ShardRange mine = shard_range(kParityBatch, mesh.coords()[Axis::dp]);
    for (int64_t step = first; step < last; step++) {
      const std::vector<ModelBatch> batch = {parity_batch(step, mine.begin, mine.end)};
      engine.step(batch, 1e-2);
    }
    State end = global();
    ASSERT_EQ(store.save(last, engine.state(), "{}", ""), "");
    if (world->rank() == 0) states = {std::move(begin), std::move(end)};
  });
  return states;
}

TEST(Zero, CheckpointsOfAnyStageAndLayoutLoadUnderAnyOther) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder / "checkpoints";
  int64_t step = 1;
  State before = train({4, 2, 1, 0}, 0, step, path).second;
  for (const StageLayout& run : {StageLayout{4, 2, 1, 2},
                                 {1, 1, 1, 1},
                                 {3, 1, 1, 1},
                                 {3, 1, 1, 2},
                                 {4, 2, 2, 1},
                                 {8, 4, 2, 2},
                                 {4, 2, 1, 3},
                                 {2, 1, 2, 2},
                                 {3, 1, 1, 3},
                                 {4, 2, 2, 3},
                                 {4, 4, 1, 1},
                                 {2, 2, 1, 0}}) {
    auto [begin, end] = train(run, step, step + 1, path);
    EXPECT_EQ(begin, before) << "world " << run.world << ", zero " << run.zero;
    EXPECT_NE(end, before);
    before = std::move(end);
    step++;
  }
}

TEST(Zero, ARunThatChangesItsStageEndsWithTheBitsOfOneThatDoesNot) {
  const TemporaryFolder folder;
  const State want = train({4, 2, 1, 0}, 0, 5, folder / "whole").second;
  train({4, 2, 1, 1}, 0, 2, folder / "parts");
  train({4, 2, 1, 2}, 2, 3, folder / "parts");
  train({4, 2, 1, 3}, 3, 4, folder / "parts");
  EXPECT_EQ(train({4, 2, 1, 0}, 4, 5, folder / "parts").second, want);
}

/// Bytes of values that are divided among ranks, in full.
int64_t divided_bytes(const std::vector<Parameter*>& parameters) {
  int64_t bytes = 0;
  for (const Parameter* p : parameters) bytes += p->value_divided ? p->value.num_bytes() : 0;
  return bytes;
}
int64_t gathered_bytes(const std::vector<Parameter*>& parameters) {
  int64_t bytes = 0;
  for (const Parameter* p : parameters)
    bytes += p->value_divided && p->value.has_memory() ? p->value.num_bytes() : 0;
  return bytes;
}

// The next one is gathered while a layer and its experts are in use.
TEST(Zero, NoMoreThanAUnitAheadOfThoseInUseHasItsWeightsInFull) {
  for (const char* recompute : {"none", "block"}) {
    run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
      ParallelLayout layout;
      layout.dp = layout.edp = 2;
      const Mesh mesh(world, layout);
      const ParityCase c{.recompute = recompute, .model = "layers: 7, tie_embeddings: false", .zero = 3};
      TrainEngine engine(parity_engine(c), mesh);
      const std::vector<Parameter*> all = engine.model().parameters();
      EXPECT_EQ(gathered_bytes(all), 0);
      int64_t most = 0, uses = 0, not_ahead = 0, layer = 0, experts = 0, table = 0;
      for (WeightUnit* unit : engine.model().weight_units()) {
        int64_t& largest = unit->outer != nullptr ? experts : unit->forward_only ? table : layer;
        largest = std::max(largest, divided_bytes(unit->parameters));
        unit->on_begin = [&, unit, begin = unit->on_begin](WeightUnit::Direction direction) {
          not_ahead += gathered_bytes(unit->parameters) < divided_bytes(unit->parameters) ? 1 : 0;
          begin(direction);
          most = std::max(most, gathered_bytes(all));
          uses++;
        };
      }
      const std::vector<ModelBatch> batches = {parity_batch(0, 0, 2), parity_batch(0, 2, 4)};
      EXPECT_TRUE(engine.step(batches, 1e-3).updated);
      // Of each micro-batch: embedding and head once, the final norm, layers and experts twice.
      EXPECT_EQ(uses, 2 * (2 + 2 + 2 * 7 + 2 * 6));
      EXPECT_EQ(not_ahead, 2) << "the embedding, the first unit";
      EXPECT_GT(most, experts);
      EXPECT_LE(most, layer + experts + std::max(layer, table));
      EXPECT_LT(most, divided_bytes(all) / 2);
      EXPECT_EQ(gathered_bytes(all), 0) << "between steps";
    });
  }
}

/// Of all ranks, which are threads here: the most bytes during three steps; and the parameters of one rank.
struct Peak {
  double bytes = 0, params = 0;
};
Peak peak_of(int ranks, int zero, int64_t accumulation) {
  Peak peak;
  run_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    ParallelLayout layout;
    layout.dp = layout.edp = ranks;
    const Mesh mesh(world, layout);
    ParityCase c{.dtype = DType::f32, .model = "layers: 40, hidden_size: 48, heads: 2", .zero = zero};
    EngineOptions options = parity_engine(c);
    options.bucket_mb = 0.05;
    TrainEngine engine(options, mesh);
    std::vector<ModelBatch> batches;
    for (int64_t a = 0; a < accumulation; a++) batches.push_back(parity_batch(a, 0, 1));
    world->barrier();
    if (world->rank() == 0) device_runtime(DeviceType::cpu).reset_peak();
    world->barrier();
    for (int step = 0; step < 3; step++) engine.step(batches, 1e-3);
    world->barrier();
    if (world->rank() != 0) return;
    peak.bytes = static_cast<double>(device_runtime(DeviceType::cpu).stats().peak_bytes);
    for (const Parameter* p : engine.parameters()) peak.params += static_cast<double>(p->value.numel());
  });
  return peak;
}

// Adam has 8 bytes of state and 4 of gradient per parameter.
TEST(Zero, MemoryFallsByWhatIsDivided) {
  if (kSanitized) GTEST_SKIP() << "as without sanitizers, only slower";
  for (const auto& [ranks, accumulation] : {std::pair<int, int64_t>{2, 1}, {2, 2}, {3, 1}}) {
    const Peak whole = peak_of(ranks, 0, accumulation);
    const double divided = whole.params * (ranks - 1);  // elements that others have now
    const double of_two = peak_of(ranks, 2, accumulation).bytes,
                 state = whole.bytes - peak_of(ranks, 1, accumulation).bytes,
                 gradients = whole.bytes - of_two - state,
                 weights = of_two - peak_of(ranks, 3, accumulation).bytes;
    EXPECT_NEAR(state / (8 * divided), 1, 0.1) << ranks << " ranks";
    // Less the buckets that exist at a time, and of 40 layers the two or three whose weights do.
    EXPECT_GT(gradients, 0.7 * 4 * divided) << ranks << " ranks";
    EXPECT_GT(weights, 0.8 * 4 * divided) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace shoal::testing
