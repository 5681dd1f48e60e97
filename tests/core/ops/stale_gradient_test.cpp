// Leaf::grad_is_zero: every op that writes weight gradients must take a stale buffer for zeros, whether it
// overwrites or adds, also when it gets no rows.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/autograd/tape.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal::testing {
namespace {

struct StaleCase {
  const char* name;
  std::vector<Shape> weights;
  std::function<Tensor(const std::vector<Tensor>& weights, int64_t rows, DType dtype)> loss;
};

Tensor input(int64_t rows, int64_t width, DType dtype) {
  return cast(random_tensor({rows, width}, dtype == DType::bf16 ? DType::f32 : dtype, 3), dtype);
}
Tensor as_loss(const Tensor& y) {
  return sum(y.dtype() == DType::bf16 ? cast(y, DType::f32) : y);
}
Tensor ids(int64_t rows) {
  std::vector<int32_t> values(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; i++) values[static_cast<size_t>(i)] = static_cast<int32_t>(i % 3);
  return Tensor::from(values, Shape{rows});
}

std::vector<StaleCase> cases() {
  return {
      {"linear with bias",
       {{4, 6}, {4}},
       [](const auto& w, int64_t rows, DType d) { return as_loss(linear(input(rows, 6, d), w[0], w[1])); }},
      {"grouped linear with bias, one group empty",
       {{2, 4, 6}, {2, 4}},
       [](const auto& w, int64_t rows, DType d) {
         const std::vector<int64_t> groups = {0, rows};
         return as_loss(grouped_linear(input(rows, 6, d), w[0], groups, w[1]));
       }},
      {"linear cross-entropy",
       {{5, 6}},
       [](const auto& w, int64_t rows, DType d) {
         return linear_cross_entropy(input(rows, 6, d), w[0], ids(rows), 1.0);
       }},
      {"norm",
       {{6}},
       [](const auto& w, int64_t rows, DType d) { return as_loss(rms_norm(input(rows, 6, d), w[0], 1e-5)); }},
      {"embedding, and the same weight as head",
       {{5, 6}},
       [](const auto& w, int64_t rows, DType d) {
         if (d == DType::bf16) return sum(embedding(w[0], ids(rows)));
         return add(sum(embedding(w[0], ids(rows))), sum(linear(input(rows, 6, d), w[0])));
       }},
  };
}

std::vector<double> gradients(const StaleCase& c, int64_t rows, DType dtype, bool stale, int passes) {
  std::vector<Leaf> leaves(c.weights.size());
  std::vector<Tensor> weights;
  for (size_t i = 0; i < leaves.size(); i++) {
    const DType weight_dtype = stats_dtype(dtype);
    weights.push_back(random_tensor(c.weights[i], weight_dtype, 10 + i));
    leaves[i].grad_dtype = weight_dtype;
    leaves[i].grad = Tensor::zeros(c.weights[i], weight_dtype);
    if (stale) {
      fill(Device{}, leaves[i].grad, std::nan(""));
      leaves[i].grad_is_zero = true;
    }
    weights[i].grad_ref.leaf = &leaves[i];
  }
  for (int pass = 0; pass < passes; pass++) {
    Tape tape;
    tape.backward(c.loss(weights, rows, dtype));
  }
  std::vector<double> all;
  for (size_t i = 0; i < leaves.size(); i++) {
    for (const double v : to_doubles(leaves[i].grad_buffer(c.weights[i], Device{}))) all.push_back(v);
  }
  return all;
}

TEST(StaleGradients, CountAsZerosForEveryOp) {
  for (const StaleCase& c : cases()) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      for (const int64_t rows : {7, 0}) {
        for (const int passes : {1, 2}) {
          const std::vector<double> want = gradients(c, rows, dtype, false, passes),
                                    got = gradients(c, rows, dtype, true, passes);
          ASSERT_EQ(got, want) << c.name << ", " << dtype << ", " << rows << " rows, " << passes << " passes";
          double largest = 0;
          for (const double v : want) largest = std::max(largest, std::abs(v));
          EXPECT_EQ(largest > 0, rows > 0) << c.name;
        }
      }
    }
  }
}

TEST(StaleGradients, OfAnUnusedWeightBecomeZerosWhenRead) {
  Leaf leaf;
  leaf.grad = Tensor::from(std::vector<float>{NAN, 1}, {2});
  leaf.grad_is_zero = true;
  EXPECT_EQ(to_doubles(leaf.grad_buffer({2}, Device{})), (std::vector<double>{0, 0}));
  leaf.grad.data<float>()[0] = 3;
  EXPECT_EQ(to_doubles(leaf.grad_buffer({2}, Device{})), (std::vector<double>{3, 0}));
}

}  // namespace
}  // namespace shoal::testing
