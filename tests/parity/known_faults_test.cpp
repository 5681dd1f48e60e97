// Faults that users of other trainers met in whole training steps; the id in each name is explained in
// docs/faults.md.
#include <functional>

#include "core/ops/routing.h"
#include "launch/finite.h"
#include "tests/support/parity.h"

namespace shoal::testing {
namespace {

constexpr int64_t kSeq = kParitySeq, kVocab = kParityVocab;

struct Trial {
  std::string router = "kind: top_k, aux_coeff: 0.5";
  std::string moe = "first_dense: 1";  // more settings of the moe section
  std::string model = "layers: 2";
  std::string optimizer = "sgd";
  double clip_norm = 0;
  DType dtype = DType::f64;
  int ep = 1;
};

std::unique_ptr<TrainEngine> make_engine(const Trial& s, const Mesh& mesh) {
  ConfigErrors errors;
  const std::string yaml = str("model: {kind: transformer, ", s.model,
                               ", hidden_size: 16, heads: 2, init: {std: 0.3}, moe: {num_experts: 8, "
                               "top_k: 2, hidden: 8, ",
                               s.moe, ", router: {", s.router, "}}}");
  EngineOptions options;
  options.model = Choice{"transformer", ModelRegistry::instance().make_options("transformer")};
  parse_fields(
      load_yaml_text(yaml, "test", errors), "",
      [&](FieldVisitor& v) { v.choice("model", options.model, ModelRegistry::instance(), ""); }, errors);
  errors.throw_if_any();
  options.optimizer = Choice{s.optimizer, nullptr};
  options.dispatcher = Choice{"all_to_all", nullptr};
  options.vocab_size = kVocab;
  options.seq_len = kSeq;
  options.seed = 11;
  options.clip_norm = s.clip_norm;
  options.dtype = s.dtype;
  return std::make_unique<TrainEngine>(options, mesh);
}

ParallelLayout layout_for(int world, int ep) {
  ParallelLayout layout;
  layout.dp = world;
  layout.ep = ep;
  layout.edp = world / ep;
  return layout;
}

/// Rows given as tokens; labels are the next token, -1 at the end. `masked`: no labels at all.
ModelBatch rows(const std::vector<std::vector<int32_t>>& tokens, bool masked = false) {
  ModelBatch batch;
  batch.batch = std::ssize(tokens);
  batch.seq = kSeq;
  std::vector<int32_t> flat, labels, positions;
  for (const auto& row : tokens) {
    for (int64_t s = 0; s < kSeq; s++) {
      flat.push_back(row[static_cast<size_t>(s)]);
      labels.push_back(masked || s + 1 == kSeq ? -1 : row[static_cast<size_t>(s + 1)]);
      positions.push_back(static_cast<int32_t>(s));
    }
  }
  const Shape shape{batch.batch * kSeq};
  batch.tokens_T = Tensor::from(flat, shape);
  batch.labels_T = Tensor::from(labels, shape);
  batch.positions_T = Tensor::from(positions, shape);
  return batch;
}
const std::vector<std::vector<int32_t>> kTwo = {{1, 7, 3, 9, 5, 2}, {4, 8, 6, 12, 10, 11}};

std::vector<double> gradient(TrainEngine& engine, const std::string& name) {
  for (const Parameter* p : engine.parameters()) {
    if (p->name == name) return to_doubles(p->leaf.grad);
  }
  throw Error("no parameter " + name);
}
const char* const kRouter = "layers.1.moe.router.weight";

/// Runs body on `world` ranks; returns what rank 0 returned.
template <class T>
T on_ranks(int world, const Trial& s, const std::function<T(TrainEngine&, int rank)>& body) {
  T result{};
  run_ranks(world, [&](const std::shared_ptr<Communicator>& comm) {
    const Mesh mesh(comm, layout_for(world, s.ep));
    const auto engine = make_engine(s, mesh);
    T mine = body(*engine, comm->rank());
    if (comm->rank() == 0) result = std::move(mine);
  });
  return result;
}

using Values = std::vector<double>;

TEST(KnownFaults, LB_01_AuxGradientDoesNotGrowWithTheNumberOfMicroBatches) {
  for (const char* scope : {"sequence", "micro_batch", "global"}) {
    Trial s{.router = str("kind: top_k, aux_coeff: 0.5, aux_scope: ", scope)};
    const auto run = [&](int copies_per_batch, int batches) {
      return on_ranks<Values>(1, s, [&](TrainEngine& engine, int) {
        std::vector<std::vector<int32_t>> tokens;
        for (int i = 0; i < copies_per_batch; i++) tokens.insert(tokens.end(), kTwo.begin(), kTwo.end());
        engine.accumulate_gradients(std::vector<ModelBatch>(static_cast<size_t>(batches), rows(tokens)));
        return gradient(engine, kRouter);
      });
    };
    EXPECT_TRUE(close(run(1, 4), run(4, 1), {1e-10, 1e-13})) << scope;
  }
}

TEST(KnownFaults, LB_03_AuxStrengthDoesNotDependOnTheNumberOfRanks) {
  for (const char* scope : {"sequence", "micro_batch", "global"}) {
    const auto run = [&](int world, int ep) {
      Trial s{.router = str("kind: top_k, aux_coeff: 0.5, aux_scope: ", scope), .ep = ep};
      return on_ranks<Values>(world, s, [&](TrainEngine& engine, int) {
        const std::vector<ModelBatch> same = {rows(kTwo)};
        engine.accumulate_gradients(same);
        return gradient(engine, kRouter);
      });
    };
    const Values one = run(1, 1);
    for (const auto& [world, ep] : {std::pair{2, 1}, std::pair{2, 2}, std::pair{4, 2}}) {
      EXPECT_TRUE(close(run(world, ep), one, {1e-10, 1e-13})) << scope << " on " << world;
    }
  }
}

TEST(KnownFaults, LB_05_AuxGradientReachesTheRouterWithoutAnyLabelAndDoublesWithTheCoefficient) {
  const auto run = [&](const char* coefficient) {
    Trial s{.router = str("kind: top_k, aux_coeff: ", coefficient)};
    return on_ranks<Values>(1, s, [&](TrainEngine& engine, int) {
      const std::vector<ModelBatch> masked = {rows(kTwo, /*masked=*/true)};
      const StepResult r = engine.accumulate_gradients(masked);
      EXPECT_EQ(r.loss, 0);
      return gradient(engine, kRouter);
    });
  };
  Values one = run("1.0");
  double largest = 0;
  for (double& v : one) {
    largest = std::max(largest, std::abs(v));
    v *= 2;
  }
  EXPECT_GT(largest, 1e-4);
  EXPECT_TRUE(close(run("2.0"), one, {1e-12, 1e-15}));
}

// Valid tokens per micro-batch [4, 4, 4] or [6, 2, 4]; the losses are sums over tokens, so the split cannot
// matter.
TEST(KnownFaults, LB_07_UnevenValidTokensPerMicroBatchGiveTheSameGradient) {
  const auto run = [&](const std::vector<int64_t>& lengths, const char* scope) {
    Trial s{.router = str("kind: top_k, aux_coeff: 0.5, z_coeff: 0.1, aux_scope: ", scope),
            .moe = "layers: [0]",
            .model = "layers: 1, position: none"};
    return on_ranks<Values>(1, s, [&](TrainEngine& engine, int) {
      std::vector<ModelBatch> batches;
      for (const int64_t length : lengths) {
        ModelBatch batch = rows({{5, 5, 5, 5, 5, 5}});  // equal tokens: equal routing, so equal frequencies
        std::vector<uint8_t> valid(static_cast<size_t>(kSeq));
        std::vector<int32_t> labels(static_cast<size_t>(kSeq), -1);
        for (int64_t i = 0; i < length; i++) valid[static_cast<size_t>(i)] = 1;
        for (int64_t i = 0; i < length; i++) labels[static_cast<size_t>(i)] = 5;
        batch.valid_BS = Tensor::from(valid, Shape{kSeq});
        batch.labels_T = Tensor::from(labels, Shape{kSeq});
        batches.push_back(batch);
      }
      const StepResult r = engine.accumulate_gradients(batches);
      EXPECT_EQ(r.tokens, 12);
      return gradient(engine, "layers.0.moe.router.weight");
    });
  };
  for (const char* scope : {"sequence", "micro_batch", "global"}) {
    EXPECT_TRUE(close(run({6, 2, 4}, scope), run({4, 4, 4}, scope), {1e-10, 1e-13})) << scope;
  }
}

// Two ranks, each token choice concentrated differently per rank: the global loss sees the union, the local
// ones do not.
TEST(KnownFaults, LB_09_GlobalStatisticsSpanTheRanks) {
  const auto aux = [&](const char* scope) {
    Trial s{.router = str("kind: top_k, aux_coeff: 1.0, aux_scope: ", scope),
            .moe = "layers: [0]",
            .model = "layers: 1, position: none"};
    return on_ranks<double>(2, s, [&](TrainEngine& engine, int rank) {
      const int32_t token = rank == 0 ? 3 : 17;
      const std::vector<ModelBatch> mine = {rows({std::vector<int32_t>(static_cast<size_t>(kSeq), token)})};
      return engine.accumulate_gradients(mine).aux_loss;
    });
  };
  EXPECT_LT(aux("global"), aux("micro_batch") - 1e-3);
  // And it is exactly that of one rank with the tokens of both.
  Trial alone{.router = "kind: top_k, aux_coeff: 1.0, aux_scope: micro_batch",
              .moe = "layers: [0]",
              .model = "layers: 1, position: none"};
  EXPECT_NEAR(
      aux("global"),
      on_ranks<double>(
          1, alone,
          [&](TrainEngine& engine, int) {
            const auto of = [](int32_t token) {
              return std::vector<int32_t>(static_cast<size_t>(kSeq), token);
            };
            return engine.accumulate_gradients(std::vector<ModelBatch>{rows({of(3), of(17)})}).aux_loss;
          }),
      1e-12);
  EXPECT_NEAR(aux("micro_batch"), aux("sequence"), 1e-12);  // one sequence per rank here
}

TEST(KnownFaults, LB_13_BI_11_RecomputeCountsAuxLossAndTokensOnce) {
  const auto run = [&](const char* recompute) {
    Trial s{.model = str("layers: 2, recompute: ", recompute)};
    return on_ranks<Values>(1, s, [&](TrainEngine& engine, int) {
      const std::vector<ModelBatch> batch = {rows(kTwo)};
      const StepResult r = engine.step(batch, 0.1);
      Values out = {r.aux_loss, r.loss};
      int64_t total = 0;
      for (const int64_t c : r.moe.at(0).counts_E) total += c;
      EXPECT_EQ(total, 2 * 2 * kSeq);  // tokens * k
      return out;
    });
  };
  EXPECT_EQ(run("none"), run("block"));
}

// MoE with 8 experts, dense, MoE with 8 experts: both biases move; the dense layer in between stops nothing.
TEST(KnownFaults, BI_07_ADenseLayerBetweenMoeLayersStopsNoBias) {
  Trial s{
      .router = "kind: top_k, score: sigmoid, bias_rate: 0.1", .moe = "layers: [0, 2]", .model = "layers: 3"};
  on_ranks<int>(1, s, [&](TrainEngine& engine, int) {
    const std::vector<ModelBatch> batch = {rows(kTwo)};
    engine.step(batch, 0.1);
    const auto buffers = engine.model().buffers();
    EXPECT_EQ(buffers.size(), 2U);
    for (const Buffer* b : buffers) {
      double moved = 0;
      for (const double v : to_doubles(b->value)) moved += std::abs(v);
      EXPECT_GT(moved, 0.1) << b->name;
    }
    return 0;
  });
}

TEST(KnownFaults, BI_09_WithoutBiasBalancingThereIsNoBias) {
  on_ranks<int>(1, Trial{}, [&](TrainEngine& engine, int) {
    EXPECT_TRUE(engine.model().buffers().empty());
    const std::vector<ModelBatch> batch = {rows(kTwo)};
    const auto first = engine.step(batch, 0).moe.at(0).counts_E;
    EXPECT_EQ(engine.step(batch, 0).moe.at(0).counts_E, first);  // counters were cleared
    return 0;
  });
}

TEST(KnownFaults, CAP_01_UnevenTokensPerRankWithCapacityFinish) {
  for (const char* scope : {"sequence", "micro_batch"}) {
    Trial s{.moe = str("first_dense: 1, capacity_factor: 1.0, capacity_scope: ", scope), .ep = 2};
    on_ranks<int>(2, s, [&](TrainEngine& engine, int rank) {
      const std::vector<ModelBatch> mine = {rank == 0 ? rows(kTwo) : rows({kTwo[0]})};
      for (int i = 0; i < 3; i++) EXPECT_TRUE(std::isfinite(engine.step(mine, 0.1).grad_norm));
      return 0;
    });
  }
}

// Plain SGD shows a constant factor on expert gradients that Adam would hide.
TEST(KnownFaults, GS_01_SgdUpdatesAreTheSameOnEveryWorldAndExpertLayout) {
  const auto run = [&](int world, int ep) {
    Trial s{.ep = ep};
    return on_ranks<Values>(world, s, [&](TrainEngine& engine, int rank) {
      const ShardRange mine = shard_range(4, {rank, world});
      const std::vector<std::vector<int32_t>> all = {
          kTwo[0], kTwo[1], {2, 13, 14, 15, 16, 17}, {20, 21, 5, 1, 1, 30}};
      const std::vector<ModelBatch> batch = {rows({all.begin() + mine.begin, all.begin() + mine.end})};
      engine.step(batch, 0.5);
      Values out;
      for (const Parameter* p : engine.parameters()) {
        for (const double v : gather_like(p->value, *p, engine.mesh().world())) out.push_back(v);
      }
      return out;
    });
  };
  const Values one = run(1, 1);
  for (const auto& [world, ep] :
       {std::pair{2, 1}, std::pair{2, 2}, std::pair{4, 1}, std::pair{4, 2}, std::pair{4, 4}}) {
    EXPECT_TRUE(close(run(world, ep), one, {1e-11, 1e-12})) << "world " << world << ", ep " << ep;
  }
}

// The step's loss is the sum of losses over the step's labels, not a mean of micro-batch means.
TEST(KnownFaults, GS_03_MicroBatchesWeighByTheirLabels) {
  on_ranks<int>(1, Trial{.router = "kind: top_k"}, [&](TrainEngine& engine, int) {
    const ModelBatch many = rows({kTwo[0]});  // 5 labels
    ModelBatch few = rows({kTwo[1]});
    few.labels_T = Tensor::from(std::vector<int32_t>{-1, -1, 3, -1, -1, -1}, Shape{kSeq});  // 1 label
    const double a = engine.accumulate_gradients(std::vector<ModelBatch>{many}).loss;
    const double b = engine.accumulate_gradients(std::vector<ModelBatch>{few}).loss;
    const double both = engine.accumulate_gradients(std::vector<ModelBatch>{many, few}).loss;
    EXPECT_NEAR(both, (5 * a + b) / 6, 1e-12);
    EXPECT_GT(std::abs(both - (a + b) / 2), 1e-6);
    return 0;
  });
}

TEST(KnownFaults, GS_05_RanksOrStepsWithoutLabelsGiveNoNan) {
  const auto run = [&](bool with_empty_rank) {
    return on_ranks<Values>(with_empty_rank ? 2 : 1, Trial{.router = "kind: top_k"},
                            [&](TrainEngine& engine, int rank) {
                              const std::vector<ModelBatch> batch = {rows(kTwo, /*masked=*/rank == 1)};
                              const StepResult r = engine.step(batch, 0.1);
                              EXPECT_TRUE(r.updated);
                              Values out = {r.loss};
                              for (const Parameter* p : engine.parameters()) {
                                for (const double v : to_doubles(p->value)) out.push_back(v);
                              }
                              return out;
                            });
  };
  EXPECT_TRUE(close(run(true), run(false), {1e-11, 1e-13}));
  on_ranks<int>(2, Trial{}, [&](TrainEngine& engine, int) {
    const Values before = to_doubles(engine.parameters()[0]->value);
    const std::vector<ModelBatch> batch = {rows(kTwo, /*masked=*/true)};
    const StepResult r = engine.step(batch, 0.1);
    EXPECT_FALSE(r.updated);
    EXPECT_EQ(r.loss, 0);
    EXPECT_EQ(to_doubles(engine.parameters()[0]->value), before);
    return 0;
  });
}

TEST(KnownFaults, CN_05_AnInfiniteGradientOnOneRankSkipsTheStepOnAll) {
  Trial s{
      .router = "kind: top_k, score: sigmoid, bias_rate: 0.1", .optimizer = "adamw", .clip_norm = 1, .ep = 2};
  on_ranks<int>(2, s, [&](TrainEngine& engine, int rank) {
    const auto state = [&] {
      Values out;
      for (const StateTensor& t : engine.state()) {
        for (const double v : to_doubles(t.value)) out.push_back(v);
      }
      out.push_back(static_cast<double>(engine.optimizer().num_steps()));
      return out;
    };
    const std::vector<ModelBatch> batch = {rows(kTwo)};
    for (int i = 0; i < 2; i++) EXPECT_TRUE(engine.step(batch, 0.1).updated);
    const Values before = state();
    Parameter& poisoned = *engine.parameters()[2];
    const auto original = poisoned.leaf.on_grad_ready;
    if (rank == 1) {
      poisoned.leaf.on_grad_ready = [&] {
        poisoned.leaf.grad.data<double>()[0] = HUGE_VAL;
        original();
      };
    }
    const StepResult skipped = engine.step(batch, 0.1);
    EXPECT_FALSE(skipped.updated);
    EXPECT_EQ(where_not_finite(engine, skipped.own_loss_finite),
              str("not finite: the gradient of ", poisoned.name, " on ranks 0, 1 (first in backward)"));
    EXPECT_EQ(where_not_finite(engine, rank == 0).substr(0, 34), "not finite: the loss of rank 1, th");
    poisoned.leaf.on_grad_ready = original;
    EXPECT_EQ(state(), before);
    EXPECT_TRUE(engine.step(batch, 0.1).updated);
    EXPECT_NE(state(), before);
    return 0;
  });
}

TEST(KnownFaults, EV_03_TheReportedLossContainsNoBalancingTerm) {
  const auto losses = [&](const char* coefficient) {
    Trial s{.router = str("kind: top_k, aux_coeff: ", coefficient, ", z_coeff: ", coefficient)};
    return on_ranks<StepResult>(1, s, [&](TrainEngine& engine, int) {
      return engine.accumulate_gradients(std::vector<ModelBatch>{rows(kTwo)});
    });
  };
  const StepResult off = losses("0"), strong = losses("10");
  EXPECT_EQ(off.loss, strong.loss);
  EXPECT_EQ(off.aux_loss, 0);
  EXPECT_GT(strong.aux_loss, 1);
  EXPECT_GT(strong.z_loss, 1);
}

TEST(KnownFaults, LB_15_AuxMemoryIsOfTheOrderOfTheRouting) {
  const int64_t T = 8192, E = 128;
  const Tensor logits = Tensor::zeros({T, E}, DType::f32);
  const int64_t before = device_runtime(DeviceType::cpu).stats().current_bytes;
  device_runtime(DeviceType::cpu).reset_peak();
  BalanceSpec balance;
  balance.aux_coeff = 0.01;
  balance.total_tokens = T;
  const Routed routed = route(logits, {}, {}, RouteSpec{.top_k = 8}, balance);
  // Scores and logits are 4 MiB each; a one-hot tensor of tokens x k x E would be 32 MiB.
  EXPECT_LT(device_runtime(DeviceType::cpu).stats().peak_bytes - before, int64_t{16} << 20);
  EXPECT_NEAR(routed.aux_loss.item(), 0.01, 1e-6);
}

}  // namespace
}  // namespace shoal::testing
