// What kernels say they cost, against counts by hand or by loops.
#include <gtest/gtest.h>

#include "core/autograd/accumulate.h"
#include "core/ops/attention.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/cross_entropy.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/optimizer.h"

namespace shoal::testing {
namespace {

Tensor zeros(const Shape& shape, DType dtype = DType::f32) {
  return Tensor::zeros(shape, dtype);
}

TEST(KernelCost, IsTheBytesOfTheTensorsAmongTheArgumentsUnlessTheKernelSaysMore) {
  const Tensor x = zeros({3, 5}), scale = zeros({3}), dx = zeros({3, 5});
  EXPECT_EQ(scale_fwd.cost(x, 2.0, dx).bytes, 2 * 15 * 4);
  EXPECT_EQ(scale_rows_bwd.cost(dx, x, scale, dx, Tensor{}).bytes, (3 * 15 + 3) * 4);
  EXPECT_EQ(cast_fwd.cost(x, zeros({3, 5}, DType::bf16)).bytes, 15 * 4 + 15 * 2);
  EXPECT_EQ(scale_fwd.cost(x, 2.0, dx).all_flops(), 0);
}

TEST(KernelCost, WhatIsUpdatedInPlaceIsReadAndWritten) {
  const Tensor x = zeros({100});
  EXPECT_EQ(accumulate.cost(x, x).bytes, 3 * 400);
  AdamwStep step{};
  step.param = step.grad = step.m = step.v = x;
  EXPECT_EQ(adamw_step.cost(step).bytes, 7 * 400);  // 28 bytes per parameter
  CrossEntropy loss;
  loss.logits_TV = zeros({2, 50});
  loss.labels_T = zeros({2}, DType::i32);
  EXPECT_EQ(cross_entropy_fwd.cost(loss).bytes, 400 + 8);
  loss.want_grad = true;
  EXPECT_EQ(cross_entropy_fwd.cost(loss).bytes, 800 + 8);
}

TEST(KernelCost, OfProductsIsTwoFlopPerMultiplyAdd) {
  const Tensor a_23 = zeros({2, 3}), a_32 = zeros({3, 2}), b_37 = zeros({3, 7}), b_73 = zeros({7, 3}),
               c = zeros({2, 7});
  for (const Cost& cost : {gemm.cost({}, a_23, b_37, c), gemm.cost({.transpose_b = true}, a_23, b_73, c),
                           gemm.cost({.transpose_a = true}, a_32, b_37, c)}) {
    EXPECT_EQ(cost.flops, 2 * 2 * 3 * 7);
    EXPECT_EQ(cost.flops_bf16, 0);
    EXPECT_EQ(cost.bytes, (6 + 21 + 14) * 4);
  }
  EXPECT_EQ(gemm.cost({.accumulate = true}, a_23, b_37, c).bytes, (6 + 21 + 2 * 14) * 4);
}

TEST(KernelCost, OfGroupedProductsCountsTheRowsAndTheMatricesThatAreUsed) {
  const std::vector<int64_t> rows = {2, 0, 3};
  const Tensor x = zeros({5, 4}), w = zeros({3, 7, 4}), y = zeros({5, 7});
  const Cost forward = grouped_gemm_rows.cost({.transpose_b = true}, x, w, y, rows);
  EXPECT_EQ(forward.flops, 2 * 5 * 4 * 7);
  EXPECT_EQ(forward.bytes, (20 + 2 * 28 + 35) * 4);
  const Cost weight = grouped_gemm_reduce.cost({.accumulate = true}, y, x, w, rows);
  EXPECT_EQ(weight.flops, 2 * 5 * 4 * 7);
  EXPECT_EQ(weight.bytes, (35 + 20 + 2 * 2 * 28) * 4);
  EXPECT_EQ(grouped_gemm_rows.cost({}, zeros({0, 4}), w, zeros({0, 4}), std::vector<int64_t>{0, 0, 0}).bytes,
            0);
}

TEST(KernelCost, OfBf16ProductsIsCountedApart) {
  const std::vector<int64_t> rows = {5};
  const Tensor x = zeros({5, 4}, DType::bf16), y = zeros({5, 7}, DType::bf16), w = zeros({7, 4});
  const Cost forward = packed_gemm_rows.cost(PackedUse::forward, x, zeros({64}, DType::bf16), y, rows);
  EXPECT_EQ(forward.flops_bf16, 2 * 5 * 4 * 7);
  EXPECT_EQ(forward.flops, 0);
  EXPECT_EQ(bf16_gemm_reduce.cost(true, y, x, w, rows).flops_bf16, 2 * 5 * 4 * 7);
}

double counted_pairs(const AttentionSpec& spec) {
  double pairs = 0;
  for (int64_t b = 0; b < spec.batch; b++) {
    for (int64_t q = 0; q < spec.seq; q++) {
      for (int64_t k = 0; k < spec.seq; k++) {
        if (spec.causal && k > q) continue;
        if (spec.document_BS) {
          const int32_t* ids = spec.document_BS.data<int32_t>() + b * spec.seq;
          if (ids[q] != ids[k]) continue;
        }
        pairs++;
      }
    }
  }
  return pairs;
}

TEST(KernelCost, OfAttentionCountsThePairsThatMaySeeEachOther) {
  AttentionSpec spec;
  spec.heads = 4;
  spec.kv_heads = 2;
  spec.head_size = 8;
  for (const bool causal : {true, false}) {
    spec.causal = causal;
    for (const int64_t seq : {0, 1, 7}) {
      spec.batch = 2;
      spec.seq = seq;
      spec.document_BS = {};
      EXPECT_EQ(attended_pairs(spec), counted_pairs(spec));
    }
    spec.document_BS =
        Tensor::from(std::vector<int32_t>{0, 0, 0, 1, 2, 2, 2, /**/ 5, 6, 6, 6, 6, 6, 6}, {2, 7});
    EXPECT_EQ(attended_pairs(spec), counted_pairs(spec));
  }
  const Tensor qkv = zeros({14, 2, 4, 8}), y = zeros({14, 32}), lse = zeros({14, 4});
  const double product = 2 * counted_pairs(spec) * 4 * 8;
  EXPECT_EQ(attention_fwd.cost(qkv, spec, y, lse).flops, 2 * product);
  EXPECT_EQ(attention_bwd.cost({.dy = y, .qkv = qkv, .y = y, .lse = lse, .dqkv = qkv}, spec).flops,
            5 * product);
  EXPECT_EQ(bf16_attention_fwd.cost(zeros({14, 2, 4, 8}, DType::bf16), spec, y, lse).flops_bf16, 2 * product);
}

}  // namespace
}  // namespace shoal::testing
