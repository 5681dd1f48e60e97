#include "core/ops/activation.h"

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

constexpr Activation kAll[] = {Activation::silu, Activation::gelu, Activation::relu};

double reference(double x, Activation f) {
  switch (f) {
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::gelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::relu:
      return std::max(x, 0.0);
  }
  return 0;
}

std::vector<double> gated_reference(const std::vector<double>& x, size_t half, Activation f) {
  std::vector<double> y;
  for (size_t row = 0; row + 2 * half <= x.size() && half > 0; row += 2 * half) {
    for (size_t i = 0; i < half; i++) y.push_back(reference(x[row + i], f) * x[row + half + i]);
  }
  return y;
}

TEST(Activation, MatchesPlainLoopsForAllShapesAndTypes) {
  for (const Activation f : kAll) {
    for (const Shape& shape : {Shape{0, 4}, Shape{1, 2}, Shape{3, 14}, Shape{2, 3, 34}, Shape{9, 2050}}) {
      for (const DType dtype : {DType::f32, DType::f64}) {
        const Tensor x = random_tensor(shape, dtype, 1, 3);
        const testing::Tolerance tolerance =
            dtype == DType::f32 ? testing::Tolerance{2e-6, 1e-7} : testing::Tolerance{1e-13, 1e-14};
        std::vector<double> want = to_doubles(x);
        for (double& v : want) v = reference(v, f);
        EXPECT_TRUE(close(to_doubles(activate(x, f)), want, tolerance)) << shape;
        EXPECT_TRUE(close(to_doubles(gated_activate(x, f)),
                          gated_reference(to_doubles(x), static_cast<size_t>(shape[-1] / 2), f), tolerance))
            << shape;
      }
    }
  }
}

TEST(Activation, F32GeluIsRelativelyAccurateOverItsWholeRange) {
  std::vector<float> x;
  for (int i = -900; i <= 900; i++) x.push_back(static_cast<float>(i) * 0.01F);
  const auto got = to_doubles(activate(Tensor::from(x, {1801}), Activation::gelu));
  for (size_t i = 0; i < x.size(); i++) {
    const double want = reference(x[i], Activation::gelu);
    EXPECT_NEAR(got[i], want, 1e-5 * std::abs(want) + 1e-30) << x[i];
  }
}

TEST(Activation, FarInputsStayFinite) {
  const std::vector<float> far = {-1e30F, -1000, -100, 100, 1000, 1e30F};
  for (const Activation f : kAll) {
    const auto y = to_doubles(activate(Tensor::from(far, {6}), f));
    for (size_t i = 0; i < far.size(); i++) {
      EXPECT_FLOAT_EQ(static_cast<float>(y[i]), far[i] > 0 ? far[i] : 0) << far[i];
    }
  }
}

TEST(Activation, GradientsMatchNumericOnes) {
  for (const Activation f : kAll) {
    for (const Shape& shape : {Shape{0, 2}, Shape{1, 2}, Shape{3, 10}}) {
      const Tensor x = random_tensor(shape, DType::f64, 1, 2);
      EXPECT_TRUE(gradcheck([f](auto& in) { return std::vector{activate(in[0], f)}; }, {x}));
      EXPECT_TRUE(gradcheck([f](auto& in) { return std::vector{gated_activate(in[0], f)}; }, {x}));
      EXPECT_TRUE(gradcheck(
          [f](auto& in) { return std::vector{activate(gated_activate(activate(in[0], f), f), f)}; }, {x}));
    }
  }
}

TEST(Activation, F32GradientsFollowF64) {
  for (const Activation f : kAll) {
    std::vector<std::vector<double>> grads;
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Tensor x32 = random_tensor({5, 34}, DType::f32, 1, 3);
      const std::vector<double> values = to_doubles(x32);
      Tensor x = dtype == DType::f32 ? x32.clone() : Tensor::from(values, x32.shape());
      Leaf leaf;
      leaf.grad_dtype = dtype;
      x.grad_ref.leaf = &leaf;
      Tape tape;
      const Tensor y = gated_activate(activate(x, f), f);
      tape.backward({y}, {Tensor::from(std::vector<double>(85, 1.0), {5, 17}).dtype() == dtype
                              ? Tensor::from(std::vector<double>(85, 1.0), {5, 17})
                              : Tensor::from(std::vector<float>(85, 1.0F), {5, 17})});
      grads.push_back(to_doubles(leaf.grad));
    }
    EXPECT_TRUE(close(grads[0], grads[1], {1e-5, 2e-6}));
  }
}

TEST(Activation, IsBitEqualForAnyNumberOfThreads) {
  for (const Activation f : kAll) {
    expect_same_for_any_team([f] {
      Tensor x = random_tensor({130, 514}, DType::f32, 1);
      Leaf leaf;
      x.grad_ref.leaf = &leaf;
      Tape tape;
      const Tensor y = activate(gated_activate(x, f), f);
      tape.backward({y}, {random_tensor(y.shape(), DType::f32, 2)});
      return std::vector{y.detach(), leaf.grad};
    });
  }
}

TEST(Activation, BackwardLeavesAnInputThatOthersHoldUntouched) {
  Tensor x = random_tensor({3, 10}, DType::f32, 1);
  const std::vector<float> before = x.to_vector<float>();
  Leaf leaf;
  x.grad_ref.leaf = &leaf;
  Tape tape;
  const Tensor y = gated_activate(x, Activation::silu);
  tape.backward({y}, {random_tensor(y.shape(), DType::f32, 2)});
  EXPECT_EQ(x.to_vector<float>(), before);
}

TEST(Activation, GatedFormRefusesOddRows) {
  EXPECT_NE(error_of([] {
              gated_activate(Tensor::zeros({2, 3}, DType::f32), Activation::silu);
            }).find("gated_activate: expected rows of even size (gate half, up half), got shape [2, 3]"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
