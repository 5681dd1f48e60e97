// What plan_rank() predicts against the counters of real steps on thread ranks: every layout of the generated
// table, as it is (all groups but those that rows of experts travel in) and with balanced routing (all of
// them).
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/routing.h"
#include "launch/layout_plan.h"
#include "models/moe/router.h"
#include "tests/parity/generated_table.h"

namespace shoal::testing {
namespace {

/// Routes as BalancedRouting says, whatever the logits are: a rank's tokens are numbered from 0.
class BalancedRouter final : public Router {
 public:
  explicit BalancedRouter(const RouterContext& context) : context_(context) {
    weight_ = &add_parameter(context.build, "weight", Shape{context.num_experts, context.hidden_size},
                             Init::normal(context.init_std), ParamKind::router);
  }
  RouterGathers gathers() const override { return {.ids = context_.top_k}; }

  Routing route(const RouteInput& input) override {
    const Tensor logits_TE = input.all_rows(linear(input.x_TD, weight_->value));
    const int64_t B = input.batch.batch, S = input.batch.seq, E = context_.num_experts;
    std::vector<double> push(static_cast<size_t>(B * S * E), 0);
    const BalancedRouting routing{E, context_.top_k};
    const ContextSplit& context = input.split.context();
    for (int cp = 0; cp < context.group().size(); cp++) {
      const PositionRuns runs = context.runs(S, cp);
      std::vector<int64_t> tokens;  // of this cp rank, in the order in which tp cuts them
      for (int64_t b = 0; b < B; b++)
        for (size_t i = 0; i < runs.begin.size(); i++)
          for (int64_t s = 0; s < runs.count[i]; s++) tokens.push_back(b * S + runs.begin[i] + s);
      for (int tp = 0; tp < input.split.group().size(); tp++) {
        const ShardRange own = shard_range(std::ssize(tokens), {tp, input.split.group().size()});
        for (int64_t t = own.begin; t < own.end; t++)
          for (int64_t k = 0; k < context_.top_k; k++)
            push[static_cast<size_t>(tokens[static_cast<size_t>(t)] * E + routing.expert(t - own.begin, k))] =
                50;
      }
    }
    const Tensor pushed = cast(Tensor::from(push, {B * S, E}), logits_TE.dtype());
    RouteSpec spec;
    spec.top_k = context_.top_k;
    const Routed routed = shoal::route(add(logits_TE, pushed), {}, input.batch.valid_BS, spec, {});
    return {routed.expert_ids_TK, routed.weights_TK, {}, {}, routed.counts_E, routed.entropy};
  }

 private:
  RouterContext context_;
  Parameter* weight_;
};

struct BalancedOptions final : RouterOptions {
  void fields(FieldVisitor&) override {}
};
const bool registered = RouterRegistry::add<BalancedOptions>(
    "balanced", "of this test",
    [](const BalancedOptions&, const RouterContext& c) { return std::make_unique<BalancedRouter>(c); });

ParityCase balanced(ParityCase c) {
  c.model += str(c.model.empty() ? "" : ", ", "moe: {num_experts: ", c.num_experts, ", top_k: ", c.top_k,
                 ", hidden: ", c.expert_hidden, ", shared_experts: 1, first_dense: 1, router: balanced",
                 c.pad ? ", capacity_factor: 1.3, pad_to_capacity: true" : "", "}");
  c.capacity = "off";
  c.pad = false;
  return c;
}

bool carries_experts(const std::string& group) {
  return group.starts_with("ep") || group == "etp";
}

std::string text_of(const Traffic& traffic) {
  std::string text;
  for (const auto& [name, group] : traffic) {
    for (size_t k = 0; k < kNumCountedKinds; k++) {
      const CallTraffic& calls = group.kinds[k];
      if (calls.calls > 0)
        text += str("  ", name, ' ', collective_name(static_cast<CollectiveKind>(k)), ": ", calls.calls,
                    " calls, ", calls.sent.within_node, " + ", calls.sent.between_nodes, " bytes\n");
    }
  }
  return text;
}

/// One step of each rank; `check` gets what it counted and what was predicted.
void run_step(
    const ParityCase& c, int world_size, int64_t batch,
    const std::function<void(const Traffic& counted, const RankPlan& plan, TrainEngine& engine)>& check) {
  run_ranks(world_size, [&](const std::shared_ptr<Communicator>& world) {
    ParallelLayout layout = parity_layout(c, world_size);
    if (layout.ranks_per_node == 0) layout.ranks_per_node = world_size % 2 == 0 ? world_size / 2 : 1;
    const Mesh mesh(world, layout);
    const EngineOptions options = parity_engine(c);
    TrainEngine engine(options, mesh);
    std::vector<ModelBatch> batches;
    for (int64_t a = 0; a < c.accumulation; a++) {
      const int64_t first = (mesh.coords()[Axis::dp].index * c.accumulation + a) * batch;
      ModelBatch whole = parity_case_batch(c, 0, first, first + batch);
      whole.valid_BS = {};
      batches.push_back(cut_sequences(whole, mesh.coords()[Axis::cp]));
    }
    const Traffic before = world->traffic().ledger();
    SHOAL_CHECK(engine.step(batches, 1e-3).updated, "no update");
    const Traffic counted = world->traffic().ledger() - before;
    const PassSizes sizes = c.rank_invariant ? PassSizes{1, c.seq, batch * c.accumulation}
                                             : PassSizes{batch, c.seq, c.accumulation};
    check(counted, plan_rank(options, layout, world->rank(), sizes), engine);
  });
}

void expect_plan(const ParityCase& c, int world_size, bool experts_too) {
  SCOPED_TRACE(c.name(world_size));
  run_step(c, world_size, 2, [&](Traffic counted, const RankPlan& plan, TrainEngine& engine) {
    Traffic predicted = plan.total();
    if (!experts_too) {
      for (Traffic* traffic : {&counted, &predicted})
        std::erase_if(*traffic, [](const auto& group) { return carries_experts(group.first); });
    }
    EXPECT_TRUE(counted == predicted) << c.name(world_size) << ", rank " << plan.rank << "\ncounted\n"
                                      << text_of(counted) << "predicted\n"
                                      << text_of(predicted);
    int64_t weights = 0, state = 0;
    for (const Parameter* p : engine.parameters())
      weights += p->value_divided ? p->own_value().num_bytes() : p->value.num_bytes();
    engine.optimizer().visit_state(
        [&](const std::string&, Parameter&, const Tensor& t) { state += t.num_bytes(); });
    EXPECT_EQ(plan.weight_bytes, weights);
    EXPECT_EQ(plan.optimizer_bytes, state);
  });
}

TEST(PredictedTraffic, OfRankInvariantStepsIsExact) {
  for (ParityCase c :
       {ParityCase{.ep = 2, .accumulation = 2, .dtype = DType::f32, .model = ""},
        ParityCase{.ep = 4, .dispatcher = "all_gather", .balance = "global", .model = "", .zero = 1},
        ParityCase{.ep = 2, .dtype = DType::bf16, .model = "", .pp = 2, .zero = 1}}) {
    c.rank_invariant = true;
    expect_plan(c, 4, /*experts_too=*/false);
    expect_plan(balanced(c), 4, /*experts_too=*/true);
  }
}

constexpr int kTrafficParts = 8;
class TrafficOfTable : public ::testing::TestWithParam<int> {};

TEST_P(TrafficOfTable, IsPredictedExactly) {
  const std::vector<TableRow>& rows = generated_table().rows();
  for (size_t i = static_cast<size_t>(GetParam()); i < rows.size(); i += kTrafficParts) {
    ParityCase c = table_case(rows[i]);
    expect_plan(c, rows[i][kWorld], /*experts_too=*/false);
    if (i % 3 == 0) c.dtype = DType::bf16;
    expect_plan(balanced(c), rows[i][kWorld], /*experts_too=*/true);
  }
}

INSTANTIATE_TEST_SUITE_P(Parity, TrafficOfTable, ::testing::Range(0, kTrafficParts),
                         [](const auto& info) { return str("Part", info.param); });

TEST(PredictedTraffic, IsExactWithPaddedRowsPartsAndOddNumbersOfRanks) {
  for (ParityCase c : {ParityCase{.ep = 2, .pad = true},
                       {.ep = 2, .tp = 2, .accumulation = 2, .model = "heads: 4, kv_heads: 2", .pad = true},
                       {.ep = 2, .etp = 2, .chunks = 2},
                       {.ep = 4, .cp = 2, .chunks = 2, .pad = true},
                       {.ep = 2, .dtype = DType::bf16, .model = "norm: {placement: post}", .pp = 2},
                       {.ep = 2, .recompute = "block", .dtype = DType::bf16, .zero = 1},
                       {.tp = 2, .accumulation = 2, .model = "tie_embeddings: false", .zero = 3},
                       {.ep = 2, .accumulation = 2, .recompute = "block", .pp = 2, .zero = 3}}) {
    expect_plan(balanced(c), 4, true);
  }
  for (ParityCase c :
       {ParityCase{.ep = 3, .tp = 3, .model = "heads: 6, kv_heads: 3, head_size: 4, hidden_size: 18"},
        {.ep = 3, .cp = 3, .context = ContextKind::ring},
        {.etp = 3, .accumulation = 3, .pp = 1, .zero = 2},
        {.accumulation = 3, .pp = 3, .zero = 1}}) {
    expect_plan(balanced(c), 3, true);
  }
  for (const char* optimizer : {"muon", "lion", "sgd"})
    expect_plan(balanced({.ep = 2, .optimizer = {optimizer, nullptr}}), 4, true);
  expect_plan(balanced({.ep = 2, .zero = 2, .optimizer = {"lion", nullptr}}), 4, true);
  // No rows of experts travel. A measuring pass uses all weights but the head's.
  expect_plan({.balance = "global", .recompute = "block"}, 2, true);
  expect_plan({.accumulation = 3, .balance = "global", .zero = 3}, 2, true);
  expect_plan({.accumulation = 3, .balance = "global", .model = "tie_embeddings: false", .zero = 3}, 2, true);
  expect_plan({.cp = 3, .model = "moe: {num_experts: 8, top_k: 2, hidden: 8, router: hash}"}, 3, true);
}

// Its weights are constants: no gradients of them travel. Which tokens it sends where is no balanced choice.
TEST(PredictedTraffic, OfAHashRouterHasTheCallsThatAreMade) {
  for (const char* dispatcher : {"all_to_all", "hierarchical"}) {
    const ParityCase c{.ep = 4,
                       .dispatcher = dispatcher,
                       .model = "moe: {num_experts: 8, top_k: 2, hidden: 8, router: hash}",
                       .ranks_per_node = 2};
    run_step(c, 4, 2, [&](const Traffic& counted, const RankPlan& plan, TrainEngine&) {
      const Traffic predicted = plan.total();
      EXPECT_TRUE(
          std::ranges::any_of(counted, [](const auto& group) { return carries_experts(group.first); }));
      for (const auto& [name, group] : counted)
        EXPECT_EQ(group.total().calls, predicted.at(name).total().calls) << dispatcher << ' ' << name;
    });
  }
}

/// A real router sends what its choices need: near the balanced prediction, though four tokens are frequent
/// here.
TEST(PredictedTraffic, OfRealRoutingIsWithinAQuarter) {
  for (const char* dispatcher : {"all_to_all", "all_gather", "hierarchical"}) {
    ParityCase c{.ep = 4, .dispatcher = dispatcher, .ranks_per_node = 2, .seq = 96};
    run_step(c, 4, 8, [&](const Traffic& counted, const RankPlan& plan, TrainEngine&) {
      const Traffic predicted = plan.total();
      for (const auto& [name, group] : counted) {
        if (!carries_experts(name)) continue;
        const auto got = static_cast<double>(group.total().sent.total()),
                   want = static_cast<double>(predicted.at(name).total().sent.total());
        EXPECT_NEAR(got / want, 1, 0.25) << dispatcher << ' ' << name << " rank " << plan.rank;
      }
    });
  }
}

}  // namespace
}  // namespace shoal::testing
