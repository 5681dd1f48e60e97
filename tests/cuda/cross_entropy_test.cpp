#include "core/ops/cross_entropy.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

Tensor labels_of(int64_t tokens, int64_t vocab) {
  std::vector<int32_t> labels;
  for (int64_t t = 0; t < tokens; t++) {
    labels.push_back(t % 5 == 3 ? kIgnoredLabel : static_cast<int32_t>(t * 7 % vocab));
  }
  return Tensor::from(labels, {tokens});
}

/// The loss, the loss without a gradient, and the gradient.
Tensors losses(const Tensor& logits, const Tensor& labels, double scale) {
  const Device device = logits.device();
  const Tensor grad = logits.clone();
  const Tensor totals = Tensor::from(std::vector<double>{0, 1}, {2}, device);  // the second is added to
  cross_entropy_fwd(device, {grad, labels, scale, true, totals.flat(0, 1)});
  cross_entropy_fwd(device, {logits, labels, scale, false, totals.flat(1, 1)});
  return {totals, grad};
}

TEST(CudaCrossEntropy, LossAndGradientAreThoseOfTheCpu) {
  for (const DType dtype : kFloats) {
    for (const Shape& shape :
         {Shape{0, 5}, Shape{1, 1}, Shape{3, 7}, Shape{11, 64}, Shape{8, 1003}, Shape{6, 2048}}) {
      expect_like_cpu(
          {normal(shape, 1, 4), labels_of(shape[0], shape[1])}, dtype,
          [&](const Tensors& in) { return losses(in[0], in[1], 0.25); },
          dtype == DType::bf16 ? Tolerance{1e-2, 1e-3} : Tolerance{2e-6, 1e-6});
    }
  }
}

/// Loss and gradients of a vocabulary in parts; totals has the loss of each part.
Tensors losses_in_parts(const Tensors& parts, const Tensor& labels, int64_t vocab) {
  const Device device = labels.device();
  const auto n = static_cast<int64_t>(parts.size());
  const Tensor stats = Tensor::empty({n, 3, labels.numel()}, DType::f64, device);
  int64_t first = 0;
  for (int64_t p = 0; p < n; p++) {
    const Tensor& logits = parts[static_cast<size_t>(p)];
    vocab_stats_fwd(device, logits, labels, {first, vocab}, stats.rows(p, p + 1));
    first += logits.row_size();
  }
  const Tensor totals = Tensor::zeros({2 * n}, DType::f64, device);
  Tensors results = {totals};
  first = 0;
  for (int64_t p = 0; p < n; p++) {
    const Tensor grad = parts[static_cast<size_t>(p)].clone();
    vocab_cross_entropy_fwd(device, {grad.clone(), labels, 0.25, false, totals.flat(n + p, 1)},
                            {first, vocab}, stats);
    vocab_cross_entropy_fwd(device, {grad, labels, 0.25, true, totals.flat(p, 1)}, {first, vocab}, stats);
    results.push_back(grad);
    first += grad.row_size();
  }
  return results;
}

TEST(CudaCrossEntropy, PartsOfTheVocabularyAreThoseOfTheCpu) {
  for (const DType dtype : kFloats) {
    for (const int64_t tokens : {0, 1, 7}) {
      expect_like_cpu(
          {normal({tokens, 264}, 1, 4), normal({tokens, 257}, 2, 4), normal({tokens, 1}, 3, 4),
           labels_of(tokens, 522)},
          dtype,
          [&](const Tensors& in) {
            return losses_in_parts({in[0], in[1], in[2]}, in[3], 522);
          },
          dtype == DType::bf16 ? Tolerance{1e-2, 1e-3} : Tolerance{2e-6, 1e-6});
    }
  }
}

TEST(CudaCrossEntropy, ALabelOutsideOfAllPartsIsReported) {
  const Tensor logits = as(normal({3, 4}, 1), DType::f32).to(kCuda);
  const Tensor labels = Tensor::from(std::vector<int32_t>{3, -2, 9}, {3}, kCuda);
  EXPECT_NE(error_of([&] {
              const Tensor results = losses_in_parts({logits}, labels, 9)[0];
              results.to_vector<double>();
            }).find("cross_entropy: a label that is no row of the logits"),
            std::string::npos);
}

TEST(CudaCrossEntropy, LossAndGradientAreThoseOfAPlainLoop) {
  const int64_t tokens = 7, vocab = 131;
  const Tensor logits = normal({tokens, vocab}, 2, 5), labels = labels_of(tokens, vocab);
  const auto x = to_doubles(logits), label = to_doubles(labels);
  double loss = 0;
  std::vector<double> grad(x.size());
  for (size_t t = 0; t < 7; t++) {
    if (label[t] < 0) continue;
    double total = 0;
    for (size_t v = 0; v < 131; v++) total += std::exp(x[t * 131 + v]);
    loss += std::log(total) - x[t * 131 + static_cast<size_t>(label[t])];
    for (size_t v = 0; v < 131; v++) {
      grad[t * 131 + v] =
          0.5 * (std::exp(x[t * 131 + v]) / total - (static_cast<double>(v) == label[t] ? 1 : 0));
    }
  }
  const Tensors got = losses(logits.to(kCuda), labels.to(kCuda), 0.5);
  EXPECT_TRUE(close(to_doubles(got[0]), {loss, 1 + loss}, {1e-12, 1e-12}));
  EXPECT_TRUE(close(to_doubles(got[1]), grad, {1e-12, 1e-12}));
}

TEST(CudaCrossEntropy, HugeLogitsAreExactAndInfinityIsNoProbability) {
  const float inf = INFINITY;
  const Tensor logits = Tensor::from(std::vector<float>{1e30F, -1e30F, 0, 88, 89, 90, -inf, 1, 2}, {3, 3});
  const Tensor labels = Tensor::from(std::vector<int32_t>{0, 2, 1}, {3});
  const Tensors got = losses(logits.to(kCuda), labels.to(kCuda), 1), want = losses(logits, labels, 1);
  EXPECT_TRUE(close(to_doubles(got[0]), to_doubles(want[0]), {1e-6, 1e-6}));
  EXPECT_TRUE(close(got[1].to(kCpu), want[1], {1e-6, 1e-6}));
  EXPECT_EQ(to_doubles(got[1])[6], 0);
}

TEST(CudaCrossEntropy, NanInARowIsItsLossAndStaysThere) {
  Tensor logits = as(normal({4, 70}, 1), DType::f32);
  logits.data<float>()[70 + 69] = NAN;
  const Tensor labels = Tensor::from(std::vector<int32_t>{1, 2, -1, 3}, {4});
  const Tensors got = losses(logits.to(kCuda), labels.to(kCuda), 1);
  EXPECT_TRUE(std::isnan(to_doubles(got[0])[0]));
  const auto grad = to_doubles(got[1]);
  for (size_t i = 0; i < grad.size(); i++) EXPECT_EQ(std::isnan(grad[i]), i / 70 == 1) << i;
}

TEST(CudaCrossEntropy, ALabelThatIsNoRowOfTheLogitsIsReported) {
  const Tensor logits = as(normal({3, 4}, 1), DType::f32).to(kCuda);
  const Tensor labels = Tensor::from(std::vector<int32_t>{3, -2, 4}, {3}, kCuda);
  EXPECT_NE(
      error_of([&] {
        const Tensor total = Tensor::zeros({}, DType::f64, kCuda);
        cross_entropy_fwd(kCuda, {logits, labels, 1, true, total});
        total.item();
      })
          .find(
              "cuda:0: cross_entropy: a label that is no row of the logits; does the tokenizer's vocabulary "
              "fit the model's? (position 1)"),
      std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
