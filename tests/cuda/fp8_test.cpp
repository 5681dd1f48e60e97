#include "core/backend/cuda/fp8.h"

#include "core/ops/fp8_linear.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

using Rows = std::vector<int64_t>;

int64_t sum_of(const Rows& rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  return total;
}

/// Values of many sizes; some are not finite.
Tensor rows_of(const Rows& rows, int64_t width, DType dtype) {
  const Tensor x = as(normal({sum_of(rows), width}, 1), DType::f32);
  auto* values = x.data<float>();
  for (int64_t i = 0; i < x.numel(); i++) {
    values[i] *= std::ldexp(1.0F, static_cast<int>(i % 37) - 18);
    if (i % 1009 == 500) values[i] = i % 2 == 0 ? NAN : -HUGE_VALF;
  }
  return as(x, dtype);
}

/// Scales and both operands of x, as the kernels make them on its device.
struct Operands {
  Fp8Operand along_rows, along_columns;
  std::vector<Fp8Operand*> sides() { return {&along_rows, &along_columns}; }
};
Operands quantize(const Tensor& x, const Rows& rows, Fp8Format format, Fp8Scales kind) {
  const int64_t pad = kind == Fp8Scales::matrix ? 16 : kind == Fp8Scales::vector ? 128 : 1;
  Operands out{fp8_along_rows(rows, x.size(1), format, kind, x.device()),
               fp8_along_columns(rows, x.size(1), format, kind, pad, x.device())};
  if (kind == Fp8Scales::matrix) {
    fp8_scales(x.device(), x, rows, format, out.along_rows.scales);
    out.along_columns.scales = out.along_rows.scales;
  }
  fp8_quantize(x.device(), x, rows, out.along_rows, out.along_columns);
  return out;
}

constexpr Fp8Scales kKinds[] = {Fp8Scales::matrix, Fp8Scales::vector, Fp8Scales::block};

TEST(CudaFp8, OperandsHaveTheBitsOfTheCpu) {
#ifdef SHOAL_EMULATOR_TSAN  // which is slow: every access is followed
  constexpr int64_t kWidest = 133;
#else
  constexpr int64_t kWidest = 261;
#endif
  for (const Rows& rows : {Rows{}, Rows{0}, Rows{7}, Rows{130, 0, 1, 70}, Rows(130, 1)}) {
    for (const int64_t width : {int64_t{0}, int64_t{24}, kWidest}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const Fp8Scales kind : kKinds) {
          const bool many_groups = rows.size() > 100;  // more than a launch takes
          if (many_groups && (width != 24 || dtype != DType::f32)) continue;
          const Fp8Format format = width == 24 ? Fp8Format::e5m2 : Fp8Format::e4m3;
          const auto body = [&](const Tensors& in) {
            const Operands made = quantize(in[0], rows, format, kind);
            return Tensors{made.along_rows.codes, made.along_rows.scales, made.along_columns.codes,
                           made.along_columns.scales};
          };
          const Tensors in = {rows_of(rows, width, dtype)};
          const Tensors want = body(in);
          const NarrowLaunches narrow;
          const Tensors got = device_results(in, body);
          for (size_t i = 0; i < want.size(); i++) {
            EXPECT_TRUE(same_bits(got[i], want[i])) << "result " << i << " of " << in[0].shape() << ' '
                                                    << dtype << ", kind " << static_cast<int>(kind);
          }
        }
      }
    }
  }
}

TEST(CudaFp8, OneOperandIsMadeWithoutTheOther) {
  const Rows rows = {5, 140};
  const Tensor x = rows_of(rows, 40, DType::bf16).to(kCuda);
  for (const Fp8Scales kind : {Fp8Scales::vector, Fp8Scales::block}) {
    Operands both = quantize(x, rows, Fp8Format::e4m3, kind),
             single = quantize(x, rows, Fp8Format::e4m3, kind);
    for (Fp8Operand* side : single.sides()) {
      side->codes.set_zero();
      side->scales.set_zero();
    }
    fp8_quantize(kCuda, x, rows, single.along_rows, {});
    fp8_quantize(kCuda, x, rows, {}, single.along_columns);
    fp8_quantize(kCuda, x, rows, {}, {});
    for (size_t i = 0; i < 2; i++) {
      EXPECT_TRUE(same_bits(single.sides()[i]->codes.to(kCpu), both.sides()[i]->codes.to(kCpu)));
      EXPECT_TRUE(same_bits(single.sides()[i]->scales.to(kCpu), both.sides()[i]->scales.to(kCpu)));
    }
  }
}

#ifndef SHOAL_EMULATOR_TSAN  // which follows 255 threads
TEST(CudaFp8, LargeBlocksMakeTheSameBits) {
  const Rows rows = {130, 0, 3};
  for (const Fp8Scales kind : kKinds) {
    const Tensor x = rows_of(rows, 264, DType::f32);
    Operands want = quantize(x, rows, Fp8Format::e4m3, kind),
             got = quantize(x.to(kCuda), rows, Fp8Format::e4m3, kind);
    for (size_t i = 0; i < 2; i++) {
      EXPECT_TRUE(same_bits(got.sides()[i]->codes.to(kCpu), want.sides()[i]->codes));
      EXPECT_TRUE(same_bits(got.sides()[i]->scales.to(kCpu), want.sides()[i]->scales));
    }
  }
}
#endif

TEST(CudaFp8, NumbersOfAnOperandAreExactInBf16) {
  const Rows rows = {130, 0, 3};
  for (const int64_t width : {int64_t{40}, int64_t{133}}) {
    for (const Fp8Scales kind : kKinds) {
      for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
        const Tensor x = rows_of(rows, width, DType::f32);
        Operands cpu = quantize(x, rows, format, kind), cuda = quantize(x.to(kCuda), rows, format, kind);
        for (size_t i = 0; i < 2; i++) {
          const NarrowLaunches narrow;
          const std::vector<BFloat16> got =
              cuda::fp8_numbers(*cuda.sides()[i]).to(kCpu).to_vector<BFloat16>();
          const Fp8Operand& side = *cpu.sides()[i];
          const std::vector<uint8_t> codes = side.codes.to_vector<uint8_t>();
          const std::vector<float> scales = side.scales.to_vector<float>();
          for (const Fp8Matrix& m : side.matrices) {
            for (int64_t j = 0; j < m.outer * m.sum; j++) {
              const int64_t scale = fp8_scale_index(kind, m.outer, m.sum, j / m.sum, j % m.sum);
              const auto at = static_cast<size_t>(m.codes + j);
              const float want = from_fp8(codes[at], format) * scales[static_cast<size_t>(m.scales + scale)];
              const auto value = static_cast<float>(got[at]);
              ASSERT_TRUE(value == want || (std::isnan(value) && std::isnan(want)))
                  << value << " != " << want;
            }
          }
        }
      }
    }
  }
}

TEST(CudaFp8, WhatDoesNotFitIsRefused) {
  const Tensor x = Tensor::zeros({4, 16}, DType::f32, kCuda), scales = Tensor::zeros({1}, DType::f32, kCuda);
  const Rows four = {4}, five = {5};
  const Fp8Operand operand = fp8_along_rows(four, 16, Fp8Format::e4m3, Fp8Scales::vector, kCuda);
  const auto scaled = [&](const Tensor& of, const Rows& rows) {
    return error_of([&] { fp8_scales(kCuda, of, rows, Fp8Format::e4m3, scales); });
  };
  EXPECT_EQ(scaled(x, four), "");
  EXPECT_NE(scaled(x, five).find("rows per group sum to 5, but the operand has 4"), std::string::npos);
  EXPECT_NE(scaled(x, {2, 2}).find("expected a matrix and 2 scales"), std::string::npos);
  EXPECT_NE(scaled(as(x, DType::f64), four).find("expected x of f32 or bf16, got f64"), std::string::npos);
  EXPECT_NE(error_of([&] { fp8_quantize(kCuda, x, five, operand, {}); }).find("sum to 5"), std::string::npos);
  EXPECT_NE(error_of([&] {
              fp8_quantize(kCuda, x, Rows{2, 2}, operand, {});
            }).find("expected an operand of 2 groups, got 1"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
