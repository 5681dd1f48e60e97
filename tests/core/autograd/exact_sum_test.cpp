// Exact sums: the value is that of integer arithmetic, whatever the order, the grouping and the threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/autograd/accumulate.h"
#include "core/autograd/exact_sum.h"
#include "core/autograd/tape.h"
#include "core/base/random.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "tests/support/expect_close.h"
#include "tests/support/same_bits.h"

namespace shoal::testing {
namespace {

constexpr double kUnit = 0x1p-62;
using Wide = __int128;

/// Numbers of all magnitudes, some of them 0 or opposite to others.
std::vector<double> numbers(int64_t count, uint64_t seed, bool as_f32) {
  const RandomStream random(seed, "exact sum");
  std::vector<double> all;
  for (int64_t i = 0; i < count; i++) {
    const auto at = static_cast<uint64_t>(3 * i);
    const double exponent = static_cast<double>(random.below(at, 88)) - 65;  // 2^-65 ... 2^22
    double v = (static_cast<double>(random.below(at + 1, 1 << 30)) / (1 << 30) + 1) * std::exp2(exponent);
    if (random.below(at + 2, 2) == 0) v = -v;
    if (random.below(at + 2, 16) == 1) v = 0;
    if (random.below(at + 2, 16) == 3 && i > 0) v = -all.back();
    all.push_back(as_f32 ? static_cast<double>(static_cast<float>(v)) : v);
  }
  return all;
}

/// Whole multiples of kUnit, halves to even as in hardware.
Wide in_units(double v) {
  const double whole = std::floor(v * 0x1p12), rest = (v * 0x1p12 - whole) * 0x1p50;
  return static_cast<Wide>(whole) * (Wide{1} << 50) + static_cast<Wide>(std::nearbyint(rest));
}
double from_units(Wide units) {
  return static_cast<double>(static_cast<long double>(units) * static_cast<long double>(kUnit));
}

Tensor tensor_of(const std::vector<double>& values, DType dtype) {
  const Shape shape{std::ssize(values)};
  if (dtype == DType::f64) return Tensor::from(values, shape);
  return Tensor::from(std::vector<float>(values.begin(), values.end()), shape);
}
Tensor value_of(const ExactSum& sum, DType dtype = DType::f64) {
  const Tensor out = Tensor::empty({sum.high.numel()}, dtype, {});
  exact_value(Device{}, sum, out);
  return out;
}

TEST(ExactSum, HasTheValueOfIntegerArithmetic) {
  constexpr int64_t kElements = 133, kSummands = 40;
  for (const DType dtype : {DType::f32, DType::f64}) {
    const ExactSum sum = ExactSum::zeros(kElements, {});
    std::vector<Wide> want(kElements, 0);
    for (int64_t s = 0; s < kSummands; s++) {
      const std::vector<double> summand = numbers(kElements, static_cast<uint64_t>(s), dtype == DType::f32);
      exact_add(Device{}, sum, tensor_of(summand, dtype));
      for (size_t i = 0; i < want.size(); i++) want[i] += in_units(summand[i]);
    }
    const std::vector<double> got = value_of(sum).to_vector<double>();
    for (size_t i = 0; i < want.size(); i++) {
      const double exact = from_units(want[i]);
      EXPECT_NEAR(got[i], exact, std::abs(exact) * 0x1p-52) << i;
    }
    const std::vector<float> low = value_of(sum, DType::f32).to_vector<float>();
    for (size_t i = 0; i < want.size(); i++) EXPECT_EQ(low[i], static_cast<float>(got[i]));
  }
}

/// Sums the summands in `order`, in `groups` groups whose sums are added like those of ranks.
Tensor grouped(const std::vector<Tensor>& summands, const std::vector<size_t>& order, size_t groups) {
  const int64_t n = summands[0].numel();
  const Tensor high = Tensor::zeros({n}, DType::f64, {}), low = Tensor::zeros({n}, DType::i64, {});
  for (size_t g = 0; g < groups; g++) {
    const ExactSum part = ExactSum::zeros(n, {});
    for (size_t i = g; i < order.size(); i += groups) exact_add(Device{}, part, summands[order[i]]);
    for (int64_t i = 0; i < n; i++) {
      high.data<double>()[i] += part.high.data<double>()[i];
      low.data<int64_t>()[i] += part.low.data<int64_t>()[i];
    }
  }
  return value_of({high, low});
}

TEST(ExactSum, OrderAndGroupingChangeNoBitWherePlainSumsDo) {
  constexpr int64_t kElements = 77;
  std::vector<Tensor> summands;
  for (uint64_t s = 0; s < 24; s++) summands.push_back(tensor_of(numbers(kElements, s, true), DType::f32));
  std::vector<size_t> order(summands.size());
  std::iota(order.begin(), order.end(), 0);
  const auto plain = [&] {
    const Tensor sum = Tensor::zeros({kElements}, DType::f32, {});
    for (const size_t i : order) accumulate(Device{}, sum, summands[i]);
    return sum;
  };
  const Tensor want = grouped(summands, order, 1), plain_forward = plain();
  const RandomStream random(5, "order");
  for (uint64_t trial = 0; trial < 6; trial++) {
    for (size_t i = order.size() - 1; i > 0; i--)
      std::swap(order[i], order[random.below(31 * trial + i, i + 1)]);
    for (const size_t groups : {1, 2, 3, 8, 24})
      EXPECT_TRUE(same_bits(grouped(summands, order, groups), want));
  }
  EXPECT_FALSE(same_bits(plain(), plain_forward));
}

TEST(ExactSum, WhatIsTooLargeOrNotFiniteStaysNaNInItsElementAlone) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : {DType::f32, DType::f64}) {
    const ExactSum sum = ExactSum::zeros(6, {});
    exact_add(Device{}, sum, tensor_of({inf, -inf, nan, 0x1p24, -0x1p40, 0x1.fffffcp23}, dtype));
    exact_add(Device{}, sum, tensor_of({-inf, 1, 1, -0x1p24, 0x1p40, 1}, dtype));
    const std::vector<double> got = value_of(sum).to_vector<double>();
    for (size_t i = 0; i < 5; i++) EXPECT_TRUE(std::isnan(got[i])) << i;
    EXPECT_EQ(got[5], 0x1.fffffcp23 + 1);
  }
}

TEST(ExactSum, ManySummandsOfTheLargestMagnitudeAreStillExact) {
  const ExactSum sum = ExactSum::zeros(2, {});
  const double largest = 0x1.fffffep23, least = kUnit;
  constexpr int64_t kCount = 1 << 15;
  for (int64_t i = 0; i < kCount; i++) exact_add(Device{}, sum, tensor_of({largest, least}, DType::f64));
  for (int64_t i = 0; i < kCount; i++) exact_add(Device{}, sum, tensor_of({-largest, 0}, DType::f64));
  EXPECT_EQ(value_of(sum).to_vector<double>(), (std::vector<double>{0, kCount * kUnit}));
}

TEST(ExactSum, AnyNumberOfThreadsGivesTheSameBits) {
  const std::vector<double> values = numbers(40'000, 1, false);
  expect_same_for_any_team([&] {
    const ExactSum sum = ExactSum::zeros(std::ssize(values), {});
    for (int i = 0; i < 3; i++) exact_add(Device{}, sum, tensor_of(values, DType::f64));
    const Tensor squares = Tensor::zeros({ExactSquares::kSize}, DType::i64, {});
    exact_add_squares(Device{}, tensor_of(values, DType::f64), squares);
    return std::vector<Tensor>{sum.high, sum.low, value_of(sum), squares};
  });
}

double squares_value(const Tensor& sums) {
  const Tensor out = Tensor::zeros({1}, DType::f64, {});
  exact_squares_value(Device{}, sums, out);
  return out.item();
}

TEST(ExactSquares, AnyDivisionGivesTheBitsOfTheWhole) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const std::vector<double> values = numbers(20'011, 9, dtype == DType::f32);
    const Tensor x = tensor_of(values, dtype), whole = Tensor::zeros({ExactSquares::kSize}, DType::i64, {});
    exact_add_squares(Device{}, x, whole);
    long double want = 0;
    for (const double v : values) want += static_cast<long double>(v) * static_cast<long double>(v);
    EXPECT_NEAR(squares_value(whole) / static_cast<double>(want), 1, 1e-15);
    for (const int64_t parts : {2, 3, 7, 1000}) {
      const Tensor sum = Tensor::zeros({ExactSquares::kSize}, DType::i64, {});
      for (int64_t p = parts - 1; p >= 0; p--) {
        const Tensor part = Tensor::zeros({ExactSquares::kSize}, DType::i64, {});
        const int64_t from = x.numel() * p / parts, to = x.numel() * (p + 1) / parts;
        exact_add_squares(Device{}, x.flat(from, to - from), part);
        accumulate(Device{}, sum, part);
      }
      EXPECT_EQ(squares_value(sum), squares_value(whole)) << parts;
    }
  }
}

TEST(ExactSquares, SmallGradientsKeepTheirPrecisionAndOthersThanNumbersShow) {
  const Tensor sums = Tensor::zeros({ExactSquares::kSize}, DType::i64, {});
  exact_add_squares(Device{}, tensor_of(std::vector<double>(1000, 1e-11), DType::f64), sums);
  EXPECT_NEAR(squares_value(sums) / 1e-19, 1, 1e-8);
  exact_add_squares(Device{}, tensor_of({0x1p37}, DType::f32), sums);
  EXPECT_EQ(squares_value(sums), 0x1p74);
  exact_add_squares(Device{}, tensor_of({1, std::numeric_limits<double>::infinity()}, DType::f64), sums);
  EXPECT_TRUE(std::isnan(squares_value(sums)));
}

/// Gradients of one weight used twice, over two passes.
Tensor exact_gradient(bool grouped_weight, const std::vector<int64_t>& parts, DType dtype) {
  const int64_t K = 6, N = 5, R = 7;
  const auto random = [&](const Shape& shape, uint64_t seed) {
    std::vector<double> values = numbers(shape.numel(), seed, true);
    for (double& v : values) v = std::clamp(v, -3.0, 3.0);
    const Tensor t = tensor_of(values, dtype == DType::f64 ? DType::f64 : DType::f32).view(shape);
    return t;
  };
  Tensor weight = random(grouped_weight ? Shape{2, N, K} : Shape{N, K}, 3);
  Leaf leaf;
  leaf.grad_dtype = weight.dtype();
  leaf.exact_sum = ExactSum::zeros(weight.numel(), {});
  weight.grad_ref.leaf = &leaf;
  const std::vector<int64_t> rows = {3, 4};
  Tape tape;
  const Tensor x = cast(random({R, K}, 4), dtype);
  const Tensor y = grouped_weight ? grouped_linear(x, weight, rows, {}, parts) : linear(x, weight);
  const Tensor z = y.dtype() == DType::bf16 ? cast(y, DType::f32) : y;
  tape.backward(sum(mul(z, z)));
  EXPECT_EQ(leaf.uses_left, 0);
  return value_of(leaf.exact_sum);
}

TEST(ExactSum, ALeafHandsTheGradientOfEachPartOver) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    const double tolerance = dtype == DType::f64 ? 1e-12 : 1e-5;
    const Tensor whole = exact_gradient(true, {}, dtype);
    for (const std::vector<int64_t>& parts :
         {std::vector<int64_t>{3, 4}, {1, 2, 4, 0}, {0, 0, 3, 0, 2, 2}, {1, 1, 1, 0, 1, 1, 1, 1}})
      EXPECT_TRUE(close(exact_gradient(true, parts, dtype), whole, {tolerance, tolerance}));
  }
  EXPECT_THROW(exact_gradient(true, {1, 1, 4, 0}, DType::f32), Error);
  EXPECT_THROW(exact_gradient(true, {3, 4, 0}, DType::f32), Error);
}

TEST(ExactSum, GradientsOfAllUsesAddUp) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    const auto run = [&](bool exact) {
      Tensor weight = tensor_of({1.5, -2, 0.25}, dtype);
      Leaf leaf;
      leaf.grad_dtype = dtype;
      if (exact) leaf.exact_sum = ExactSum::zeros(3, {});
      weight.grad_ref.leaf = &leaf;
      for (int pass = 0; pass < 2; pass++) {
        Tape tape;
        tape.backward(sum(mul(mul(weight, weight), scale(weight, 2 + pass))));
      }
      return exact ? value_of(leaf.exact_sum, dtype) : leaf.grad;
    };
    EXPECT_TRUE(close(run(true), run(false), {1e-6, 0}));
  }
}

}  // namespace
}  // namespace shoal::testing
