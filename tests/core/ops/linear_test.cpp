#include "core/ops/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using testing::close;
using testing::gradcheck;
using testing::random_tensor;
using testing::to_doubles;

/// y = x w^T + b per group of rows, by the definition.
std::vector<double> naive(const Tensor& x, const Tensor& weight, const Tensor& bias,
                          const std::vector<int64_t>& rows) {
  const auto xs = to_doubles(x), ws = to_doubles(weight);
  const std::vector<double> bs = bias ? to_doubles(bias) : std::vector<double>{};
  const auto k = static_cast<size_t>(weight.size(-1)), n = static_cast<size_t>(weight.size(-2));
  std::vector<double> y;
  size_t r = 0;
  for (size_t g = 0; g < rows.size(); g++) {
    for (int64_t i = 0; i < rows[g]; i++, r++) {
      for (size_t j = 0; j < n; j++) {
        double sum = bias ? bs[g * n + j] : 0;
        for (size_t p = 0; p < k; p++) sum += xs[r * k + p] * ws[(g * n + j) * k + p];
        y.push_back(sum);
      }
    }
  }
  return y;
}

TEST(Linear, MatchesTheTripleLoopForOddSizesWithAndWithoutBias) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const testing::Tolerance tolerance =
        dtype == DType::f32 ? testing::Tolerance{1e-5, 1e-5} : testing::Tolerance{1e-13, 1e-13};
    for (const auto& [t, n, k] : {std::tuple{1, 1, 1}, {1, 33, 65}, {19, 7, 3}, {50, 96, 48}, {0, 4, 5}}) {
      const Tensor x = random_tensor({t, k}, dtype, 1), w = random_tensor({n, k}, dtype, 2),
                   b = random_tensor({n}, dtype, 3);
      EXPECT_TRUE(close(to_doubles(linear(x, w)), naive(x, w, {}, {t}), tolerance));
      EXPECT_TRUE(close(to_doubles(linear(x, w, b)), naive(x, w, b, {t}), tolerance));
    }
  }
}

TEST(Linear, KeepsLeadingDimensions) {
  const Tensor x = random_tensor({2, 3, 5}, DType::f64, 1), w = random_tensor({4, 5}, DType::f64, 2);
  const Tensor y = linear(x, w);
  EXPECT_EQ(y.shape(), Shape({2, 3, 4}));
  EXPECT_TRUE(close(to_doubles(y), naive(x, w, {}, {6}), {1e-13, 1e-13}));
  EXPECT_EQ(linear(random_tensor({5}, DType::f64, 1), w).shape(), Shape({4}));
}

TEST(Linear, GradientsMatchNumeric) {
  const auto body = [](const std::vector<Tensor>& in) { return std::vector{linear(in[0], in[1], in[2])}; };
  const Tensor x = random_tensor({2, 3, 5}, DType::f64, 1), w = random_tensor({7, 5}, DType::f64, 2),
               b = random_tensor({7}, DType::f64, 3);
  EXPECT_TRUE(gradcheck(body, {x, w, b}));
  EXPECT_TRUE(gradcheck(body, {x, w, {}}));
}

TEST(Linear, GradientsMatchNumericWhenNothingIsALeaf) {
  // linear of linear: the inner results are slots of the tape, so the weight gradient is delivered.
  const auto body = [](const std::vector<Tensor>& in) {
    return std::vector{linear(in[0], linear(in[1], in[2]))};
  };
  EXPECT_TRUE(gradcheck(body, {random_tensor({3, 5}, DType::f64, 1), random_tensor({4, 2}, DType::f64, 2),
                               random_tensor({5, 2}, DType::f64, 3)}));
}

TEST(Linear, WeightGradientAccumulatesOverTwoPasses) {
  Tensor x = random_tensor({3, 5}, DType::f32, 1), w = random_tensor({4, 5}, DType::f32, 2);
  Leaf leaf;
  w.grad_ref.leaf = &leaf;
  const auto pass = [&] {
    Tape tape;
    const Tensor y = linear(x, w);
    tape.backward({y}, {random_tensor({3, 4}, DType::f32, 3)});
  };
  pass();
  const auto once = leaf.grad.to_vector<float>();
  pass();
  const auto twice = leaf.grad.to_vector<float>();
  for (size_t i = 0; i < once.size(); i++) EXPECT_FLOAT_EQ(twice[i], 2 * once[i]);
}

TEST(Linear, EmptyInputGivesZeroWeightGradient) {
  Tensor x = Tensor::empty({0, 5}, DType::f32), w = random_tensor({4, 5}, DType::f32, 2);
  Leaf leaf;
  w.grad_ref.leaf = &leaf;
  Tape tape;
  const Tensor y = linear(x, w);
  tape.backward({y}, {Tensor::empty({0, 4}, DType::f32)});
  ASSERT_TRUE(leaf.grad.defined());
  EXPECT_EQ(leaf.grad.to_vector<float>(), std::vector<float>(20, 0.0F));
}

TEST(Linear, ShapeErrorsNameBothShapes) {
  try {
    linear(random_tensor({2, 3}, DType::f32, 1), random_tensor({4, 5}, DType::f32, 2));
    FAIL() << "expected Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("x [2, 3] and weight [4, 5]"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(linear(random_tensor({2, 5}, DType::f32, 1), random_tensor({4, 5}, DType::f32, 2),
                      random_tensor({5}, DType::f32, 3)),
               Error);
}

const std::vector<std::vector<int64_t>> kRowCases = {{3, 0, 5, 1}, {0, 0, 0}, {0, 7},
                                                     {9, 0, 0, 0}, {1, 1, 1}, {64, 3, 130}};

TEST(GroupedLinear, MatchesTheTripleLoopWithEmptyGroups) {
  for (const int threads : {1, 2}) {
    set_num_threads(threads);
    for (const auto& rows : kRowCases) {
      const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
      const auto groups = static_cast<int64_t>(rows.size());
      const Tensor x = random_tensor({total, 21}, DType::f64, 1);
      const Tensor w = random_tensor({groups, 34, 21}, DType::f64, 2);
      const Tensor b = random_tensor({groups, 34}, DType::f64, 3);
      EXPECT_TRUE(close(to_doubles(grouped_linear(x, w, rows)), naive(x, w, {}, rows), {1e-13, 1e-13}));
      EXPECT_TRUE(close(to_doubles(grouped_linear(x, w, rows, b)), naive(x, w, b, rows), {1e-13, 1e-13}));
    }
    set_num_threads(1);
  }
}

TEST(GroupedLinear, GradientsMatchNumericWithEmptyGroups) {
  for (const auto& rows : {std::vector<int64_t>{3, 0, 2}, {0, 0}, {0, 4}}) {
    const auto body = [&](const std::vector<Tensor>& in) {
      return std::vector{grouped_linear(in[0], in[1], rows, in[2])};
    };
    const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const auto groups = static_cast<int64_t>(rows.size());
    const Tensor x = random_tensor({total, 5}, DType::f64, 1),
                 w = random_tensor({groups, 4, 5}, DType::f64, 2),
                 b = random_tensor({groups, 4}, DType::f64, 3);
    EXPECT_TRUE(gradcheck(body, {x, w, b}));
    EXPECT_TRUE(gradcheck(body, {x, w, {}}));
  }
}

TEST(GroupedGemm, ReduceWritesZerosForEmptyGroupsOrLeavesThemWhenAccumulating) {
  const std::vector<int64_t> rows{0, 2, 0};
  const Tensor a = random_tensor({2, 3}, DType::f32, 1), b = random_tensor({2, 4}, DType::f32, 2);
  const Tensor c = Tensor::from(std::vector<float>(36, std::nanf("")), {3, 3, 4});
  grouped_gemm_reduce(Device{}, {}, a, b, c, rows);
  auto values = c.to_vector<float>();
  for (size_t i = 0; i < 12; i++) {
    EXPECT_EQ(values[i], 0);
    EXPECT_EQ(values[24 + i], 0);
    EXPECT_TRUE(std::isfinite(values[12 + i]));
  }
  const Tensor d = Tensor::from(std::vector<float>(36, 5.0F), {3, 3, 4});
  grouped_gemm_reduce(Device{}, {.accumulate = true}, a, b, d, rows);
  const auto added = d.to_vector<float>();
  for (size_t i = 0; i < 12; i++) {
    EXPECT_EQ(added[i], 5);
    EXPECT_NEAR(added[12 + i], 5 + values[12 + i], 1e-5);
  }
}

TEST(GroupedGemm, TwoThreadsGiveTheResultOfOne) {
  const std::vector<int64_t> rows{700, 0, 3, 90, 211};
  const Tensor x = random_tensor({1004, 64}, DType::f32, 1), w = random_tensor({5, 100, 64}, DType::f32, 2);
  const auto run = [&](int threads) {
    set_num_threads(threads);
    const Tensor y = grouped_linear(x, w, rows);
    const Tensor dw = Tensor::zeros(w.shape(), DType::f32);
    grouped_gemm_reduce(Device{}, {.accumulate = true}, y, x, dw, rows);
    set_num_threads(1);
    return std::pair{y, dw};
  };
  const auto one = run(1), two = run(2);
  EXPECT_TRUE(close(two.first, one.first, {1e-5, 1e-4}));
  EXPECT_TRUE(close(two.second, one.second, {1e-5, 1e-2}));
}

TEST(GroupedLinear, WrongRowCountsAreRefused) {
  const Tensor x = random_tensor({4, 3}, DType::f32, 1), w = random_tensor({2, 5, 3}, DType::f32, 2);
  const std::vector<int64_t> rows{1, 2}, negative{5, -1}, three{1, 1, 2};
  try {
    grouped_linear(x, w, rows);
    FAIL() << "expected Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("sum to 3 but the operand of shape [4, 3] has 4 rows"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(grouped_linear(x, w, negative), Error);
  EXPECT_THROW(grouped_linear(x, w, three), Error);
}

}  // namespace
}  // namespace shoal
