#include "core/autograd/saved.h"

#include <gtest/gtest.h>

#include "core/autograd/tape.h"
#include "core/ops/activation.h"
#include "core/ops/attention.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/permute.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::random_tensor;
using testing::same_bits;

constexpr int64_t kRows = 300, kWidth = 64;
constexpr int64_t kBytes = kRows * kWidth * 4;

int64_t live_bytes() {
  return device_runtime(DeviceType::cpu).stats().current_bytes;
}

/// x -> silu -> two products that both save the activation's result, summed up.
struct Net {
  Net()
      : w1(random_tensor({kWidth, kWidth}, DType::f32, 2)),
        w2(random_tensor({kWidth, kWidth}, DType::f32, 3)) {
    x.grad_ref.leaf = &x_leaf;
    w1.grad_ref.leaf = &w1_leaf;
    w2.grad_ref.leaf = &w2_leaf;
  }
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  Tensor silu(const Tensor& in) {
    num_calls++;
    num_replays += Tape::replaying();
    return activate(in, Activation::silu);
  }
  /// Bytes alive when backward begins.
  int64_t run(int depth) {
    const Tape unused(Tape::Mode::off);
    Tape tape;
    const int64_t before = live_bytes();
    Tensor loss;
    {
      const auto body = [this](const Tensor& in) { return silu(in); };
      Tensor a = apply_again(depth > 0, x, body);
      if (depth > 1) a = apply_again(true, a, body);
      loss = sum(add(linear(a, w1), linear(a, w2)));
    }
    const int64_t kept = live_bytes() - before;
    tape.backward(loss);
    return kept;
  }

  Leaf x_leaf, w1_leaf, w2_leaf;
  Tensor x = random_tensor({kRows, kWidth}, DType::f32, 1), w1, w2;
  int num_calls = 0, num_replays = 0;
};

TEST(Saved, ATensorWithARecipeIsNotKeptAndIsMadeAgainOnceForAllThatSaveIt) {
  Net plain, again;
  const int64_t kept = plain.run(0), less = again.run(1);
  EXPECT_GE(kept, kBytes);
  EXPECT_LT(less, kBytes);
  EXPECT_EQ(plain.num_calls, 1);
  EXPECT_EQ(again.num_calls, 2);
  EXPECT_EQ(again.num_replays, 1);
  for (const auto member : {&Net::x_leaf, &Net::w1_leaf, &Net::w2_leaf}) {
    EXPECT_TRUE(same_bits((plain.*member).grad, (again.*member).grad));
    EXPECT_EQ((again.*member).uses_left, 0);
  }
}

TEST(Saved, RecipesBuildOnEachOther) {
  Net net;
  EXPECT_LT(net.run(2), kBytes);
  EXPECT_EQ(net.num_calls, 4);
  Net plain;
  const Tape tape(Tape::Mode::off);
  const Tensor a = plain.silu(plain.silu(plain.x.detach()));
  const Tensor ones = Tensor::empty({kRows, kWidth}, DType::f32);
  fill(Device{}, ones, 1);
  const Tensor want = Tensor::empty({kWidth, kWidth}, DType::f32);
  gemm(Device{}, {.transpose_a = true}, ones, a, want);
  EXPECT_TRUE(same_bits(net.w1_leaf.grad, want));
}

TEST(Saved, WhatWasMadeAgainIsGoneAfterItsLastUse) {
  Net net;
  const int64_t before = live_bytes();
  net.run(2);
  // What is left are the three gradients.
  EXPECT_EQ(live_bytes() - before, kBytes + 2 * kWidth * kWidth * 4);
}

TEST(Saved, TakeGivesAwayTheOnlyHandleUnlessAnotherNeedsIt) {
  Leaf leaf;
  Tensor x = random_tensor({4, 4}, DType::f32, 1);
  x.grad_ref.leaf = &leaf;
  Tape tape;
  Saved first, second;
  {
    const Tensor y = apply_again(true, x, [](const Tensor& in) { return scale(in, 2); });
    first = second = y;
    EXPECT_TRUE(first.defined());
  }
  const Tensor shared = first.take();
  EXPECT_FALSE(shared.is_sole_owner());
  EXPECT_FALSE(first.defined());
  const Tensor same = second.take();
  EXPECT_EQ(same.bytes(), shared.bytes());
  Saved third;
  {
    const Tensor y = apply_again(true, x, [](const Tensor& in) { return scale(in, 2); });
    third = y.view({16});
  }
  EXPECT_EQ(third.shape(), Shape({16}));
  const Tensor own = third.take();
  EXPECT_TRUE(own.is_sole_owner());
  EXPECT_EQ(own.shape(), Shape({16}));
  EXPECT_TRUE(same_bits(own, same.view({16})));
}

TEST(Saved, NothingHasARecipeWithoutGradientsOrAsAPartOrWhenChangedInPlace) {
  Leaf leaf;
  Tensor x = random_tensor({4, 8}, DType::f32, 1);
  const auto body = [](const Tensor& in) { return scale(in, 2); };
  EXPECT_EQ(apply_again(true, x, body).recipe, nullptr) << "no tape";
  x.grad_ref.leaf = &leaf;
  {
    const NoGrad no_grad;
    EXPECT_EQ(apply_again(true, x, body).recipe, nullptr) << "no gradients";
  }
  const Tape tape;
  const Tensor y = apply_again(true, x, body);
  EXPECT_NE(y.recipe, nullptr);
  EXPECT_NE(y.view({8, 4}).recipe, nullptr);
  EXPECT_EQ(y.rows(1, 3).recipe, nullptr);
  EXPECT_EQ(y.flat(1, 3).recipe, nullptr);
  EXPECT_EQ(y.clone().recipe, nullptr);
  AttentionSpec spec;
  spec.batch = 1;
  spec.seq = 1;
  spec.heads = spec.kv_heads = 1;
  spec.head_size = 4;
  const Tensor qkv = apply_again(true, random_tensor({1, 12}, DType::f32, 2), body);
  Tensor leafed = random_tensor({1, 12}, DType::f32, 2);
  leafed.grad_ref.leaf = &leaf;
  const Tensor packed = apply_again(true, leafed, body);
  EXPECT_NE(packed.recipe, nullptr);
  EXPECT_EQ(
      rope(packed, spec, {}, rope_table({}, 4, 2, DType::f32, {}), Tensor::from(std::vector<int32_t>{1}, {1}))
          .recipe,
      nullptr);
}

// Neither costs a product; both are always made again.
TEST(Saved, CopiesOfRowsAndWiderCopiesAreNotKept) {
  Leaf leaf, weight_leaf;
  Tensor x = random_tensor({kRows, kWidth}, DType::f32, 1);
  x.grad_ref.leaf = &leaf;
  Tensor w = random_tensor({kWidth, kWidth}, DType::f32, 3);
  w.grad_ref.leaf = &weight_leaf;
  std::vector<int64_t> rows(kRows);
  for (int64_t i = 0; i < kRows; i++) rows[static_cast<size_t>(i)] = i;
  const Tensor index = Tensor::from(rows, {kRows}), slots = index.view({kRows, 1});
  const auto kept = [&](const std::function<Tensor()>& forward) {
    Tape tape;
    const int64_t before = live_bytes();
    const Tensor loss = sum(forward());
    const int64_t bytes = live_bytes() - before;
    tape.backward(loss);
    return bytes;
  };
  EXPECT_LT(kept([&] { return linear(gather_rows(x, index, slots), w); }), kBytes / 2);
  EXPECT_LT(kept([&] { return linear(cast(cast(x, DType::bf16), DType::f32), w); }), kBytes * 3 / 4);
}

}  // namespace
}  // namespace shoal
