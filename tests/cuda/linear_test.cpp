#include "core/ops/linear.h"

#include "core/ops/bf16_linear.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

using Rows = std::vector<int64_t>;

int64_t sum_of(const Rows& rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  return total;
}

/// y, bias, dbias.
Tensors bias_inputs(const Rows& rows, int64_t width) {
  const auto groups = static_cast<int64_t>(rows.size());
  return {normal({sum_of(rows), width}, 1), normal({groups, width}, 2), normal({groups, width}, 3)};
}

TEST(CudaLinear, BiasesAndTheirGradientsAreThoseOfTheCpu) {
  for (const DType dtype : kFloats) {
    for (const Rows& rows : {Rows{}, Rows{0}, Rows{7}, Rows{3, 0, 1, 90}, Rows(130, 1)}) {
      for (const int64_t width : {int64_t{24}, int64_t{261}}) {
        const auto body = [&](const Tensors& in) {
          const Tensor y = in[0].clone(), dbias = as(in[2], stats_dtype(in[0].dtype())).clone();
          add_bias(y.device(), y, as(in[1], stats_dtype(in[0].dtype())), rows);
          bias_bwd(y.device(), in[0], dbias, rows);
          return Tensors{y, dbias};
        };
        const Tolerance tolerance = dtype == DType::f64 ? Tolerance{1e-11, 1e-11} : Tolerance{1e-2, 1e-2};
        expect_like_cpu(bias_inputs(rows, width), dtype, body,
                        dtype == DType::f32 ? Tolerance{1e-5, 1e-5} : tolerance);
      }
    }
  }
}

TEST(CudaLinear, ABiasOfAnotherSizeOrTypeIsRefused) {
  const Tensor y = Tensor::zeros({4, 3}, DType::bf16, kCuda), bias = Tensor::zeros({2, 3}, DType::f32, kCuda);
  const auto add = [&](const Tensor& b, const Rows& rows) {
    return error_of([&] { add_bias(kCuda, y, b, rows); });
  };
  EXPECT_EQ(add(bias, {3, 1}), "");
  EXPECT_NE(add(bias, {4}).find("expected a bias f32 of 1 x 3 for bf16 [4, 3], got f32 [2, 3]"),
            std::string::npos);
  EXPECT_NE(add(Tensor::zeros({2, 3}, DType::bf16, kCuda), {3, 1}).find("got bf16"), std::string::npos);
  EXPECT_NE(add(bias, {3, 2}).find("rows per group sum to 5, but the operand has 4"), std::string::npos);
  EXPECT_NE(add(bias, {5, -1}).find("at least 0 rows per group, got -1"), std::string::npos);
}

TEST(CudaLinear, ACopyOfAWeightIsItsElementsRoundedAndServesBothUses) {
  EXPECT_TRUE(packs_in_order(kCuda, {3, 4}));
  for (const Shape& shape : {Shape{7, 24}, Shape{3, 70, 33}, Shape{0, 5}, Shape{2, 0, 5}, Shape{3, 0}}) {
    const Tensor weight = as(normal(shape, 1), DType::f32);
    const PackedWeight copies = packed_weight(weight.to(kCuda));
    EXPECT_EQ(copies.forward.bytes(), copies.backward.bytes());
    EXPECT_TRUE(same_bits(copies.forward.to(kCpu).view(shape), as(weight, DType::bf16))) << shape;
  }
}

TEST(CudaLinear, BlocksOfAWeightArePackedOnTheirOwn) {
  const Tensor weight = as(normal({3, 70, 33}, 1), DType::f32).to(kCuda);
  const PackedWeight copies = packed_weight(weight);
  const PackedWeight again{Tensor::zeros({3 * 70 * 33}, DType::bf16, kCuda),
                           Tensor::zeros({3 * 70 * 33}, DType::bf16, kCuda), weight.shape()};
  for_each_pack_block(weight.shape(),
                      [&](int64_t first, int64_t last) { pack_rows(kCuda, weight, again, first, last); });
  EXPECT_TRUE(same_bits(again.forward.to(kCpu), copies.forward.to(kCpu)));
  EXPECT_TRUE(same_bits(again.backward.to(kCpu), copies.forward.to(kCpu)));
  EXPECT_NE(error_of([&] {
              pack_rows(kCuda, weight, again, 200, 211);
            }).find("rows [200, 211) are not among the 210"),
            std::string::npos);
  EXPECT_THROW(pack_rows(kCuda, weight.rows(0, 1), again, 0, 1), Error);
  PackedWeight wrong = again;
  wrong.backward = Tensor::zeros({7}, DType::bf16, kCuda);
  EXPECT_THROW(pack_rows(kCuda, weight, wrong, 0, 1), Error);
}

}  // namespace
}  // namespace shoal::testing
