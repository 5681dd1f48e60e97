// Parameter and FLOP counts against numbers worked out by hand (never with the code's own formulas).
#include <gtest/gtest.h>

#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

int64_t count_parameters(const Module& module) {
  int64_t total = 0;
  for (const Parameter* p : module.parameters()) total += p->global_shape.numel();
  return total;
}

// The published GPT-2 small: 124,439,808 parameters with biases and a tied head.
TEST(ModelFacts, Gpt2SmallHasItsPublishedNumberOfParameters) {
  const auto options = transformer_options(
      "layers: 12, hidden_size: 768, heads: 12, bias: true, position: learned, norm: {kind: layer_norm}, "
      "ffn: {activation: gelu}");
  const ModelFacts facts = options->facts(50257, 1024);
  EXPECT_EQ(facts.params_total, 124'439'808);
  EXPECT_EQ(facts.params_active, 124'439'808);
  EXPECT_EQ(facts.params_embedding, (50257 + 1024) * 768);
}

// hidden 64, expert FFN 128, SwiGLU, E = 8, k = 2, one shared: FFN training FLOPs per token and layer are
// 6 * 3 * 64 * 128 * 3 = 442,368; counting all experts would give 1,327,104.
TEST(ModelFacts, LG_01_FlopsCountActiveExpertsOnly) {
  const char* common =
      "hidden_size: 64, heads: 4, position: none, moe: {num_experts: 8, top_k: 2, hidden: 128, "
      "shared_experts: 1}";
  const double two =
      transformer_options(std::string("layers: 2, ") + common)->facts(100, 32).flops_per_token();
  const double one =
      transformer_options(std::string("layers: 1, ") + common)->facts(100, 32).flops_per_token();
  // Attention: qkv and out 4 * 64 * 64 multiply-adds, scores and values 32 * 64 (causal half); router 8 * 64.
  const double attention = 6.0 * (4 * 64 * 64 + 32 * 64), router = 6.0 * 8 * 64;
  EXPECT_DOUBLE_EQ(two - one, 442'368 + attention + router);
}

// The reference configuration of docs/performance.md: 232 MFLOP per token, worked out term by term there.
TEST(ModelFacts, ReferenceConfigurationCosts232MegaflopPerToken) {
  const auto options = transformer_options(
      "layers: 8, hidden_size: 512, heads: 8, kv_heads: 4, tie_embeddings: false, "
      "moe: {num_experts: 16, top_k: 2, hidden: 704, shared_experts: 1}");
  const ModelFacts facts = options->facts(8192, 512);
  const double per_layer = 512.0 * 1024 + 512 * 512 + 512 * 512 + 512 * 16 + 3.0 * 3 * 512 * 704;
  EXPECT_DOUBLE_EQ(facts.flops_forward, 2 * (8 * per_layer + 512.0 * 8192));
  EXPECT_NEAR(facts.flops_per_token() / 1e6, 232, 1);
  EXPECT_NEAR(static_cast<double>(facts.params_total) / 1e6, 161.8, 0.1);
}

TEST(ModelFacts, CountsEqualTheParametersThatAreMade) {
  for (const char* settings :
       {"layers: 2, hidden_size: 16, heads: 4, kv_heads: 2",
        "layers: 2, hidden_size: 16, heads: 4, bias: true, position: learned, norm: {kind: layer_norm, "
        "placement: post}, "
        "ffn: {activation: relu, hidden: 24}, tie_embeddings: false",
        "layers: 3, hidden_size: 16, heads: 2, head_size: 4, bias: true, moe: {num_experts: 6, top_k: 3, "
        "hidden: 8, "
        "shared_experts: 2, shared_gate: true, first_dense: 1, router: {kind: top_k, bias_rate: 0.1}}",
        "layers: 4, hidden_size: 16, heads: 1, ffn: {activation: silu}, moe: {num_experts: 4, top_k: 1, "
        "hidden: 8, layers: [1, 3]}"}) {
    const TinyModel tiny(settings, 37, 12);
    EXPECT_EQ(tiny.model->facts().params_total, count_parameters(*tiny.model)) << settings;
  }
}

TEST(ModelFacts, ActiveParametersLeaveOutUnusedExperts) {
  const auto options =
      transformer_options("layers: 1, hidden_size: 16, heads: 2, moe: {num_experts: 8, top_k: 2, hidden: 4}");
  const ModelFacts facts = options->facts(10, 4);
  EXPECT_EQ(facts.params_total - facts.params_active, 6 * 3 * 16 * 4);
}

TEST(FfnHidden, AutoIsEightThirdsRoundedUpTo128WhenGatedElseFourTimes) {
  EXPECT_EQ(auto_ffn_hidden(512, true), 1408);
  EXPECT_EQ(auto_ffn_hidden(768, true), 2048);
  EXPECT_EQ(auto_ffn_hidden(48, true), 128);
  EXPECT_EQ(auto_ffn_hidden(512, false), 2048);
}

TEST(TransformerOptions, CF_03_EveryViolatedRuleIsNamedAtOnce) {
  try {
    transformer_options(
        "layers: 2, hidden_size: 30, heads: 4, kv_heads: 3, moe: {num_experts: 2, top_k: 4, shared_gate: "
        "true, pad_to_capacity: true}");
    FAIL() << "expected an error";
  } catch (const UsageError& e) {
    const std::string text = e.what();
    for (const char* part :
         {"divisor of hidden_size (30), got 4", "divisor of heads (4), got 3", "1..num_experts (2), got 4",
          "nothing to gate", "without one there is no capacity"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
    }
  }
}

TEST(TransformerOptions, MoeLayersFollowFirstDenseEveryOrTheList) {
  MoeOptions moe;
  moe.num_experts = 4;
  moe.first_dense = 1;
  moe.every = 2;
  std::vector<bool> pattern;
  for (int64_t l = 0; l < 5; l++) pattern.push_back(moe.is_moe_layer(l));
  EXPECT_EQ(pattern, (std::vector<bool>{false, false, true, false, true}));
  moe.layers = {0, 3};
  EXPECT_TRUE(moe.is_moe_layer(0));
  EXPECT_FALSE(moe.is_moe_layer(2));
}

}  // namespace
}  // namespace shoal::testing
