// Ops on bf16 against the same op in f64 on the same rounded numbers: a result may differ by the rounding of
// what is stored as bf16, and by nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "tests/support/attention_cases.h"
#include "tests/support/bf16_tensor.h"
#include "tests/support/expect_close.h"

namespace shoal {
namespace {

using testing::bf16_tensor;
using testing::close;
using testing::random_tensor;
using testing::to_doubles;
using testing::Tolerance;

constexpr double kUlp = 1.0 / 256;  // half a unit in the last place of bf16, relative

Tensor exact(const Tensor& t) {
  return t.defined() ? cast(t, DType::f64).detach() : t;
}

using Op = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

struct Outcome {
  std::vector<Tensor> outputs, grads;
};

/// Outputs, and gradients of all inputs for the given gradients of the outputs.
Outcome run(const Op& op, std::vector<Tensor> inputs, const std::vector<Tensor>& seeds) {
  Tape tape;
  std::vector<Leaf> leaves(inputs.size());
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i].defined()) continue;
    inputs[i] = inputs[i].clone();
    leaves[i].grad_dtype = inputs[i].dtype() == DType::f64 ? DType::f64 : DType::f32;
    inputs[i].grad_ref.leaf = &leaves[i];
  }
  Outcome out;
  std::vector<Tensor> outputs = op(inputs);
  for (const Tensor& t : outputs) out.outputs.push_back(t.clone());
  tape.backward(outputs, seeds);
  for (const Leaf& leaf : leaves) out.grads.push_back(leaf.grad);
  return out;
}

/// Compares op on `inputs` (bf16 and f32) with op on the same numbers in f64.
void compare(const Op& op, const std::vector<Tensor>& inputs, const std::vector<Tensor>& seeds,
             Tolerance outputs, Tolerance grads) {
  std::vector<Tensor> inputs64, seeds64;
  for (const Tensor& t : inputs) inputs64.push_back(exact(t));
  for (const Tensor& t : seeds) seeds64.push_back(exact(t));
  const Outcome got = run(op, inputs, seeds), want = run(op, inputs64, seeds64);
  for (size_t o = 0; o < got.outputs.size(); o++)
    EXPECT_TRUE(close(got.outputs[o], want.outputs[o], outputs)) << "output " << o;
  for (size_t i = 0; i < got.grads.size(); i++) {
    if (!got.grads[i].defined()) continue;
    EXPECT_TRUE(close(got.grads[i], want.grads[i], grads)) << "gradient " << i;
  }
}

TEST(Bf16Ops, ActivationsRoundOnce) {
  for (const Activation f : {Activation::silu, Activation::gelu, Activation::relu}) {
    compare([f](const auto& in) { return std::vector{activate(in[0], f)}; }, {bf16_tensor({7, 33}, 1)},
            {bf16_tensor({7, 33}, 2)}, {1.01 * kUlp, 1e-6}, {1.01 * kUlp, 1e-6});
    compare([f](const auto& in) { return std::vector{gated_activate(in[0], f)}; }, {bf16_tensor({7, 66}, 1)},
            {bf16_tensor({7, 33}, 2)}, {1.01 * kUlp, 1e-6}, {1.01 * kUlp, 1e-6});
  }
}

TEST(Bf16Ops, ScaleRowsTakesF32Scales) {
  compare([](const auto& in) { return std::vector{scale_rows(in[0], in[1])}; },
          {bf16_tensor({5, 70}, 1), random_tensor({5}, DType::f32, 2)}, {bf16_tensor({5, 70}, 3)},
          {1.01 * kUlp, 1e-7}, {1.01 * kUlp, 1e-5});
}

TEST(Bf16Ops, NormsOfAnF32StreamGiveBf16AndKeepTheSumExact) {
  for (const int64_t width : {1, 31, 128}) {
    const Tensor delta = bf16_tensor({6, width}, 1), stream = random_tensor({6, width}, DType::f32, 2);
    const Tensor weight = random_tensor({width}, DType::f32, 3), bias = random_tensor({width}, DType::f32, 4);
    const std::vector<Tensor> seeds = {bf16_tensor({6, width}, 5), random_tensor({6, width}, DType::f32, 6)};
    const Tolerance loose{3 * kUlp, 1e-4};
    const auto rms = [](const auto& in) {
      const NormResult r = add_rms_norm(in[0], in[1], in[2], 1e-3);
      return std::vector{r.y_TD, r.sum_TD};
    };
    const auto layer = [](const auto& in) {
      const NormResult r = add_layer_norm(in[0], in[1], in[2], in[3], 1e-3);
      return std::vector{r.y_TD, r.sum_TD};
    };
    compare(rms, {delta, stream, weight}, seeds, {1.01 * kUlp, 1e-6}, loose);
    compare(layer, {delta, stream, weight, bias}, seeds, {1.01 * kUlp, 1e-5}, loose);
    const Outcome out = run(rms, {delta, stream, weight}, seeds);
    EXPECT_EQ(out.outputs[0].dtype(), DType::bf16);
    EXPECT_EQ(to_doubles(out.outputs[1]), to_doubles(add(cast(delta, DType::f32), stream)));
    // Without a residual: f32 in, bf16 out.
    const auto first = [](const auto& in) {
      return std::vector{
          rms_norm(in[0], in[1], 1e-3, in[0].dtype() == DType::f64 ? DType::f64 : DType::bf16)};
    };
    compare(first, {stream, weight}, {seeds[0]}, {1.01 * kUlp, 1e-6}, {1e-4, 1e-4});
    // All bf16: post-norm.
    compare(rms, {delta, cast(stream, DType::bf16), weight}, {seeds[0], bf16_tensor({6, width}, 6)},
            {3 * kUlp, 1e-2}, {8 * kUlp, 3e-2});
  }
}

TEST(Bf16Ops, ANormWithoutGradientOfItsOutputPassesTheSumsOn) {
  const auto op = [](const auto& in) {
    const NormResult r = add_rms_norm(in[0], in[1], in[2], 1e-3);
    return std::vector{r.y_TD, r.sum_TD};
  };
  const Outcome out = run(
      op, {bf16_tensor({2, 8}, 1), random_tensor({2, 8}, DType::f32, 2), random_tensor({8}, DType::f32, 3)},
      {Tensor{}, cast(bf16_tensor({2, 8}, 4), DType::f32)});
  EXPECT_EQ(to_doubles(out.grads[0]), to_doubles(bf16_tensor({2, 8}, 4)));
  EXPECT_EQ(to_doubles(out.grads[1]), to_doubles(bf16_tensor({2, 8}, 4)));
}

// bf16 cannot hold the position 257.
TEST(Bf16Ops, RP_05_RopeTurnsBf16ByAnF32TableOfExactAngles) {
  const AttentionSpec spec = testing::make_spec(1, 9, 4, 2, 10);
  const RopeSpec rope_spec{RopeForm::half, 6, 10000};
  const std::vector<int32_t> positions = {0, 1, 3, 24, 256, 257, 300, 9999, 10001};
  const auto op = [&](const auto& in) {
    const DType stats = stats_dtype(in[0].dtype());
    return std::vector{rope(scale(in[0], 1), spec, rope_spec,
                            rope_table(rope_spec, 10, 10002, stats, Device{}), Tensor::from(positions, {9}))};
  };
  compare(op, {bf16_tensor(testing::packed_shape(spec), 1)}, {bf16_tensor(testing::packed_shape(spec), 2)},
          {1.1 * kUlp, 1e-6}, {1.1 * kUlp, 1e-6});
}

TEST(Bf16Attention, MatchesTheExactOpOnEveryShapeAndMask) {
  for (const AttentionSpec& spec : testing::attention_cases()) {
    if (spec.batch * spec.seq == 0) continue;
    SCOPED_TRACE(str("seq ", spec.seq, " heads ", spec.heads, '/', spec.kv_heads, " size ", spec.head_size));
    const Shape y_shape{spec.batch * spec.seq, spec.heads * spec.head_size};
    // Probabilities and score gradients are rounded before the second product, so errors are relative to the
    // size of what is summed, not of the sum.
    compare([&](const auto& in) { return std::vector{attention(in[0], spec)}; },
            {bf16_tensor(testing::packed_shape(spec), 1)}, {bf16_tensor(y_shape, 2)}, {2 * kUlp, 0.02},
            {4 * kUlp, 0.1});
  }
}

TEST(Bf16Attention, AveragesOverManyKeysStayCloseToExact) {
  // Rounding errors of many probabilities must average out, not add up.
  const AttentionSpec spec = testing::make_spec(1, 600, 2, 1, 32);
  const Tensor qkv = bf16_tensor(testing::packed_shape(spec), 3);
  const std::vector<double> got = to_doubles(attention(qkv, spec)),
                            want = to_doubles(attention(exact(qkv), spec));
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); i++) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  EXPECT_LT(std::sqrt(error / size), kUlp);
}

TEST(Bf16Attention, DecodingGivesTheBitsOfTheWholePass) {
  AttentionSpec spec = testing::make_spec(2, 21, 4, 2, 16);
  const Tensor qkv = bf16_tensor(testing::packed_shape(spec), 1), whole = attention(qkv, spec);
  const Tensor keys = Tensor::zeros({2, 32, 2, 16}, DType::bf16),
               values = Tensor::zeros({2, 32, 2, 16}, DType::bf16);
  const int64_t row = 2 * 4 * 16;
  spec.seq = 1;
  for (int64_t t = 0; t < 21; t++) {
    const Tensor step = Tensor::empty({2, 2, 4, 16}, DType::bf16), y = Tensor::empty({2, 64}, DType::bf16);
    for (int64_t b = 0; b < 2; b++) step.flat(b * row, row).copy_from(qkv.flat((b * 21 + t) * row, row));
    bf16_attention_decode(Device{}, DecodeArgs{step, keys, values, y, t}, spec);
    for (int64_t b = 0; b < 2; b++)
      EXPECT_EQ(to_doubles(y.rows(b, b + 1)), to_doubles(whole.rows(b * 21 + t, b * 21 + t + 1))) << t;
  }
}

TEST(Bf16Attention, ThreadsChangeNoBit) {
  const AttentionSpec spec = testing::make_spec(2, 150, 6, 3, 20);
  const auto op = [&](const auto& in) { return std::vector{attention(in[0], spec)}; };
  const std::vector<Tensor> inputs = {bf16_tensor(testing::packed_shape(spec), 1)},
                            seeds = {bf16_tensor({300, 120}, 2)};
  const Outcome one = run(op, inputs, seeds);
  set_num_threads(3);
  const Outcome three = run(op, inputs, seeds);
  set_num_threads(1);
  EXPECT_EQ(to_doubles(one.outputs[0]), to_doubles(three.outputs[0]));
  EXPECT_EQ(to_doubles(one.grads[0]), to_doubles(three.grads[0]));
}

TEST(LinearCrossEntropy, IsCrossEntropyOfTheLogitsInBlocksOfTokens) {
  // f64 with 40000 classes: three blocks of 64 tokens.
  for (const auto& [tokens, vocab] : {std::pair<int64_t, int64_t>{150, 40000}, {9, 5}, {0, 7}, {1, 1}}) {
    std::vector<int32_t> labels;
    for (int64_t t = 0; t < tokens; t++)
      labels.push_back(t % 5 == 3 ? kIgnoredLabel : static_cast<int32_t>((t * 97) % vocab));
    const Tensor labels_T = Tensor::from(labels, {tokens});
    const Tensor x = random_tensor({tokens, 6}, DType::f64, 1),
                 weight = random_tensor({vocab, 6}, DType::f64, 2);
    const Tensor seed = Tensor::from(std::vector<double>{1}, {});
    const Outcome got =
        run([&](const auto& in) { return std::vector{linear_cross_entropy(in[0], in[1], labels_T, 0.01)}; },
            {x, weight}, {seed});
    const Outcome want =
        run([&](const auto& in) { return std::vector{cross_entropy(linear(in[0], in[1]), labels_T, 0.01)}; },
            {x, weight}, {seed});
    EXPECT_TRUE(close(got.outputs[0], want.outputs[0], {1e-12, 1e-14}));
    EXPECT_TRUE(close(got.grads[0], want.grads[0], {1e-10, 1e-14}));
    EXPECT_TRUE(close(got.grads[1], want.grads[1], {1e-10, 1e-14}));
  }
}

TEST(LinearCrossEntropy, Bf16IsCloseToExact) {
  std::vector<int32_t> labels;
  for (int32_t t = 0; t < 40; t++) labels.push_back(t % 7 == 3 ? kIgnoredLabel : t * 11 % 90);
  const Tensor labels_T = Tensor::from(labels, {40});
  compare([&](const auto& in) { return std::vector{linear_cross_entropy(in[0], in[1], labels_T, 0.025)}; },
          {bf16_tensor({40, 16}, 1), cast(bf16_tensor({90, 16}, 2), DType::f32)},
          {Tensor::from(std::vector<float>{1}, {})}, {1e-5, 1e-6}, {3 * kUlp, 2e-4});
}

TEST(LinearCrossEntropy, AFactorOnTheLossMustBeGivenAsScale) {
  const Tensor labels = Tensor::from(std::vector<int32_t>{1, 0}, {2});
  const auto op = [&](const auto& in) { return std::vector{linear_cross_entropy(in[0], in[1], labels, 1)}; };
  const std::vector<Tensor> inputs = {random_tensor({2, 3}, DType::f32, 1),
                                      random_tensor({4, 3}, DType::f32, 2)};
  EXPECT_THROW(run(op, inputs, {Tensor::from(std::vector<float>{2}, {})}), Error);
  // Without a leaf nothing was added yet, so any factor works.
  Tape tape;
  Leaf leaf;
  Tensor x = inputs[0].clone();
  x.grad_ref.leaf = &leaf;
  const Tensor loss = linear_cross_entropy(x, inputs[1], labels, 1);
  tape.backward({loss}, {Tensor::from(std::vector<float>{2}, {})});
  const Outcome once = run(op, inputs, {Tensor::from(std::vector<float>{1}, {})});
  EXPECT_TRUE(close(to_doubles(leaf.grad), to_doubles(scale(once.grads[0], 2)), {1e-6, 1e-7}));
}

TEST(LinearCrossEntropy, NoGradientIsMadeWithoutATape) {
  const Tensor labels = Tensor::from(std::vector<int32_t>{1, 0}, {2});
  Leaf leaf;
  Tensor weight = random_tensor({4, 3}, DType::f32, 2);
  weight.grad_ref.leaf = &leaf;
  const NoGrad no_grad;
  linear_cross_entropy(random_tensor({2, 3}, DType::f32, 1), weight, labels, 1);
  EXPECT_FALSE(leaf.grad.defined());
}

}  // namespace
}  // namespace shoal
