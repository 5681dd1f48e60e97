#include "core/autograd/late_weights.h"

#include <gtest/gtest.h>

#include "core/autograd/recompute.h"
#include "core/autograd/tape.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"

namespace shoal {
namespace {

struct Layer {
  Layer() {
    weight.grad_ref.leaf = &weight_leaf;
    bias.grad_ref.leaf = &bias_leaf;
    for (Leaf* leaf : {&weight_leaf, &bias_leaf}) leaf->grad_dtype = DType::f64;
    weight_leaf.on_grad_ready = [this] { num_ready++; };
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
  Tensor operator()(const Tensor& x) const { return linear(x, weight, bias); }
  Leaf weight_leaf, bias_leaf;
  Tensor weight = Tensor::from(std::vector<double>{1, 2, 3, 4}, {2, 2}),
         bias = Tensor::from(std::vector<double>{5, 6}, {2});
  int num_ready = 0;
};

struct Input {
  Input() {
    leaf.grad_dtype = DType::f64;
    leaf.uses_left = 100;
    x.grad_ref.leaf = &leaf;
  }
  Input(const Input&) = delete;
  Input& operator=(const Input&) = delete;
  Leaf leaf;
  Tensor x = Tensor::from(std::vector<double>{1, -1, 2, 0.5}, {2, 2});
};

void expect_gradients_put_off(bool again) {
  Layer layer;
  Input input;
  const Tensor dy = Tensor::from(std::vector<double>{1, 0, 3, 2}, {2, 2});
  WeightQueue queue;
  {
    Tape tape;
    const Tensor y = again
                         ? recompute([&](const std::vector<Tensor>& in) { return std::vector{layer(in[0])}; },
                                     {input.x})[0]
                         : layer(input.x);
    const WeightQueue::Scope scope(queue);
    tape.backward({y}, {dy});
  }
  EXPECT_EQ(input.leaf.grad.to_vector<double>(), (std::vector<double>{1, 2, 9, 14}));
  EXPECT_FALSE(layer.weight_leaf.grad.defined());
  EXPECT_EQ(layer.num_ready, 0);
  EXPECT_EQ(layer.weight_leaf.uses_left, 1);
  queue.run();
  EXPECT_EQ(layer.weight_leaf.grad.to_vector<double>(), (std::vector<double>{7, 0.5, 4, 1}));
  EXPECT_EQ(layer.bias_leaf.grad.to_vector<double>(), (std::vector<double>{4, 2}));
  EXPECT_EQ(layer.num_ready, 1);
  EXPECT_EQ(layer.bias_leaf.uses_left, 0);
  queue.run();  // nothing is left
  EXPECT_EQ(layer.bias_leaf.grad.to_vector<double>(), (std::vector<double>{4, 2}));
}

TEST(LateWeights, AreAddedWhenTheQueueRuns) {
  expect_gradients_put_off(false);
}

TEST(LateWeights, AreAddedWhenTheQueueRunsWhereForwardWasRunAgain) {
  expect_gradients_put_off(true);
}

TEST(LateWeights, WeightsThatAreNoParametersGetTheirGradientAtOnce) {
  Layer layer;
  Input input;
  WeightQueue queue;
  Tape tape;
  const Tensor y = linear(input.x, add(layer.weight, layer.weight), layer.bias);
  const WeightQueue::Scope scope(queue);
  tape.backward({y}, {Tensor::from(std::vector<double>{1, 0, 3, 2}, {2, 2})});
  EXPECT_EQ(layer.weight_leaf.grad.to_vector<double>(), (std::vector<double>{14, 1, 8, 2}));
  EXPECT_EQ(layer.bias_leaf.uses_left, 0);
}

TEST(LateWeights, AQueueThatNeverRunsLeavesNoUsesBehind) {
  Layer layer;
  Input input;
  {
    WeightQueue queue;
    Tape tape;
    const Tensor y = layer(input.x);
    const WeightQueue::Scope scope(queue);
    tape.backward({y}, {y.detach()});
    EXPECT_EQ(layer.weight_leaf.uses_left, 1);
  }
  EXPECT_EQ(layer.weight_leaf.uses_left, 0);
}

}  // namespace
}  // namespace shoal
