// model.recompute: each choice changes what is kept, and nothing else.
#include <gtest/gtest.h>

#include "core/autograd/tape.h"
#include "tests/support/expect_close.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

// Wide enough that what is kept of a token counts for more than what is kept of an expert.
const char* const kSharedMoe =
    "layers: 3, hidden_size: 32, heads: 4, kv_heads: 2, init: {std: 0.3}, moe: {num_experts: 4, top_k: 2, "
    "hidden: "
    "48, shared_experts: 1, shared_gate: true, first_dense: 1, router: {kind: top_k, aux_coeff: 0.3, "
    "z_coeff: 0.1}}";
const char* const kPostNorm =
    "layers: 2, hidden_size: 32, heads: 2, bias: true, position: learned, norm: {kind: layer_norm, "
    "placement: post}, "
    "ffn: {activation: gelu}, init: {std: 0.3}";
const char* const kPreLayerNorm =
    "layers: 2, hidden_size: 32, heads: 2, bias: true, position: alibi, norm: {kind: layer_norm}, ffn: "
    "{activation: "
    "relu_squared}, tie_embeddings: false, init: {std: 0.3}, moe: {num_experts: 4, top_k: 1, every: 2}";

struct Outcome {
  double loss = 0;
  std::map<std::string, std::vector<double>> gradients;
  std::vector<std::vector<int64_t>> counts;
  int64_t kept = 0;  // bytes that forward leaves for backward
};

Outcome run(const std::string& model, const std::string& recompute, DType dtype) {
  const TinyModel tiny(model + ", recompute: " + recompute, 11, 64, dtype);
  std::vector<int32_t> row;
  for (int32_t s = 0; s < 64; s++) row.push_back(s * s % 11);
  const ModelBatch batch = batch_of({row, {row.rbegin(), row.rend()}});
  ForwardContext context;
  context.totals = StepTotals{126, 128, 1};
  {
    const NoGrad no_grad;  // makes what stays: rope's table, copies of weights
    context.pass = Pass::evaluate;
    tiny.model->loss(batch, context);
    context.pass = Pass::train;
  }
  Tape tape;
  const int64_t before = device_runtime(DeviceType::cpu).stats().current_bytes;
  const LossTerms terms = tiny.model->loss(batch, context);
  Outcome out;
  // The head's gradient is made in forward.
  out.kept = device_runtime(DeviceType::cpu).stats().current_bytes - before;
  for (Parameter* p : tiny.model->parameters())
    out.kept -= p->leaf.grad.defined() ? p->leaf.grad.num_bytes() : 0;
  tape.backward(terms.total);
  out.loss = terms.total.item();
  for (Parameter* p : tiny.model->parameters()) {
    EXPECT_EQ(p->leaf.uses_left, 0) << p->name;
    out.gradients[p->name] = to_doubles(p->leaf.grad);
  }
  for (const auto& stats : tiny.model->end_step(false)) out.counts.push_back(stats.counts_E);
  return out;
}

TEST(Recompute, EveryChoiceGivesTheSameBitsCountsOnceAndKeepsLess) {
  for (const char* model : {kSharedMoe, kPostNorm, kPreLayerNorm}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
      const Outcome plain = run(model, "none", dtype);
      for (const char* recompute :
           {"norms", "activations", "up_projections", "[norms, activations]", "[activations, up_projections]",
            "[norms, up_projections]", "[norms, activations, up_projections]", "packed_weights", "block",
            "[norms, activations, up_projections, packed_weights, block]"}) {
        const Outcome again = run(model, recompute, dtype);
        const std::string where = str(model, ", ", dtype, ", ", recompute);
        EXPECT_EQ(again.loss, plain.loss) << where;
        EXPECT_EQ(again.gradients, plain.gradients) << where;
        EXPECT_EQ(again.counts, plain.counts) << where;
        if (std::string(recompute) != "packed_weights") {
          EXPECT_LT(again.kept, 0.95 * plain.kept) << where;
        }
      }
    }
  }
}

TEST(Recompute, ChoicesAddUp) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto kept = [&](const char* recompute) { return run(kSharedMoe, recompute, dtype).kept; };
    const int64_t none = kept("none"), norms = kept("norms"), activations = kept("activations"),
                  up = kept("up_projections"), all = kept("[norms, activations, up_projections]");
    EXPECT_NEAR(all, none - (none - norms) - (none - activations) - (none - up), 0.01 * none) << dtype;
    EXPECT_LT(all, none / 2) << dtype;
  }
}

TEST(Recompute, PackedWeightsAreNotKeptBetweenUses) {
  const auto packed = [](const char* recompute) {
    const TinyModel tiny(std::string(kSharedMoe) + ", recompute: " + recompute, 11, 8, DType::bf16);
    Tape tape;
    tape.backward(tiny.model->loss(batch_of({{1, 2, 3, 4, 5, 6, 7, 8}}), {}).total);
    int64_t bytes = 0;
    for (Parameter* p : tiny.model->parameters())
      bytes += p->leaf.packed.forward.defined() ? p->leaf.packed.forward.num_bytes() : 0;
    return bytes;
  };
  EXPECT_GT(packed("none"), 0);
  EXPECT_EQ(packed("packed_weights"), 0);
}

TEST(Recompute, NoneStandsAlone) {
  EXPECT_NO_THROW(transformer_options("recompute: []"));
  EXPECT_NO_THROW(transformer_options("recompute: none"));
  try {
    transformer_options("recompute: [norms, none]");
    ADD_FAILURE() << "accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("expected none alone, got it with others"), std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace shoal::testing
