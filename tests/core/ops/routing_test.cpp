// route(): scores, selection, weights, losses and their gradients. Capacity: capacity_test.cpp.
#include "core/ops/routing.h"

#include <numeric>

#include "core/ops/elementwise.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::close;
using testing::error_of;
using testing::expect_same_for_any_team;
using testing::gradcheck;
using testing::random_tensor;
using testing::to_doubles;

constexpr RouterScore kScores[] = {RouterScore::softmax, RouterScore::sigmoid, RouterScore::sqrt_softplus};
const BalanceSpec kNoLosses{};

struct Reference {
  std::vector<double> ids, weights, counts;
  double aux = 0, z = 0, entropy = 0;
};

std::vector<double> reference_scores(const double* x, size_t n, RouterScore kind) {
  std::vector<double> s(n);
  double total = 0;
  for (size_t i = 0; i < n; i++) {
    if (kind == RouterScore::softmax) s[i] = std::exp(x[i]);
    if (kind == RouterScore::sigmoid) s[i] = 1 / (1 + std::exp(-x[i]));
    if (kind == RouterScore::sqrt_softplus) s[i] = std::sqrt(std::log1p(std::exp(x[i])));
    total += s[i];
  }
  for (double& v : s) v /= kind == RouterScore::softmax ? total : 1;
  return s;
}

/// Indices of the best `count` values: value descending, index ascending.
std::vector<size_t> best(const std::vector<double>& values, size_t count) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(std::min(count, order.size()));
  return order;
}

void mask_groups(std::vector<double>& biased, const RouteSpec& spec) {
  const size_t size = biased.size() / static_cast<size_t>(spec.num_groups);
  std::vector<double> group_scores;
  for (size_t begin = 0; begin < biased.size(); begin += size) {
    const std::vector<double> group(biased.begin() + static_cast<int64_t>(begin),
                                    biased.begin() + static_cast<int64_t>(begin + size));
    double score = 0;
    for (const size_t i : best(group, static_cast<size_t>(spec.group_score_top))) score += group[i];
    group_scores.push_back(score);
  }
  std::vector<double> masked(biased.size(), -HUGE_VAL);
  for (const size_t g : best(group_scores, static_cast<size_t>(spec.top_groups))) {
    for (size_t i = g * size; i < (g + 1) * size; i++) masked[i] = biased[i];
  }
  biased = masked;
}

Reference reference(const Tensor& logits, const std::vector<double>& bias, const std::vector<uint8_t>& valid,
                    const RouteSpec& spec, const BalanceSpec& balance) {
  const auto tokens = static_cast<size_t>(logits.size(0)), n = static_cast<size_t>(logits.size(1));
  const auto k = static_cast<size_t>(spec.top_k);
  const std::vector<double> x = to_doubles(logits);
  Reference out;
  out.counts.assign(n, 0);
  std::vector<std::vector<double>> p(tokens);
  for (size_t t = 0; t < tokens; t++) {
    if (!valid.empty() && valid[t] == 0) {
      out.ids.insert(out.ids.end(), k, -1);
      out.weights.insert(out.weights.end(), k, 0);
      continue;
    }
    const std::vector<double> s = reference_scores(&x[t * n], n, spec.score);
    std::vector<double> biased = s;
    for (size_t i = 0; i < n && !bias.empty(); i++) biased[i] += bias[i];
    if (spec.num_groups > 1) mask_groups(biased, spec);
    double chosen = 0, total = 0, exps = 0;
    for (const size_t i : best(biased, k)) {
      out.ids.push_back(static_cast<double>(i));
      out.weights.push_back(s[i]);
      out.counts[i]++;
      chosen += s[i];
    }
    for (size_t j = out.weights.size() - k; j < out.weights.size(); j++) {
      out.weights[j] *= spec.weight_scale / (spec.normalize ? chosen + 1e-20 : 1);
    }
    for (size_t i = 0; i < n; i++) {
      total += s[i];
      exps += std::exp(x[t * n + i]);
    }
    for (size_t i = 0; i < n; i++) {
      p[t].push_back(s[i] / total);
      out.entropy -= p[t][i] * std::log(p[t][i]);
    }
    out.z += balance.z_coeff / static_cast<double>(balance.total_tokens) * std::log(exps) * std::log(exps);
  }
  const size_t group = balance.tokens_per_group > 0 ? static_cast<size_t>(balance.tokens_per_group) : tokens;
  for (size_t t = 0; t < tokens; t++) {
    std::vector<double> f(n, 0.0);
    double assigned = 0;
    for (size_t j = t / group * group * k; j < (t / group + 1) * group * k; j++) {
      if (out.ids[j] < 0) continue;
      f[static_cast<size_t>(out.ids[j])]++;
      assigned++;
    }
    if (balance.frequency_E.defined()) f = to_doubles(balance.frequency_E);
    const double scale = balance.frequency_E.defined() ? 1 : 1 / assigned;
    for (size_t i = 0; i < p[t].size(); i++) {
      out.aux += balance.aux_coeff * static_cast<double>(n) / static_cast<double>(balance.total_tokens) *
                 f[i] * scale * p[t][i];
    }
  }
  return out;
}

struct RouteCase {
  int64_t tokens, experts;
  RouteSpec spec;
  bool bias, valid;
  int64_t tokens_per_group;
};
std::vector<RouteCase> all_cases() {
  std::vector<RouteCase> cases;
  for (const RouterScore score : kScores) {
    for (const bool normalize : {false, true}) {
      const auto spec = [&](int64_t k, double scale = 1, int64_t groups = 1, int64_t top = 1,
                            int64_t best = 2) {
        return RouteSpec{k, score, normalize, scale, groups, top, best};
      };
      cases.push_back({6, 8, spec(2), false, false, 0});
      cases.push_back({6, 5, spec(3, 2.5), true, true, 3});
      cases.push_back({4, 12, spec(4, 1, 4, 2, 2), true, true, 2});
      cases.push_back({4, 12, spec(2, 1, 3, 1, 1), false, false, 1});
      cases.push_back({1, 1, spec(1), false, false, 0});
      cases.push_back({3, 4, spec(4), true, false, 0});
      cases.push_back({2, 70, spec(7), true, true, 0});
    }
  }
  return cases;
}

struct RouteInputs {
  Tensor logits, bias, valid;
  std::vector<uint8_t> valid_flags;
  BalanceSpec balance;
};
RouteInputs inputs_for(const RouteCase& c, DType dtype) {
  RouteInputs in;
  in.logits = random_tensor({c.tokens, c.experts}, dtype, 1, 2);
  if (c.bias) in.bias = random_tensor({c.experts}, dtype, 2, 0.1);
  if (c.valid) {
    for (int64_t t = 0; t < c.tokens; t++) in.valid_flags.push_back(t % 3 != 1);
    in.valid = Tensor::from(in.valid_flags, {c.tokens});
  }
  in.balance = {0.3, 0.7, 11, c.tokens_per_group, {}};
  return in;
}

TEST(Routing, MatchesPlainLoopsForEveryOption) {
  for (const RouteCase& c : all_cases()) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      RouteInputs in = inputs_for(c, dtype);
      for (const bool given : {false, true}) {
        if (given) in.balance.frequency_E = random_tensor({c.experts}, dtype, 9);
        const std::vector<double> bias = c.bias ? to_doubles(in.bias) : std::vector<double>{};
        const Reference want = reference(in.logits, bias, in.valid_flags, c.spec, in.balance);
        const Routed got = route(in.logits, in.bias, in.valid, c.spec, in.balance);
        const double tolerance = dtype == DType::f32 ? 5e-6 : 1e-12;
        EXPECT_EQ(to_doubles(got.expert_ids_TK), want.ids);
        EXPECT_EQ(to_doubles(got.counts_E), want.counts);
        EXPECT_TRUE(close(to_doubles(got.weights_TK), want.weights, {tolerance, tolerance}));
        EXPECT_NEAR(got.aux_loss.item(), want.aux, tolerance);
        EXPECT_NEAR(got.z_loss.item(), want.z, tolerance * std::abs(want.z));
        EXPECT_NEAR(got.entropy.item(), want.entropy, 10 * tolerance);
      }
    }
  }
}

TEST(Routing, GradientsMatchNumericOnesForEveryOption) {
  for (const RouteCase& c : all_cases()) {
    RouteInputs in = inputs_for(c, DType::f64);
    for (const bool given : {false, true}) {
      if (given) in.balance.frequency_E = random_tensor({c.experts}, DType::f64, 9);
      EXPECT_TRUE(gradcheck(
          [&](auto& x) {
            const Routed r = route(x[0], in.bias, in.valid, c.spec, in.balance);
            return std::vector{r.weights_TK, r.aux_loss, r.z_loss};
          },
          {in.logits}))
          << "score " << static_cast<int>(c.spec.score) << ", " << c.tokens << " x " << c.experts;
    }
  }
}

TEST(Routing, GradientIsRightWhenOnlyOneOutputIsUsed) {
  for (const RouterScore score : kScores) {
    for (const size_t used : {size_t{0}, size_t{1}, size_t{2}}) {
      EXPECT_TRUE(gradcheck(
          [&](auto& x) {
            const Routed r = route(x[0], {}, {}, {.score = score}, {0.5, 0.25, 3, 0, {}});
            const std::vector<Tensor> all = {r.weights_TK, r.aux_loss, r.z_loss};
            return std::vector{scale(all[used], 3)};
          },
          {random_tensor({4, 6}, DType::f64, 1)}));
    }
  }
}

Tensor row_of(const std::vector<double>& values) {
  return Tensor::from(values, {1, static_cast<int64_t>(values.size())});
}
std::vector<double> logits_of_sigmoids(std::vector<double> scores) {
  for (double& s : scores) s = std::log(s / (1 - s));
  return scores;
}

TEST(Routing, RT_01_BiasOnlySelects) {
  const Tensor logits = row_of(logits_of_sigmoids({.5, .4, .3}));
  const Tensor bias = Tensor::from(std::vector<float>{0, .3F, 0}, {3});
  RouteSpec spec{.top_k = 1, .score = RouterScore::sigmoid, .normalize = false};
  const Routed one = route(logits, bias, {}, spec, kNoLosses);
  EXPECT_EQ(to_doubles(one.expert_ids_TK), (std::vector<double>{1}));
  EXPECT_TRUE(close(to_doubles(one.weights_TK), {.4}, {1e-12, 0}));
  spec.top_k = 2;
  spec.normalize = true;
  const Routed two = route(logits, bias, {}, spec, kNoLosses);
  EXPECT_EQ(to_doubles(two.expert_ids_TK), (std::vector<double>{1, 0}));
  EXPECT_TRUE(close(to_doubles(two.weights_TK), {4.0 / 9, 5.0 / 9}, {1e-12, 0}));
}

TEST(Routing, RT_03_NormalisationAndScaleAreAppliedInTheStatedOrder) {
  const Tensor logits = row_of({2, 1, 0, -1});
  const auto weights = [&](bool normalize, double scale) {
    return to_doubles(
        route(logits, {}, {}, {.normalize = normalize, .weight_scale = scale}, kNoLosses).weights_TK);
  };
  EXPECT_TRUE(close(weights(false, 1), {.6439, .2369}, {0, 5e-5}));
  EXPECT_TRUE(close(weights(true, 1), {.7311, .2689}, {0, 5e-5}));
  EXPECT_TRUE(close(weights(true, 2.5), {.7311 * 2.5, .2689 * 2.5}, {0, 2e-4}));
  EXPECT_TRUE(close(weights(false, 2.5), {.6439 * 2.5, .2369 * 2.5}, {0, 2e-4}));
}

// Tokens then tie where the highest weights are kept, whatever their scores are.
TEST(Routing, ASingleNormalisedChoiceWeighsTheScaleToTheBit) {
  for (const RouterScore score : {RouterScore::softmax, RouterScore::sigmoid}) {
    const RouteSpec spec{.top_k = 1, .score = score, .normalize = true, .weight_scale = 1.5};
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Routed routed = route(random_tensor({500, 7}, dtype, 3), {}, {}, spec, kNoLosses);
      for (const double w : to_doubles(routed.weights_TK)) ASSERT_EQ(w, 1.5) << dtype;
    }
  }
}

TEST(Routing, RT_05_GroupScoreIsTheSumOfTheBestTwoOrTheMaximum) {
  const Tensor logits = row_of(logits_of_sigmoids({.9, 1e-9, .5, .5}));
  RouteSpec spec{.score = RouterScore::sigmoid, .num_groups = 2, .top_groups = 1, .group_score_top = 2};
  EXPECT_EQ(to_doubles(route(logits, {}, {}, spec, kNoLosses).expert_ids_TK), (std::vector<double>{2, 3}));
  spec.group_score_top = 1;
  EXPECT_EQ(to_doubles(route(logits, {}, {}, spec, kNoLosses).expert_ids_TK), (std::vector<double>{0, 1}));
}

TEST(Routing, RT_07_TiesGoToTheLowestIndexForAnyNumberOfThreads) {
  for (const RouterScore score : kScores) {
    expect_same_for_any_team([&] {
      const Routed r = route(Tensor::zeros({300, 40}, DType::f32), {}, {}, {.score = score}, kNoLosses);
      for (const auto& ids = r.expert_ids_TK.to_vector<int32_t>();
           const size_t n : {size_t{0}, size_t{598}}) {
        EXPECT_EQ(ids[n], 0);
        EXPECT_EQ(ids[n + 1], 1);
      }
      return std::vector{r.expert_ids_TK, r.weights_TK};
    });
  }
}

TEST(Routing, NanScoresAreTheLowestAndNeverBreakTheOrder) {
  const double nan = std::nan("");
  const Tensor logits = row_of({nan, 1, nan, 2, 0});
  const Routed r = route(logits, {}, {}, {.top_k = 4, .score = RouterScore::sigmoid}, kNoLosses);
  EXPECT_EQ(to_doubles(r.expert_ids_TK), (std::vector<double>{3, 1, 4, 0}));
}

TEST(Routing, RT_09_FarNegativeLogitsGiveFiniteWeightsAndGradients) {
  for (const RouterScore score : kScores) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      Leaf leaf;
      leaf.grad_dtype = dtype;
      Tensor logits = Tensor::empty({3, 6}, dtype);
      fill(Device{}, logits, -200);
      logits.grad_ref.leaf = &leaf;
      Tape tape;
      const Routed r = route(logits, {}, {}, {.score = score}, {1, 1, 3, 0, {}});
      EXPECT_TRUE(all_finite(r.weights_TK));
      EXPECT_TRUE(std::isfinite(r.aux_loss.item()) && std::isfinite(r.z_loss.item()));
      EXPECT_TRUE(std::isfinite(r.entropy.item()));
      tape.backward({r.weights_TK, r.aux_loss, r.z_loss},
                    {random_tensor({3, 2}, dtype, 1), cast(Tensor::from(std::vector<float>{1}, {}), dtype),
                     cast(Tensor::from(std::vector<float>{1}, {}), dtype)});
      EXPECT_TRUE(all_finite(leaf.grad)) << static_cast<int>(score) << dtype;
    }
  }
}

std::vector<double> aux_gradient(double coefficient, DType dtype) {
  Leaf leaf;
  leaf.grad_dtype = dtype;
  Tensor logits = random_tensor({7, 5}, dtype, 1);
  logits.grad_ref.leaf = &leaf;
  Tape tape;
  tape.backward(route(logits, {}, {}, {}, {coefficient, 0, 7, 0, {}}).aux_loss);
  return to_doubles(leaf.grad);
}

TEST(Routing, LB_05_AuxGradientReachesTheLogitsAndDoublesWithTheCoefficient) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const std::vector<double> one = aux_gradient(1, dtype), two = aux_gradient(2, dtype);
    for (size_t i = 0; i < one.size(); i++) {
      EXPECT_NE(one[i], 0);
      EXPECT_EQ(two[i], 2 * one[i]);
    }
  }
}

TEST(Routing, LB_11_AuxLossRisesWithImbalanceAndIsOneInBalance) {
  std::vector<double> balanced, skewed;
  for (int t = 0; t < 8; t++) {
    for (int e = 0; e < 4; e++) {
      balanced.push_back(e / 2 == t % 2 ? 3 : -3);
      skewed.push_back(e < 2 ? 3 : -3);
    }
  }
  const BalanceSpec balance{1, 0, 8, 0, {}};
  const double low = route(Tensor::from(balanced, {8, 4}), {}, {}, {}, balance).aux_loss.item();
  const double high = route(Tensor::from(skewed, {8, 4}), {}, {}, {}, balance).aux_loss.item();
  EXPECT_NEAR(low, 1, 1e-12);
  EXPECT_GT(high, 1.9);
}

TEST(Routing, BI_05_CountsAreExactBeyondTheIntegersOfAnyFloat) {
  // bf16 stops at 256 when counting one by one, and has no 40841.
  const Tensor logits = Tensor::zeros({40841, 2}, DType::f32);
  const Routed routed = route(logits, {}, {}, RouteSpec{.top_k = 1}, {});
  ASSERT_EQ(routed.counts_E.dtype(), DType::i64);
  EXPECT_EQ(routed.counts_E.to_vector<int64_t>(), (std::vector<int64_t>{40841, 0}));
}

TEST(Routing, PerSequenceLossesAddUpOverAnySplitOfTheBatch) {
  const Tensor logits = random_tensor({12, 6}, DType::f64, 1);
  std::vector<uint8_t> flags(12, 1);
  flags[4] = flags[5] = flags[11] = 0;
  const Tensor valid = Tensor::from(flags, {12});
  const BalanceSpec balance{0.5, 0.5, 9, 3, {}};
  const Routed whole = route(logits, {}, valid, {}, balance);
  double aux = 0, z = 0;
  for (int64_t begin = 0; begin < 12; begin += 6) {
    const Routed part = route(logits.rows(begin, begin + 6), {}, valid.rows(begin, begin + 6), {}, balance);
    aux += part.aux_loss.item();
    z += part.z_loss.item();
  }
  EXPECT_NEAR(aux, whole.aux_loss.item(), 1e-13);
  EXPECT_NEAR(z, whole.z_loss.item(), 1e-13);
}

TEST(Routing, PaddingTokensChangeNothing) {
  const Tensor logits = random_tensor({4, 6}, DType::f64, 1);
  std::vector<double> padded(8 * 6, 123.0);
  const std::vector<double> values = to_doubles(logits);
  std::copy(values.begin(), values.end(), padded.begin());
  const Tensor valid = Tensor::from(std::vector<uint8_t>{1, 1, 1, 1, 0, 0, 0, 0}, {8});
  std::vector<Routed> results;
  std::vector<Tensor> grads;
  for (const bool pad : {false, true}) {
    Leaf leaf;
    leaf.grad_dtype = DType::f64;
    Tensor x = pad ? Tensor::from(padded, {8, 6}) : logits.clone();
    x.grad_ref.leaf = &leaf;
    Tape tape;
    results.push_back(route(x, {}, pad ? valid : Tensor{}, {}, {1, 1, 4, 0, {}}));
    tape.backward(add(results.back().aux_loss, results.back().z_loss));
    grads.push_back(leaf.grad.rows(0, 4));
    const Tensor padding = leaf.grad.flat(24, leaf.grad.numel() - 24);
    EXPECT_EQ(sum_squares(padding), 0);
  }
  EXPECT_EQ(to_doubles(results[0].aux_loss), to_doubles(results[1].aux_loss));
  EXPECT_EQ(to_doubles(results[0].z_loss), to_doubles(results[1].z_loss));
  EXPECT_EQ(to_doubles(results[0].entropy), to_doubles(results[1].entropy));
  EXPECT_EQ(to_doubles(results[0].counts_E), to_doubles(results[1].counts_E));
  EXPECT_EQ(to_doubles(grads[0]), to_doubles(grads[1]));
}

TEST(Routing, NoTokensGiveZeroLossesAndCounts) {
  for (const int64_t group : {int64_t{0}, int64_t{4}}) {
    const Routed r = route(Tensor::empty({0, 6}, DType::f32), {}, {}, {}, {1, 1, 0, group, {}});
    EXPECT_EQ(r.expert_ids_TK.shape(), (Shape{0, 2}));
    EXPECT_EQ(r.aux_loss.item(), 0);
    EXPECT_EQ(r.z_loss.item(), 0);
    EXPECT_EQ(to_doubles(r.counts_E), std::vector<double>(6, 0.0));
  }
}

TEST(Routing, LossesAreUndefinedWithoutTheirCoefficient) {
  const Routed r = route(random_tensor({3, 4}, DType::f32, 1), {}, {}, {}, kNoLosses);
  EXPECT_FALSE(r.aux_loss.defined());
  EXPECT_FALSE(r.z_loss.defined());
  EXPECT_TRUE(r.entropy.defined());
}

TEST(Routing, IsBitEqualForAnyNumberOfThreads) {
  for (const RouterScore score : kScores) {
    expect_same_for_any_team([&] {
      Leaf leaf;
      Tensor logits = random_tensor({515, 37}, DType::f32, 1);
      logits.grad_ref.leaf = &leaf;
      Tape tape;
      const Routed r = route(logits, {}, {}, {.top_k = 5, .score = score}, {0.1, 0.2, 515, 103, {}});
      tape.backward({r.weights_TK, r.aux_loss, r.z_loss},
                    {random_tensor({515, 5}, DType::f32, 2), Tensor::from(std::vector<float>{1}, {}),
                     Tensor::from(std::vector<float>{1}, {})});
      return std::vector{r.expert_ids_TK,   r.weights_TK.detach(), r.aux_loss.detach(),
                         r.z_loss.detach(), r.entropy.detach(),    leaf.grad};
    });
  }
}

TEST(Routing, ErrorsNameTheBadOption) {
  const Tensor logits = Tensor::zeros({3, 8}, DType::f32);
  const auto message = [&](const RouteSpec& spec, const BalanceSpec& balance = {}) {
    return error_of([&] { route(logits, {}, {}, spec, balance); });
  };
  EXPECT_NE(message({.top_k = 9}).find("expected top_k in 1..8 for 8 experts, got 9"), std::string::npos);
  EXPECT_NE(message({.num_groups = 3}).find("num_groups must divide the 8 experts, got 3"),
            std::string::npos);
  EXPECT_NE(message({.top_k = 3, .num_groups = 4}).find("top_k 3 is more than the 2 experts in 1 groups"),
            std::string::npos);
  EXPECT_NE(message({}, {1, 0, 1, 2, {}}).find("tokens_per_group must divide the 3 rows, got 2"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              route(logits, {}, Tensor::zeros({4}, DType::u8), {}, kNoLosses);
            }).find("a u8 validity flag for each of the 3 tokens"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
