#include "core/ops/elementwise.h"

#include <limits>

#include "core/autograd/accumulate.h"
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

const std::vector<Shape> kShapes = {{0}, {1}, {0, 4}, {1, 7}, {3, 5}, {2, 3, 17}, {5, 4099}};

template <class F>
std::vector<double> each(const Tensor& x, const Tensor& y, const F& f) {
  std::vector<double> out = to_doubles(x);
  const std::vector<double> other = to_doubles(y);
  for (size_t i = 0; i < out.size(); i++) out[i] = f(out[i], other[i]);
  return out;
}

TEST(Elementwise, MatchesPlainLoopsForAllShapesAndTypes) {
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Tensor x = random_tensor(shape, dtype, 1), y = random_tensor(shape, dtype, 2);
      const testing::Tolerance tolerance{dtype == DType::f32 ? 1e-6 : 1e-14, 1e-7};
      EXPECT_TRUE(close(to_doubles(add(x, y)), each(x, y, std::plus<>()), tolerance)) << shape;
      EXPECT_TRUE(close(to_doubles(mul(x, y)), each(x, y, std::multiplies<>()), tolerance)) << shape;
      EXPECT_TRUE(
          close(to_doubles(scale(x, -2.5)), each(x, y, [](double a, double) { return a * -2.5; }), tolerance))
          << shape;
      EXPECT_TRUE(close(to_doubles(sigmoid(x)),
                        each(x, y, [](double a, double) { return 1 / (1 + std::exp(-a)); }), tolerance))
          << shape;
      double total = 0;
      for (const double v : to_doubles(x)) total += v;
      EXPECT_NEAR(sum(x).item(), total, dtype == DType::f32 ? 1e-4 : 1e-9) << shape;
    }
  }
}

TEST(Elementwise, ScaleRowsMultipliesEachRowByItsFactor) {
  const Tensor x = random_tensor({3, 5}, DType::f32, 1), s = random_tensor({3}, DType::f32, 2);
  const std::vector<double> got = to_doubles(scale_rows(x, s)), xs = to_doubles(x), ss = to_doubles(s);
  for (size_t i = 0; i < got.size(); i++)
    EXPECT_FLOAT_EQ(static_cast<float>(got[i]), static_cast<float>(xs[i] * ss[i / 5]));
  EXPECT_EQ(scale_rows(Tensor::empty({0, 5}, DType::f32), Tensor::empty({0}, DType::f32)).numel(), 0);
}

TEST(Elementwise, GradientsMatchNumericOnes) {
  for (const Shape& shape : {Shape{0}, Shape{1}, Shape{3, 5}}) {
    const Tensor x = random_tensor(shape, DType::f64, 1), y = random_tensor(shape, DType::f64, 2);
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{add(in[0], in[1])}; }, {x, y}));
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{mul(in[0], in[1])}; }, {x, y}));
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{scale(in[0], 3)}; }, {x}));
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{sigmoid(in[0])}; }, {x}));
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{sum(in[0])}; }, {x}));
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{add(in[0], in[0]), mul(in[0], in[0])}; }, {x}));
  }
  EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{scale_rows(in[0], in[1])}; },
                        {random_tensor({3, 5}, DType::f64, 1), random_tensor({3, 1}, DType::f64, 2)}));
}

TEST(Elementwise, ScaleRowsSkipsGradientsThatNobodyWants) {
  Leaf leaf;
  leaf.grad_dtype = DType::f64;
  Tensor s = random_tensor({3}, DType::f64, 2);
  s.grad_ref.leaf = &leaf;
  Tape tape;
  tape.backward(sum(scale_rows(random_tensor({3, 2}, DType::f64, 1), s)));
  EXPECT_EQ(leaf.grad.numel(), 3);
}

TEST(Elementwise, CastGoesThroughBf16AndBackWithTheGradientInTheFirstType) {
  const Tensor x = Tensor::from(std::vector<float>{1.0F, 1.00390625F, -3.0F}, {3});
  const Tensor low = cast(x, DType::bf16);
  EXPECT_EQ(low.dtype(), DType::bf16);
  EXPECT_EQ(to_doubles(low), (std::vector<double>{1, 1, -3}));  // 1 + 2^-8 is a tie: to even
  Leaf leaf;
  Tensor w = x;
  w.grad_ref.leaf = &leaf;
  Tape tape;
  tape.backward(sum(cast(cast(w, DType::bf16), DType::f32)));
  EXPECT_EQ(leaf.grad.to_vector<float>(), (std::vector<float>{1, 1, 1}));
}

TEST(Elementwise, Bf16ArithmeticRoundsOncePerElement) {
  const Tensor x = cast(random_tensor({300}, DType::f32, 1), DType::bf16);
  const Tensor y = cast(random_tensor({300}, DType::f32, 2), DType::bf16);
  const std::vector<double> got = to_doubles(add(x, y)), a = to_doubles(x), b = to_doubles(y);
  for (size_t i = 0; i < got.size(); i++) {
    EXPECT_EQ(got[i], static_cast<float>(BFloat16(static_cast<float>(a[i]) + static_cast<float>(b[i]))));
  }
}

TEST(Elementwise, AccumulateAddsIntoTheFirstTensor) {
  const Tensor to = Tensor::from(std::vector<float>{1, 2, 3}, {3});
  accumulate(Device{}, to, Tensor::from(std::vector<float>{10, 20, 30}, {3, 1}));
  accumulate(Device{}, to, cast(Tensor::from(std::vector<float>{1, 1, 1}, {3}), DType::bf16));
  EXPECT_EQ(to.to_vector<float>(), (std::vector<float>{12, 23, 34}));
  EXPECT_THROW(accumulate(Device{}, to, Tensor::zeros({4}, DType::f32)), Error);
  EXPECT_THROW(accumulate(Device{}, to, Tensor::zeros({3}, DType::f64)), Error);
}

TEST(Elementwise, SumOfSquaresIsAccumulatedInDouble) {
  EXPECT_DOUBLE_EQ(sum_squares(Tensor::from(std::vector<float>{3e20F, 4e20F}, {2})),
                   std::pow(3e20F, 2.0) + std::pow(4e20F, 2.0));
  EXPECT_EQ(sum_squares(Tensor::empty({0}, DType::f32)), 0);
}

TEST(Elementwise, AllFiniteFindsOneBadElementAnywhere) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const size_t at : {size_t{0}, size_t{777}, size_t{20010}}) {
      const Tensor x = random_tensor({20011}, dtype, 1);
      EXPECT_TRUE(all_finite(x));
      for (const double bad : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL}) {
        fill(Device{}, x.flat(static_cast<int64_t>(at), 1), bad);
        EXPECT_FALSE(all_finite(x)) << bad << " at " << at;
      }
    }
  }
  EXPECT_TRUE(all_finite(Tensor::empty({0}, DType::f32)));
}

TEST(Elementwise, WeightedSumsAndNormsOfRowsMatchLoops) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const Tensor x = random_tensor({3, 1025}, dtype, 1), y = random_tensor({3, 1025}, dtype, 2);
    const std::vector<double> xs = to_doubles(x), ys = to_doubles(y);
    std::vector<double> sums(xs.size()), norms(3);
    for (size_t i = 0; i < xs.size(); i++) {
      sums[i] = 0.7 * xs[i] - 1.3 * ys[i];
      norms[i / 1025] += xs[i] * xs[i];
    }
    for (double& norm : norms) norm = 1 / (std::sqrt(norm) + 0.5);
    const Tensor out = Tensor::empty({3}, dtype);
    inverse_row_norms(Device{}, x, 0.5, out);
    EXPECT_TRUE(close(to_doubles(out), norms, {1e-6, 0}));
    axpby(Device{}, 0.7, x, -1.3, y, x);
    EXPECT_TRUE(close(to_doubles(x), sums, {1e-6, 1e-6}));
    inverse_row_norms(Device{}, Tensor::zeros({3, 0}, dtype), 0, out);
    EXPECT_EQ(to_doubles(out), std::vector<double>(3));
  }
}

TEST(Elementwise, ResultsAreBitEqualForAnyNumberOfThreads) {
  const Tensor x = random_tensor({37, 2049}, DType::f32, 1), y = random_tensor({37, 2049}, DType::f32, 2);
  const Tensor s = random_tensor({37}, DType::f32, 3);
  expect_same_for_any_team([&] { return std::vector{sum(x)}; });
  expect_same_for_any_team([&] { return std::vector{sigmoid(add(mul(x, y), scale(x, 0.1)))}; });
  expect_same_for_any_team([&] { return std::vector{scale_rows(x, s)}; });
  expect_same_for_any_team([&] {
    const Tensor norms = Tensor::empty({37}, DType::f32), out = Tensor::empty_like(x);
    inverse_row_norms(Device{}, x, 0, norms);
    axpby(Device{}, 2, x, 3, y, out);
    return std::vector{norms, out};
  });
  expect_same_for_any_team(
      [&] { return std::vector{Tensor::from(std::vector<double>{sum_squares(x)}, {1})}; });
}

TEST(Elementwise, ErrorsNameTheOperationAndBothShapes) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  EXPECT_NE(error_of([&] {
              add(x, Tensor::zeros({3, 2}, DType::f32));
            }).find("add: expected equal shapes and dtypes, got f32 [2, 3] and f32 [3, 2]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { scale_rows(x, Tensor::zeros({3}, DType::f32)); }).find("each of the 2 rows"),
            std::string::npos);
  EXPECT_NE(
      error_of([&] { scale(Tensor::zeros({1}, DType::i32), 2); }).find("expected dtype f32 or f64, got i32"),
      std::string::npos);
}

}  // namespace
}  // namespace shoal
