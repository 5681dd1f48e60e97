#include "core/ops/norm.h"

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

constexpr double kEps = 1e-5;
const std::vector<Shape> kShapes = {{0, 8}, {1, 1}, {1, 7}, {3, 5}, {2, 3, 16}, {41, 131}};

/// y = (x - mean) / sqrt(mean of squares + eps) * weight + bias by plain loops; mean is 0 for rms_norm.
std::vector<double> reference(const std::vector<double>& x, const std::vector<double>& weight,
                              const std::vector<double>& bias, bool layer) {
  const size_t width = weight.size();
  std::vector<double> y(x.size());
  for (size_t begin = 0; begin < x.size(); begin += width) {
    double mean = 0, squares = 0;
    for (size_t d = 0; d < width; d++) mean += layer ? x[begin + d] / static_cast<double>(width) : 0;
    for (size_t d = 0; d < width; d++) squares += (x[begin + d] - mean) * (x[begin + d] - mean);
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(width) + kEps);
    for (size_t d = 0; d < width; d++) {
      y[begin + d] = (x[begin + d] - mean) * rstd * weight[d] + (bias.empty() ? 0 : bias[d]);
    }
  }
  return y;
}

struct NormInputs {
  Tensor x, residual, weight, bias;
};
NormInputs inputs_for(const Shape& shape, DType dtype) {
  const Shape row{shape[-1]};
  return {random_tensor(shape, dtype, 1), random_tensor(shape, dtype, 2), random_tensor(row, dtype, 3),
          random_tensor(row, dtype, 4)};
}

TEST(Norm, MatchesPlainLoopsForAllShapesAndTypes) {
  for (const Shape& shape : kShapes) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const auto [x, residual, weight, bias] = inputs_for(shape, dtype);
      const testing::Tolerance tolerance{dtype == DType::f32 ? 2e-5 : 1e-12,
                                         dtype == DType::f32 ? 1e-5 : 1e-12};
      const auto xs = to_doubles(x), sums = to_doubles(add(x, residual)), w = to_doubles(weight),
                 b = to_doubles(bias);
      EXPECT_TRUE(close(to_doubles(rms_norm(x, weight, kEps)), reference(xs, w, {}, false), tolerance))
          << shape;
      EXPECT_TRUE(close(to_doubles(layer_norm(x, weight, bias, kEps)), reference(xs, w, b, true), tolerance))
          << shape;
      EXPECT_TRUE(close(to_doubles(layer_norm(x, weight, {}, kEps)), reference(xs, w, {}, true), tolerance))
          << shape;
      const NormResult rms = add_rms_norm(x, residual, weight, kEps);
      const NormResult layer = add_layer_norm(x, residual, weight, bias, kEps);
      EXPECT_EQ(to_doubles(rms.sum_TD), sums);
      EXPECT_EQ(to_doubles(layer.sum_TD), sums);
      EXPECT_TRUE(close(to_doubles(rms.y_TD), reference(sums, w, {}, false), tolerance)) << shape;
      EXPECT_TRUE(close(to_doubles(layer.y_TD), reference(sums, w, b, true), tolerance)) << shape;
    }
  }
}

TEST(Norm, LayerNormKeepsItsPrecisionFarFromZero) {
  const Tensor x = Tensor::from(std::vector<float>{10000, 10001, 10002, 10003}, {1, 4});
  const Tensor ones = Tensor::from(std::vector<float>(4, 1), {4});
  EXPECT_TRUE(close(to_doubles(layer_norm(x, ones, {}, 0)), {-1.3416408, -0.4472136, 0.4472136, 1.3416408},
                    {1e-6, 1e-6}));
}

TEST(Norm, GradientsMatchNumericOnesForEveryInput) {
  for (const Shape& shape : {Shape{1, 1}, Shape{1, 7}, Shape{3, 5}, Shape{2, 2, 4}, Shape{0, 3}}) {
    const auto [x, residual, weight, bias] = inputs_for(shape, DType::f64);
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{rms_norm(in[0], in[1], kEps)}; }, {x, weight}));
    EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{layer_norm(in[0], in[1], in[2], kEps)}; },
                          {x, weight, bias}));
    EXPECT_TRUE(
        gradcheck([](auto& in) { return std::vector{layer_norm(in[0], in[1], {}, kEps)}; }, {x, weight}));
    EXPECT_TRUE(gradcheck(
        [](auto& in) {
          const NormResult out = add_rms_norm(in[0], in[1], in[2], kEps);
          return std::vector{out.y_TD, out.sum_TD};
        },
        {x, residual, weight}));
    EXPECT_TRUE(gradcheck(
        [](auto& in) {
          const NormResult out = add_layer_norm(in[0], in[1], in[2], in[3], kEps);
          return std::vector{out.y_TD, out.sum_TD};
        },
        {x, residual, weight, bias}));
  }
}

TEST(Norm, GradientsFlowWhenOnlyOneOfTheTwoOutputsIsUsed) {
  const auto [x, residual, weight, bias] = inputs_for({3, 5}, DType::f64);
  for (const bool use_sum : {false, true}) {
    EXPECT_TRUE(gradcheck(
        [&](auto& in) {
          const NormResult out = add_rms_norm(in[0], in[1], in[2], kEps);
          return std::vector{scale(use_sum ? out.sum_TD : out.y_TD, 2)};
        },
        {x, residual, weight}));
  }
}

TEST(Norm, WeightGradientOfAComputedWeightIsReturned) {
  const auto [x, residual, weight, bias] = inputs_for({3, 5}, DType::f64);
  EXPECT_TRUE(gradcheck(
      [](auto& in) { return std::vector{layer_norm(in[0], scale(in[1], 2), scale(in[2], 3), kEps)}; },
      {x, weight, bias}));
}

TEST(Norm, WeightGradientsAddToWhatTheLeafHolds) {
  const auto [x, residual, weight, bias] = inputs_for({3, 5}, DType::f32);
  Leaf leaf;
  Tensor w = weight;
  w.grad_ref.leaf = &leaf;
  for (int pass = 0; pass < 2; pass++) {
    Tape tape;
    tape.backward(sum(rms_norm(x, w, kEps)));
    if (pass == 0) leaf.grad = leaf.grad.clone();
  }
  Leaf once;
  w.grad_ref.leaf = &once;
  Tape tape;
  tape.backward(sum(rms_norm(x, w, kEps)));
  EXPECT_TRUE(close(leaf.grad, scale(once.grad, 2), {1e-6, 1e-6}));
}

TEST(Norm, IsBitEqualForAnyNumberOfThreads) {
  const auto [x, residual, weight, bias] = inputs_for({517, 131}, DType::f32);
  expect_same_for_any_team([&] {
    std::vector<Leaf> leaves(4);
    std::vector<Tensor> in = {x.clone(), residual.clone(), weight.clone(), bias.clone()};
    for (size_t i = 0; i < in.size(); i++) in[i].grad_ref.leaf = &leaves[i];
    Tape tape;
    const NormResult a = add_layer_norm(in[0], in[1], in[2], in[3], kEps);
    const NormResult b = add_rms_norm(a.y_TD, a.sum_TD, in[2], kEps);
    tape.backward({b.y_TD, b.sum_TD}, {random_tensor(x.shape(), DType::f32, 5), x});
    std::vector<Tensor> out = {a.y_TD.detach(), b.y_TD.detach()};
    for (const Leaf& leaf : leaves) out.push_back(leaf.grad);
    return out;
  });
}

TEST(Norm, ErrorsNameTheOperationAndBothSizes) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32), w4 = Tensor::zeros({4}, DType::f32);
  const Tensor w3 = Tensor::zeros({3}, DType::f32);
  EXPECT_NE(error_of([&] { rms_norm(x, w4, kEps); }).find("rms_norm: expected a weight of 3 elements of f32"),
            std::string::npos);
  EXPECT_NE(error_of([&] { layer_norm(x, w3, w4, kEps); }).find("layer_norm: expected a bias of 3 elements"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              add_rms_norm(x, Tensor::zeros({3, 2}, DType::f32), w3, kEps);
            }).find("expected a residual like x, f32 [2, 3], got f32 [3, 2]"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
