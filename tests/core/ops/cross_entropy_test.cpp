#include "core/ops/cross_entropy.h"

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

Tensor labels_tensor(const std::vector<int32_t>& labels) {
  return Tensor::from(labels, {static_cast<int64_t>(labels.size())});
}

double reference(const std::vector<double>& logits, const std::vector<int32_t>& labels, size_t vocab) {
  double total = 0;
  for (size_t t = 0; t < labels.size(); t++) {
    if (labels[t] < 0) continue;
    const double* row = logits.data() + t * vocab;
    const double top = *std::max_element(row, row + vocab);
    double sum = 0;
    for (size_t v = 0; v < vocab; v++) sum += std::exp(row[v] - top);
    total += std::log(sum) + top - row[labels[t]];
  }
  return total;
}

struct Labels {
  int64_t vocab;
  std::vector<int32_t> labels;
};
const std::vector<Labels> kLabels = {
    {3, {}}, {1, {0}}, {5, {4}}, {7, {0, -1, 6, 3}}, {300, {299, 0, -1}}, {4, {-1, -1}}};

TEST(CrossEntropy, MatchesPlainLoopsForAllSizesAndTypes) {
  for (const auto& [vocab, labels] : kLabels) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Tensor logits = random_tensor({static_cast<int64_t>(labels.size()), vocab}, dtype, 1, 3);
      const double want = 0.5 * reference(to_doubles(logits), labels, static_cast<size_t>(vocab));
      const Tensor loss = cross_entropy(logits, labels_tensor(labels), 0.5);
      EXPECT_EQ(loss.dtype(), dtype);
      EXPECT_NEAR(loss.item(), want, dtype == DType::f32 ? 2e-6 * std::abs(want) : 1e-12) << vocab;
    }
  }
}

TEST(CrossEntropy, GradientMatchesNumericWithAnyUpstreamGradient) {
  for (const auto& [vocab, labels] : kLabels) {
    if (vocab > 100) continue;
    const Tensor logits = random_tensor({static_cast<int64_t>(labels.size()), vocab}, DType::f64, 1);
    EXPECT_TRUE(gradcheck(
        [&](auto& in) { return std::vector{cross_entropy(in[0], labels_tensor(labels), 0.25)}; }, {logits}));
  }
}

TEST(CrossEntropy, WritesTheGradientIntoTheLogitsOnlyWhenOneIsWanted) {
  const Tensor logits = random_tensor({2, 5}, DType::f32, 1);
  const std::vector<float> before = logits.to_vector<float>();
  const Tensor alone = cross_entropy(logits, labels_tensor({1, 2}), 1);
  EXPECT_EQ(logits.to_vector<float>(), before);

  Leaf leaf;
  Tensor wanted = logits.clone();
  wanted.grad_ref.leaf = &leaf;
  Tape tape;
  const Tensor loss = cross_entropy(wanted, labels_tensor({1, 2}), 1);
  EXPECT_EQ(loss.item(), alone.item());
  tape.backward(loss);
  EXPECT_EQ(wanted.to_vector<float>(), leaf.grad.to_vector<float>());
}

TEST(CrossEntropy, IgnoredRowsGetZeroGradientAndAddNothing) {
  Leaf leaf;
  Tensor logits = random_tensor({3, 4}, DType::f32, 1);
  logits.grad_ref.leaf = &leaf;
  Tape tape;
  const Tensor loss = cross_entropy(logits, labels_tensor({-1, -1, -1}), 2);
  EXPECT_EQ(loss.item(), 0);
  tape.backward(loss);
  EXPECT_EQ(leaf.grad.to_vector<float>(), std::vector<float>(12, 0.0F));
}

TEST(CrossEntropy, HugeLogitsStayFinite) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    Leaf leaf;
    leaf.grad_dtype = dtype;
    Tensor logits = random_tensor({4, 9}, dtype, 1, 1000);
    logits.grad_ref.leaf = &leaf;
    Tape tape;
    const Tensor loss = cross_entropy(logits, labels_tensor({0, 1, 2, 3}), 1);
    EXPECT_TRUE(std::isfinite(loss.item()));
    tape.backward(loss);
    EXPECT_TRUE(all_finite(leaf.grad));
  }
}

TEST(CrossEntropy, EqualLogitsGiveTheLogOfTheVocabulary) {
  EXPECT_NEAR(cross_entropy(Tensor::zeros({1, 65}, DType::f64), labels_tensor({64}), 1).item(), 4.17439,
              5e-6);
}

TEST(CrossEntropy, Bf16LogitsGiveAnF32LossAndABf16Gradient) {
  Tensor logits = cast(random_tensor({3, 70}, DType::f32, 1), DType::bf16);
  const std::vector<double> values = to_doubles(logits);
  Tensor exact = Tensor::from(values, {3, 70});
  Leaf leaf, exact_leaf;
  exact_leaf.grad_dtype = DType::f64;
  logits.grad_ref.leaf = &leaf;
  exact.grad_ref.leaf = &exact_leaf;
  Tape tape;
  const Tensor loss = cross_entropy(logits, labels_tensor({5, -1, 69}), 1);
  const Tensor want = cross_entropy(exact, labels_tensor({5, -1, 69}), 1);
  EXPECT_EQ(loss.dtype(), DType::f32);
  EXPECT_NEAR(loss.item(), want.item(), 1e-5);
  tape.backward(add(loss, cast(want, DType::f32)));
  EXPECT_TRUE(close(to_doubles(leaf.grad), to_doubles(exact_leaf.grad), {0.004, 1e-9}));
}

TEST(CrossEntropy, IsBitEqualForAnyNumberOfThreads) {
  std::vector<int32_t> labels;
  for (int32_t t = 0; t < 97; t++) labels.push_back(t % 5 == 0 ? -1 : t * 7 % 501);
  expect_same_for_any_team([&] {
    Leaf leaf;
    Tensor logits = random_tensor({97, 501}, DType::f32, 1);
    logits.grad_ref.leaf = &leaf;
    Tape tape;
    const Tensor loss = cross_entropy(logits, labels_tensor(labels), 0.125);
    tape.backward(scale(loss, 3));
    return std::vector{loss.detach(), leaf.grad};
  });
}

TEST(CrossEntropy, ErrorNamesTheTokenTheLabelAndTheVocabulary) {
  const Tensor logits = Tensor::zeros({3, 5}, DType::f32);
  EXPECT_NE(error_of([&] {
              cross_entropy(logits, labels_tensor({0, 5, 1}), 1);
            }).find("cross_entropy: expected labels in [0, 5) or -1 (ignored), got 5 at token 1"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              cross_entropy(logits, labels_tensor({-2, 0, 1}), 1);
            }).find("got -2 at token 0"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              cross_entropy(logits, labels_tensor({0, 1}), 1);
            }).find("one for each of the 3 rows of logits [3, 5]"),
            std::string::npos);
}

/// Columns [first, first + width) of a matrix.
Tensor columns_of(const Tensor& x, int64_t first, int64_t width) {
  std::vector<double> values;
  const std::vector<double> all = to_doubles(x);
  for (int64_t r = 0; r < x.size(0); r++) {
    const auto row = all.begin() + r * x.size(1) + first;
    values.insert(values.end(), row, row + width);
  }
  return Tensor::from(values, {x.size(0), width});
}

TEST(CrossEntropy, PartsOfTheVocabularyGiveTheLossAndGradientOfAllOfIt) {
  const int64_t vocab = 11, tokens = 5;
  const Tensor logits = random_tensor({tokens, vocab}, DType::f64, 3, 4);
  const Tensor labels = labels_tensor({10, 0, -1, 6, 3});
  const Tensor whole = logits.clone(), want = Tensor::zeros({}, DType::f64);
  cross_entropy_fwd(Device{}, {whole, labels, 0.5, true, want});
  const std::vector<int64_t> starts = {0, 6, 10, 11};
  const Tensor stats = Tensor::empty({3, 3, tokens}, DType::f64);
  for (size_t p = 0; p < 3; p++) {
    const auto at = static_cast<int64_t>(p);
    vocab_stats_fwd(Device{}, columns_of(logits, starts[p], starts[p + 1] - starts[p]), labels,
                    {starts[p], vocab}, stats.rows(at, at + 1));
  }
  for (size_t p = 0; p < 3; p++) {
    const int64_t width = starts[p + 1] - starts[p];
    const Tensor part = columns_of(logits, starts[p], width), total = Tensor::zeros({}, DType::f64);
    vocab_cross_entropy_fwd(Device{}, {part, labels, 0.5, true, total}, {starts[p], vocab}, stats);
    EXPECT_NEAR(total.item(), want.item(), 1e-12);
    EXPECT_TRUE(close(part, columns_of(whole, starts[p], width), {1e-12, 1e-13}));
  }
  EXPECT_NE(
      error_of([&] {
        vocab_stats_fwd(Device{}, logits, labels_tensor({11, 0, 0, 0, 0}), {0, vocab}, stats.rows(0, 1));
      }).find("expected labels in [0, 11) or -1 (ignored), got 11 at token 0"),
      std::string::npos);
}

TEST(CrossEntropy, APartWithoutProbabilityAndHugeLogitsAreExact) {
  const double inf = std::numeric_limits<double>::infinity();
  const Tensor labels = labels_tensor({1});
  const Tensor parts[] = {Tensor::from(std::vector<double>{1e300, 1e300}, {1, 2}),
                          Tensor::from(std::vector<double>{-inf, -inf}, {1, 2})};
  const Tensor stats = Tensor::empty({2, 3, 1}, DType::f64), total = Tensor::zeros({}, DType::f64);
  for (int64_t p = 0; p < 2; p++)
    vocab_stats_fwd(Device{}, parts[p], labels, {2 * p, 4}, stats.rows(p, p + 1));
  for (int64_t p = 0; p < 2; p++) {
    vocab_cross_entropy_fwd(Device{}, {parts[p], labels, 1, true, total}, {2 * p, 4}, stats);
  }
  EXPECT_NEAR(total.item(), 2 * std::log(2.0), 1e-12);
  EXPECT_EQ(to_doubles(parts[0]), (std::vector<double>{0.5, -0.5}));
  EXPECT_EQ(to_doubles(parts[1]), (std::vector<double>{0, 0}));
}

}  // namespace
}  // namespace shoal
