// Context parallel ranks, which hold chunks of every sequence, against one rank: alone and with every other
// axis.
#include "tests/parity/expect_parity.h"

namespace shoal::testing {
namespace {

void expect_both(ParityCase c, int world) {
  for (const ContextKind kind : {ContextKind::all_gather, ContextKind::ring}) {
    c.context = kind;
    expect_parity(c, world);
  }
}

// Chunks of several, one and no tokens; ranks without any; with and without documents.
TEST(ContextParity, ChunksOfAnySizeGiveTheResultOfOneRank) {
  for (const int cp : {2, 3, 4}) {
    for (const int64_t seq : {3, 6, 13}) {
      for (const bool documents : {false, true})
        expect_both(
            {.cp = cp, .balance = "sequence", .capacity = "position", .seq = seq, .documents = documents},
            cp);
    }
  }
  expect_both({.cp = 8, .balance = "bias", .seq = 11}, 8);
}

TEST(ContextParity, RoutersSeeWholeSequences) {
  for (const char* balance : {"none", "sequence", "global", "z_loss", "bias"}) {
    for (const char* capacity : {"off", "probability"})
      expect_both({.ep = 2, .cp = 2, .accumulation = 2, .balance = balance, .capacity = capacity}, 2);
  }
  expect_both({.ep = 2, .cp = 2, .balance = "micro_batch", .capacity = "position"}, 2);
  for (const char* router : {"hash", "expert_choice"})
    expect_both({.ep = 3,
                 .cp = 3,
                 .model = str("moe: {num_experts: 9, top_k: 2, hidden: 8, router: {kind: ", router, "}}")},
                3);
}

TEST(ContextParity, WithTensorDataAndExpertParallelRanks) {
  const char* const kHeads = "heads: 4, kv_heads: 2";
  for (const auto& [world, tp, cp, ep] :
       {std::tuple{4, 2, 2, 4}, {4, 1, 2, 2}, {8, 2, 2, 8}, {8, 2, 4, 2}, {6, 1, 3, 2}}) {
    expect_both({.ep = ep,
                 .tp = tp,
                 .cp = cp,
                 .accumulation = 2,
                 .balance = "sequence",
                 .capacity = "position",
                 .model = kHeads,
                 .seq = 13,
                 .documents = world == 4},
                world);
  }
  expect_both({.ep = 2, .cp = 2, .balance = "bias", .empty_ranks = true}, 4);
  expect_both(
      {.ep = 4, .tp = 4, .cp = 2, .balance = "global", .model = "heads: 8, kv_heads: 2, head_size: 4"}, 8);
}

TEST(ContextParity, WithPipelineStagesAndCutExperts) {
  for (const char* balance : {"sequence", "bias"}) {
    expect_both(
        {.ep = 2, .cp = 2, .accumulation = 4, .balance = balance, .capacity = "position", .pp = 2, .seq = 9},
        4);
    expect_both({.ep = 2,
                 .tp = 2,
                 .etp = 2,
                 .cp = 2,
                 .accumulation = 2,
                 .balance = balance,
                 .model = "heads: 4, kv_heads: 2",
                 .pp = 2},
                8);
  }
}

TEST(ContextParity, EveryKindOfPositionAndOtherArchitectures) {
  for (const char* model :
       {"bias: true, norm: {kind: layer_norm, placement: post}, position: learned, ffn: {activation: gelu}",
        "tie_embeddings: false, position: alibi, ffn: {activation: geglu}, kv_heads: 2",
        "position: {kind: rope, form: adjacent, rotary_size: 4}, moe: {num_experts: 8, top_k: 3, hidden: 8, "
        "shared_experts: 2, shared_gate: true, layers: [0, 2]}",
        "position: sinusoidal, heads: 6, kv_heads: 2, head_size: 4"}) {
    for (const bool documents : {false, true})
      expect_both({.ep = 3,
                   .cp = 3,
                   .model = str(model, model[0] == 'p' ? "" : ", moe: {num_experts: 9, hidden: 8}"),
                   .seq = 13,
                   .documents = documents},
                  3);
  }
}

TEST(ContextParity, RecomputePartsAndPaddedDispatches) {
  for (const char* recompute : {"block", "[norms, activations, up_projections]"}) {
    expect_both({.ep = 2,
                 .cp = 2,
                 .accumulation = 2,
                 .balance = "global",
                 .capacity = "probability",
                 .recompute = recompute},
                4);
  }
  for (const bool pad : {false, true})
    expect_both({.ep = 4,
                 .tp = 2,
                 .cp = 2,
                 .balance = "sequence",
                 .capacity = "position",
                 .model = "heads: 4, kv_heads: 4",
                 .chunks = 2,
                 .pad = pad,
                 .seq = 9},
                4);
  expect_both(
      {.ep = 4, .cp = 4, .dispatcher = "all_gather", .balance = "bias", .dtype = DType::f32, .seq = 17}, 4);
  expect_both({.ep = 2,
               .tp = 2,
               .cp = 2,
               .balance = "sequence",
               .dtype = DType::f32,
               .model = "heads: 4, kv_heads: 2"},
              8);
}

TEST(ContextParity, MixedPrecisionTrainsLikeOneRank) {
  const ParityCase one = one_rank({.dtype = DType::bf16, .model = "moe: {num_experts: 0}", .seq = 13});
  const ParityResult want = run_case(one, 1);
  for (const ContextKind kind : {ContextKind::all_gather, ContextKind::ring}) {
    ParityCase cut = one;
    cut.cp = 3;
    cut.context = kind;
    const ParityResult got = run_case(cut, 3);
    EXPECT_TRUE(close(got.losses, want.losses, {1e-2, 0}));
    for (const auto& [name, values] : want.gradients) {
      double largest = 0;
      for (const double v : values) largest = std::max(largest, std::abs(v));
      EXPECT_TRUE(close(got.gradients.at(name), values, {0, 5e-2 * largest})) << name;
    }
  }
}

TEST(ContextParity, EvaluatesLikeOneRankAndRefusesToDecode) {
  const ParityCase c{.model = "heads: 4, kv_heads: 2", .documents = true};
  const auto loss = [&](int cp, int tp) {
    double sum = 0;
    run_ranks(cp * tp, [&](const std::shared_ptr<Communicator>& world) {
      ParallelLayout layout;
      layout.cp = cp;
      layout.tp = tp;
      layout.edp = cp * tp;
      const Mesh mesh(world, layout);
      TrainEngine engine(parity_engine(c), mesh);
      const std::vector<ModelBatch> batches = {
          cut_sequences(parity_case_batch(c, 0, 0, 3), mesh.coords()[Axis::cp])};
      const TrainEngine::LossSum mine = engine.evaluate(batches);
      if (world->rank() == world->size() - 1) sum = mine.loss + static_cast<double>(mine.labels);
      if (cp == 1) return;
      DecodeState state = engine.model().make_decode_state(1, 2);
      EXPECT_THROW(engine.model().next_logits(Tensor::from(std::vector<int32_t>{1, 2}, {2}), state), Error);
    });
    return sum;
  };
  const double want = loss(1, 1);
  EXPECT_NEAR(loss(3, 1), want, 1e-11 * want);
  EXPECT_NEAR(loss(2, 2), want, 1e-11 * want);
}

}  // namespace
}  // namespace shoal::testing
