// Layouts that the generated table (table_test.cpp) does not have: of the same global batch against one rank.
// Compared: loss, auxiliary losses, gradient norm, expert counts and drops of every step, every raw gradient,
// and weights, router bias and optimizer state after 5 steps.
#include "tests/parity/layouts.h"
#include "tests/parity/expect_parity.h"

namespace shoal::testing {
namespace {

struct Balance {
  std::string kind, capacity;
  friend std::ostream& operator<<(std::ostream& out, const Balance& b) {
    return out << b.kind << ", capacity " << b.capacity;
  }
};

class MixedPrecision : public ::testing::TestWithParam<Balance> {};

// Rounding to bf16 does not depend on these layouts; other ones round other partial sums.
TEST_P(MixedPrecision, OfDataAndExpertParallelRanksGivesTheResultOfOneRank) {
  for (const int world : {1, 2, 4, 8}) {
    for (int ep = 1; ep <= world; ep *= 2) {
      for (const int64_t accumulation : {1, 2}) {
        if (world == 1 && accumulation == 1) continue;
        expect_parity({.ep = ep,
                       .accumulation = accumulation,
                       .dispatcher = accumulation == 1 ? "all_gather" : "all_to_all",
                       .balance = GetParam().kind,
                       .capacity = GetParam().capacity,
                       .dtype = DType::bf16,
                       .model = ""},
                      world);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MixedPrecision,
                         ::testing::Values(Balance{"bias", "off"}, Balance{"sequence", "probability"},
                                           Balance{"global", "position"}, Balance{"none", "off"}),
                         [](const auto& info) {
                           return info.param.kind + "_capacity_" + info.param.capacity;
                         });

TEST(Parity, GS_09_TP_05_TensorParallelRanksGiveTheResultOfOneRank) {
  for (const int world : {2, 4}) {
    for (const int ep : {1, 2, 4}) {
      for (const char* balance : {"none", "sequence", "global", "z_loss", "bias"}) {
        if (ep > world) continue;
        expect_parity({.ep = ep, .tp = 2, .balance = balance, .capacity = "position", .model = "kv_heads: 2"},
                      world);
      }
    }
  }
}

TEST(Parity, TP_03_TensorParallelRanksShareUnevenModels) {
  for (const std::string& model : uneven_models()) {
    for (const auto& [world, tp] : {std::pair{3, 3}, {6, 3}, {2, 2}}) {
      expect_parity({.ep = world == 6 ? 2 : 1, .tp = tp, .accumulation = 2, .model = model}, world);
    }
  }
}

// Their one rank too is of the CPU: tests/cuda/engine_test.cpp.
TEST(Parity, LayoutsOfEveryDeviceGiveTheResultOfOneRank) {
  for (const LayoutCase& layout : layouts_of_every_device()) expect_parity(layout.run, layout.world);
}

TEST(Parity, MuonUpdatesWholeMatricesOnEveryLayoutThatHasThem) {
  const Choice muon = parity_choice<OptimizerRegistry>("muon", "{eps: 1e-3}");
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const auto& [world, ep, cp, pp] :
         {std::tuple{2, 2, 1, 1}, {3, 3, 1, 1}, {4, 2, 2, 1}, {4, 2, 1, 2}}) {
      expect_parity({.ep = ep,
                     .cp = cp,
                     .accumulation = 2,
                     .balance = "bias",
                     .dtype = dtype,
                     .model = "moe: {num_experts: 9, top_k: 2, hidden: 8, first_dense: 1, shared_experts: 1}",
                     .pp = pp,
                     .optimizer = muon},
                    world);
    }
  }
}

TEST(Parity, TensorParallelRanksShareKeyValueHeads) {
  for (const char* model :
       {"heads: 4, kv_heads: 1, bias: true", "heads: 8, kv_heads: 2, head_size: 4, position: alibi",
        "heads: 12, kv_heads: 2, head_size: 4, hidden_size: 16"}) {
    expect_parity({.ep = 2, .tp = 4, .accumulation = 2, .balance = "sequence", .model = model}, 4);
    expect_parity({.ep = 1, .tp = 2, .balance = "bias", .model = model}, 4);
  }
}

TEST(Parity, TensorParallelRanksRecomputeCountAndRoundLikeOneRank) {
  const char* const kModel = "heads: 4, kv_heads: 4";
  for (const char* recompute : {"block", "[norms, activations, up_projections]"}) {
    expect_parity({.ep = 4,
                   .tp = 2,
                   .accumulation = 2,
                   .balance = "global",
                   .capacity = "probability",
                   .recompute = recompute,
                   .model = kModel},
                  4);
  }
  expect_parity({.ep = 2, .tp = 4, .balance = "bias", .empty_ranks = true, .model = kModel}, 8);
  for (const bool pad : {false, true}) {
    expect_parity({.ep = 4,
                   .tp = 4,
                   .balance = "bias",
                   .capacity = "position",
                   .model = kModel,
                   .chunks = 2,
                   .pad = pad},
                  4);
  }
  expect_parity({.ep = 8, .tp = 4, .balance = "bias", .dtype = DType::f32, .model = kModel}, 8);
}

// Partial results are rounded to bf16 before they are summed, so it is another rounding than that of one
// rank.
TEST(Parity, TensorParallelRanksTrainInMixedPrecisionLikeOneRank) {
  const ParityCase one =
      one_rank({.dtype = DType::bf16, .model = "heads: 4, kv_heads: 2, moe: {num_experts: 0}"});
  ParityCase cut = one;
  cut.tp = 4;
  const ParityResult want = run_case(one, 1), got = run_case(cut, 8);
  EXPECT_TRUE(close(got.losses, want.losses, {1e-2, 0}));
  EXPECT_TRUE(close(got.grad_norms, want.grad_norms, {5e-2, 0}));
  for (const auto& [name, values] : want.gradients) {
    double largest = 0;
    for (const double v : values) largest = std::max(largest, std::abs(v));
    EXPECT_TRUE(close(got.gradients.at(name), values, {0, 5e-2 * largest})) << name;
  }
}

TEST(Parity, TensorParallelRanksDecodeAndEvaluateLikeOneRank) {
  ParityCase c{.model = "heads: 4, kv_heads: 2"};
  const std::vector<double> want = decode_and_evaluate(c, 1);
  for (const int ranks : {2, 4}) {
    c.tp = ranks;
    EXPECT_TRUE(close(decode_and_evaluate(c, ranks), want, {1e-11, 1e-11})) << ranks;
  }
}

// 7 experts of width 9 with biases: nothing divides.
TEST(Parity, ExpertTensorParallelRanksAndUnevenExpertsGiveTheResultOfOneRank) {
  const char* const kModel =
      "heads: 4, kv_heads: 2, moe: {num_experts: 7, top_k: 3, hidden: 9, shared_experts: 1, "
      "first_dense: 1, router: {kind: top_k, score: sigmoid, bias_rate: 0.01, aux_coeff: 0.1}}";
  for (const auto& [world, tp, ep, etp] : {std::tuple{2, 1, 2, 1},
                                           {3, 1, 3, 1},
                                           {4, 2, 4, 1},
                                           {2, 1, 1, 2},
                                           {3, 1, 1, 3},
                                           {4, 1, 2, 2},
                                           {4, 2, 2, 2},
                                           {6, 1, 3, 2},
                                           {8, 2, 2, 4},
                                           {8, 2, 2, 2}}) {
    const std::string biased = str("bias: true, ", kModel);
    for (const char* dispatcher : {"all_to_all", "all_gather"})
      expect_parity({.ep = ep, .tp = tp, .etp = etp, .dispatcher = dispatcher, .model = biased}, world);
    // Without biases: those start at zero, and are made of rounding alone where little flows into them.
    expect_parity({.ep = ep, .tp = tp, .etp = etp, .dtype = DType::f32, .model = kModel, .chunks = 2}, world);
  }
}

TEST(Parity, ExpertTensorParallelRanksDropPadRecomputeAndWaitForRanksWithoutRows) {
  for (const char* recompute : {"none", "block", "[norms, activations, up_projections]"}) {
    expect_parity({.ep = 2,
                   .tp = 2,
                   .etp = 2,
                   .accumulation = 2,
                   .balance = "global",
                   .capacity = "probability",
                   .recompute = recompute,
                   .model = "heads: 4, kv_heads: 4"},
                  4);
  }
  for (const bool pad : {false, true}) {
    expect_parity({.ep = 2,
                   .etp = 2,
                   .balance = "bias",
                   .capacity = "position",
                   .empty_ranks = true,
                   .model = "bias: true",
                   .chunks = 2,
                   .pad = pad},
                  8);
  }
}

TEST(Parity, DispatchOverTwoLevelsGivesTheResultOfOneRank) {
  for (const auto& [world, ep, etp, per_node] :
       {std::tuple{2, 2, 1, 1}, {4, 4, 1, 2}, {8, 4, 2, 4}, {8, 8, 1, 2}}) {
    for (const char* recompute : {"none", "block"}) {
      expect_parity({.ep = ep,
                     .etp = etp,
                     .accumulation = 2,
                     .dispatcher = "hierarchical",
                     .balance = "bias",
                     .capacity = recompute == std::string("none") ? "position" : "off",
                     .recompute = recompute,
                     .model = "",
                     .ranks_per_node = per_node},
                    world);
    }
  }
  const ParityCase mixed{
      .ep = 2, .dispatcher = "hierarchical", .dtype = DType::f32, .model = "", .ranks_per_node = 1};
  expect_parity(mixed, 2);
}

TEST(Parity, RanksWithoutAnySequenceChangeNothing) {
  for (const int ep : {1, 2, 4}) {
    for (const char* balance : {"sequence", "bias"}) {
      expect_parity({.ep = ep, .balance = balance, .capacity = "position", .empty_ranks = true, .model = ""},
                    4);
    }
  }
}

TEST(Parity, UnevenSequencesPerRankChangeNothing) {
  expect_parity(
      {.ep = 3, .balance = "none", .model = "moe: {num_experts: 9, top_k: 2, hidden: 8, first_dense: 1}"}, 3);
  expect_parity({.ep = 1, .accumulation = 3, .balance = "global", .model = ""}, 3);
}

TEST(Parity, RecomputeChangesNothing) {
  for (const char* recompute : {"block", "[norms, activations, up_projections]"}) {
    for (const char* dispatcher : {"all_to_all", "all_gather"}) {
      expect_parity({.ep = 2,
                     .accumulation = 2,
                     .dispatcher = dispatcher,
                     .balance = "global",
                     .capacity = "position",
                     .recompute = recompute,
                     .model = ""},
                    2);
    }
  }
  expect_parity({.ep = 1, .balance = "bias", .recompute = "block", .model = ""}, 1);
}

TEST(Parity, ExpertsInPartsHaveTheBitsOfTheWhole) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const char* recompute : {"none", "[norms, activations, up_projections, packed_weights]", "block"}) {
      ParityCase c{.ep = 2,
                   .accumulation = 2,
                   .balance = "bias",
                   .recompute = recompute,
                   .dtype = dtype,
                   .empty_ranks = recompute == std::string("block"),
                   .model = "bias: true"};
      const ParityResult whole = run_case(c, 2);
      for (const int64_t chunks : {2, 3}) {
        c.chunks = chunks;
        EXPECT_TRUE(same_result(run_case(c, 2), whole, 0)) << c.name(2);
      }
    }
  }
  expect_parity({.ep = 2, .balance = "global", .capacity = "position", .model = "", .chunks = 4}, 4);
  expect_parity({.ep = 3,
                 .balance = "none",
                 .model = "moe: {num_experts: 9, top_k: 2, hidden: 8, first_dense: 1}",
                 .chunks = 2},
                3);
}

TEST(Parity, PaddingToTheCapacityChangesNothing) {
  for (const char* capacity : {"position", "probability"}) {
    ParityCase c{.balance = "sequence", .capacity = capacity, .model = ""};
    const ParityResult want = run_case(one_rank(c), 1);
    c.pad = true;
    for (const auto& [world, ep, chunks, empty_ranks] :
         {std::tuple{1, 1, 1, false}, {4, 1, 1, false}, {4, 2, 1, true}, {4, 4, 2, false}, {2, 2, 3, true}}) {
      c.ep = ep;
      c.chunks = chunks;
      c.empty_ranks = empty_ranks;
      EXPECT_TRUE(same_result(run_case(c, world), want, 1e-11)) << c.name(world);
    }
  }
}

// Whose tokens have up to as many choices as there are experts.
TEST(Parity, PaddingToTheCapacityChangesNothingWhereExpertsChoose) {
  const char* experts =
      "moe: {num_experts: 8, top_k: 2, hidden: 8, capacity_factor: 0.5, router: expert_choice";
  const ParityResult want = run_case({.model = str(experts, "}")}, 1);
  for (const int world : {1, 2}) {
    const ParityCase c{.ep = world, .model = str(experts, ", pad_to_capacity: true}")};
    EXPECT_TRUE(same_result(run_case(c, world), want, 1e-11)) << c.name(world);
  }
}

TEST(Parity, OtherArchitecturesGiveTheResultOfOneRank) {
  for (const char* model :
       {"bias: true, norm: {kind: layer_norm, placement: post}, position: learned, ffn: {activation: gelu}",
        "tie_embeddings: false, position: alibi, ffn: {activation: geglu}, kv_heads: 2",
        "position: {kind: rope, form: adjacent, rotary_size: 4}, moe: {num_experts: 8, top_k: 3, hidden: 8, "
        "shared_experts: 2, "
        "shared_gate: true, layers: [0, 2], router: {kind: top_k, score: sigmoid, num_groups: 4, top_groups: "
        "2, aux_coeff: 0.1}}",
        "position: sinusoidal, moe: {num_experts: 8, top_k: 1, hidden: 8, every: 2, router: {kind: top_k, "
        "normalize: false}}",
        "position: none, moe: {num_experts: 8, top_k: 8, hidden: 8}"}) {
    expect_parity({.ep = 2, .accumulation = 2, .model = model}, 4);
  }
}

// Scales are shared by the rows of an expert that are multiplied at once, which are others in each layout. As
// they are powers of two, only numbers some 2^14 times smaller than the largest are rounded differently.
TEST(Parity, Fp8ExpertsGiveTheResultOfOneRankWithinTheUsualBound) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto with = [&](const std::string& precision, int ep, int64_t accumulation) {
      return ParityCase{.ep = ep,
                        .accumulation = accumulation,
                        .dtype = dtype,
                        .model = str("moe: {num_experts: 8, top_k: 2, hidden: 16, shared_experts: 1, "
                                     "first_dense: 1, expert_precision: ",
                                     precision, "}")};
    };
    for (const char* precision : {"fp8", "fp8_block"}) {
      for (const auto& [ep, accumulation] : {std::pair{1, 1}, {2, 2}, {4, 1}})
        expect_parity(with(precision, ep, accumulation), 4);
      ParityCase parts = with(precision, 2, 1);
      const ParityResult whole = run_case(parts, 2);
      parts.chunks = 2;
      EXPECT_TRUE(same_result(run_case(parts, 2), whole, 0)) << "parts of a dispatch change " << precision;
      EXPECT_FALSE(same_result(run_case(with(precision, 1, 1), 1), run_case(with("same", 1, 1), 1), 1e-3))
          << "nothing was multiplied in fp8";
    }
  }
}

// The local auxiliary loss depends on what a micro-batch is, but not on which rank runs it.
TEST(Parity, MicroBatchAuxLossDependsOnTheMicroBatchesOnly) {
  const ParityResult four = run_case({.accumulation = 4, .balance = "micro_batch", .model = ""}, 1);
  EXPECT_TRUE(same_result(run_case({.ep = 2, .accumulation = 2, .balance = "micro_batch", .model = ""}, 2),
                          four, 1e-11));
  EXPECT_TRUE(same_result(run_case({.ep = 4, .accumulation = 1, .balance = "micro_batch", .model = ""}, 4),
                          four, 1e-11));
}

// The table must be able to fail: a different seed of one weight is seen.
TEST(Parity, SeesADifferentResult) {
  const ParityResult a = run_case(one_rank({.balance = "bias", .model = ""}), 1);
  const ParityResult b = run_case(one_rank({.balance = "bias", .model = "init: {std: 0.3000001}"}), 1);
  EXPECT_FALSE(same_result(b, a, 1e-11));
}

}  // namespace
}  // namespace shoal::testing
