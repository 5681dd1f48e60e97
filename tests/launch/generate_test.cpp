#include "launch/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/autograd/tape.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {
namespace {

std::map<int32_t, double> frequencies(const std::vector<double>& logits, SamplingOptions options,
                                      int64_t draws = 20000) {
  std::map<int32_t, double> out;
  for (int64_t i = 0; i < draws; i++)
    out[sample_token(logits, options, i)] += 1.0 / static_cast<double>(draws);
  return out;
}

TEST(SampleToken, TemperatureZeroTakesTheLargestAndTheSmallestIdOfTies) {
  SamplingOptions greedy{.temperature = 0};
  EXPECT_EQ(sample_token({1, 3, 2, 3}, greedy, 0), 1);
  EXPECT_EQ(sample_token({NAN, -5, NAN}, greedy, 0), 1);
}

TEST(SampleToken, DrawsFollowTheSoftmaxAndTheTemperature) {
  const std::vector<double> logits = {0, std::log(2.0), std::log(5.0)};
  auto plain = frequencies(logits, {});
  EXPECT_NEAR(plain[0], 1.0 / 8, 0.01);
  EXPECT_NEAR(plain[1], 2.0 / 8, 0.01);
  EXPECT_NEAR(plain[2], 5.0 / 8, 0.01);
  auto sharp = frequencies(logits, {.temperature = 0.5});
  EXPECT_NEAR(sharp[2], 25.0 / 30, 0.01);
}

TEST(SampleToken, TopKKeepsTheKMostLikely) {
  auto f = frequencies({1, 2, 3, 2}, {.top_k = 2});
  EXPECT_EQ(f.size(), 2U);
  EXPECT_TRUE(f.contains(2) && f.contains(1));  // the tie at 2 goes to the smaller id
}

// Probabilities .5 .3 .2. The token that crosses p stays; so p = 0.5 keeps one token, p = 0.51 two, p = 0
// one.
TEST(SampleToken, TopPKeepsTheTokenThatCrossesP) {
  const std::vector<double> logits = {std::log(0.3), std::log(0.5), std::log(0.2)};
  EXPECT_EQ(frequencies(logits, {.top_p = 0.499}).size(), 1U);
  EXPECT_EQ(frequencies(logits, {.top_p = 0.51}).size(), 2U);
  EXPECT_EQ(frequencies(logits, {.top_p = 0}).size(), 1U);
  EXPECT_EQ(frequencies(logits, {.top_p = 1}).size(), 3U);
  auto two = frequencies(logits, {.top_p = 0.7});
  EXPECT_NEAR(two[1], 0.5 / 0.8, 0.01);
}

TEST(SampleToken, DependsOnlyOnSeedAndPosition) {
  const std::vector<double> logits(50, 0.0);
  std::vector<int32_t> a, b, c;
  for (int64_t i = 0; i < 20; i++) {
    a.push_back(sample_token(logits, {.seed = 1}, i));
    b.push_back(sample_token(logits, {.seed = 1}, i));
    c.push_back(sample_token(logits, {.seed = 2}, i));
  }
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
}

TEST(Generate, GreedyTokensAreTheArgmaxOfFullForwardPasses) {
  const TinyModel tiny(
      "layers: 2, hidden_size: 16, heads: 2, init: {std: 0.5}, moe: {num_experts: 4, hidden: 8}", 19, 32);
  const std::vector<int32_t> prompt = {3, 1, 4};
  GenerateOptions options;
  options.sampling.temperature = 0;
  options.max_tokens = 6;
  std::vector<int32_t> streamed;
  const std::vector<int32_t> out =
      generate(*tiny.model, prompt, options, [&](int32_t t) { streamed.push_back(t); });
  EXPECT_EQ(out, streamed);
  std::vector<int32_t> all = prompt;
  for (const int32_t token : out) {
    const ModelBatch batch = batch_of({all});
    const NoGrad no_grad;
    ForwardContext context;
    context.pass = Pass::evaluate;
    const Tensor logits = tiny.model->logits(batch, context);
    const std::vector<double> last = logits.rows(batch.seq - 1, batch.seq).to_vector<double>();
    EXPECT_EQ(token, std::max_element(last.begin(), last.end()) - last.begin());
    all.push_back(token);
  }
  EXPECT_EQ(out.size(), 6U);
}

TEST(Generate, StopsAtTheStopTokenAndAtLearnedPositions) {
  const TinyModel tiny("layers: 1, hidden_size: 16, heads: 2, position: learned, init: {std: 0.5}", 19, 8);
  GenerateOptions options;
  options.sampling.temperature = 0;
  options.max_tokens = 100;
  const std::vector<int32_t> out = generate(*tiny.model, {1, 2, 3}, options);
  EXPECT_EQ(out.size(),
            6U);  // positions 0..7 hold the prompt and five tokens; the sixth needs no position of its own
  options.stop_token = out[2];
  const std::vector<int32_t> stopped = generate(*tiny.model, {1, 2, 3}, options);
  EXPECT_LT(stopped.size(), 6U);
  EXPECT_THROW(generate(*tiny.model, {}, options), UsageError);
  EXPECT_THROW(generate(*tiny.model, std::vector<int32_t>(9, 1), options), UsageError);
}

}  // namespace
}  // namespace shoal::testing
