// The parity table of pipeline stages: against one rank, alone and with every other axis.
#include "tests/parity/expect_parity.h"

namespace shoal::testing {
namespace {

constexpr const char* kFourLayers = "layers: 4, kv_heads: 2";
constexpr const char* kSixLayers = "layers: 6, kv_heads: 2";

TEST(PipelineParity, StagesGiveTheResultOfOneRank) {
  for (const int pp : {2, 3, 4}) {
    for (const int64_t accumulation : {1, 2, 4}) {
      for (const char* schedule : {"1f1b", "gpipe", "zero_bubble"}) {
        expect_parity({.accumulation = accumulation,
                       .balance = "sequence",
                       .capacity = "position",
                       .model = kFourLayers,
                       .pp = pp,
                       .schedule = schedule},
                      pp);
      }
    }
  }
}

TEST(PipelineParity, StagesWorkWithEveryOtherAxisAndBalance) {
  for (const char* balance : {"none", "sequence", "global", "z_loss", "bias"}) {
    expect_parity({.accumulation = 2, .balance = balance, .model = kFourLayers, .pp = 2}, 4);
    expect_parity({.ep = 2, .accumulation = 2, .balance = balance, .model = kFourLayers, .pp = 2}, 4);
    expect_parity({.ep = 2, .tp = 2, .accumulation = 3, .balance = balance, .model = kFourLayers, .pp = 2},
                  4);
    expect_parity({.ep = 4,
                   .tp = 2,
                   .accumulation = 2,
                   .balance = balance,
                   .capacity = "probability",
                   .model = kFourLayers,
                   .pp = 2},
                  8);
  }
  expect_parity(
      {.ep = 2, .accumulation = 2, .balance = "bias", .dtype = DType::f32, .model = kFourLayers, .pp = 4}, 8);
}

TEST(PipelineParity, InterleavedStagesGiveTheResultOfOneRank) {
  for (const char* balance : {"none", "global", "bias"}) {
    expect_parity({.accumulation = 4,
                   .balance = balance,
                   .model = kFourLayers,
                   .pp = 2,
                   .virtual_stages = 2,
                   .schedule = "interleaved"},
                  2);
    expect_parity({.ep = 2,
                   .tp = 2,
                   .accumulation = 2,
                   .balance = balance,
                   .capacity = "position",
                   .model = kFourLayers,
                   .pp = 2,
                   .virtual_stages = 2,
                   .schedule = "interleaved"},
                  4);
  }
  expect_parity({.accumulation = 6,
                 .balance = "sequence",
                 .model = kSixLayers,
                 .pp = 3,
                 .virtual_stages = 2,
                 .schedule = "interleaved"},
                3);
  expect_parity({.accumulation = 2,
                 .balance = "sequence",
                 .model = kSixLayers,
                 .pp = 2,
                 .virtual_stages = 3,
                 .schedule = "interleaved"},
                4);
}

TEST(PipelineParity, WeightGradientsThatArePutOffAreTheSame) {
  for (const char* recompute : {"none", "block", "[norms, activations, up_projections]"}) {
    expect_parity({.ep = 2,
                   .tp = 2,
                   .accumulation = 4,
                   .balance = "global",
                   .recompute = recompute,
                   .model = "layers: 4, kv_heads: 2, bias: true, moe: {num_experts: 8, top_k: 2, hidden: 8, "
                            "shared_experts: 1, shared_gate: true}",
                   .pp = 2,
                   .schedule = "zero_bubble"},
                  4);
  }
  for (const DType dtype : {DType::f64, DType::bf16}) {  // the same sums in the same order
    ParityCase c{.accumulation = 4, .balance = "bias", .dtype = dtype, .model = kFourLayers, .pp = 4};
    const ParityResult together = run_case(c, 4);
    c.schedule = "zero_bubble";
    EXPECT_TRUE(same_result(run_case(c, 4), together, 0)) << c.name(4);
  }
}

TEST(PipelineParity, AnySplitOfLayersGivesTheResultOfOneRank) {
  for (const std::vector<int64_t>& layers :
       {std::vector<int64_t>{1, 3}, {3, 1}, {4, 0}, {0, 4}, {0, 4, 0}, {1, 2, 1}, {0, 1, 1, 2}}) {
    for (const bool tied : {true, false}) {
      expect_parity({.accumulation = 2,
                     .balance = "bias",
                     .model = str(kFourLayers, ", tie_embeddings: ", tied ? "true" : "false"),
                     .pp = static_cast<int>(layers.size()),
                     .stage_layers = layers},
                    static_cast<int>(layers.size()));
    }
  }
}

TEST(PipelineParity, OtherArchitecturesGiveTheResultOfOneRank) {
  for (const char* model :
       {"bias: true, norm: {kind: layer_norm, placement: post}, position: learned, ffn: {activation: gelu}",
        "tie_embeddings: false, position: alibi, ffn: {activation: geglu}, kv_heads: 2",
        "position: sinusoidal, moe: {num_experts: 8, top_k: 2, hidden: 8, layers: [0]}",
        "position: none, moe: {num_experts: 8, top_k: 2, hidden: 8, layers: [2], router: {kind: top_k, "
        "score: sigmoid, bias_rate: 0.01, aux_coeff: 0.1}}",
        "moe: {num_experts: 0}"}) {
    expect_parity({.accumulation = 2, .model = model, .pp = 3}, 3);
    expect_parity({.accumulation = 2, .model = model, .pp = 2}, 4);
  }
}

TEST(PipelineParity, RecomputationAndRanksWithoutSequencesChangeNothing) {
  for (const char* recompute : {"block", "[norms, activations, up_projections]"}) {
    expect_parity({.ep = 2,
                   .accumulation = 4,
                   .balance = "global",
                   .capacity = "position",
                   .recompute = recompute,
                   .model = kFourLayers,
                   .pp = 2},
                  4);
  }
  expect_parity(
      {.ep = 2, .accumulation = 3, .balance = "bias", .empty_ranks = true, .model = kFourLayers, .pp = 2}, 4);
  // More micro-batches than sequences: some have no tokens.
  expect_parity({.accumulation = 6, .balance = "sequence", .model = kFourLayers, .pp = 2}, 4);
}

TEST(PipelineParity, StagesDecodeAndEvaluateLikeOneRank) {
  const std::vector<double> want = decode_and_evaluate({.model = kFourLayers}, 1);
  for (const ParityCase& c :
       {ParityCase{.model = kFourLayers, .pp = 2}, ParityCase{.model = kFourLayers, .pp = 3},
        ParityCase{.tp = 2, .model = kFourLayers, .pp = 2, .virtual_stages = 2, .schedule = "interleaved"}}) {
    const int ranks = c.pp * c.tp;
    EXPECT_TRUE(close(decode_and_evaluate(c, ranks), want, {1e-11, 1e-11})) << c.name(ranks);
  }
}

}  // namespace
}  // namespace shoal::testing
