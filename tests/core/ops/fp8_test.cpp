#include "core/ops/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <optional>

#include "core/base/random.h"

namespace shoal {
namespace {

constexpr Fp8Format kFormats[] = {Fp8Format::e4m3, Fp8Format::e5m2};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The number of a code by its definition; none: NaN.
std::optional<double> defined_number(int code, Fp8Format format) {
  const int fraction = format == Fp8Format::e4m3 ? 3 : 2, bias = format == Fp8Format::e4m3 ? 7 : 15;
  const int exponent = (code & 0x7F) >> fraction, mantissa = code & ((1 << fraction) - 1);
  const double sign = code >= 128 ? -1 : 1;
  if (format == Fp8Format::e4m3 && (code & 0x7F) == 0x7F) return std::nullopt;
  if (format == Fp8Format::e5m2 && exponent == 31) {
    if (mantissa != 0) return std::nullopt;
    return sign * HUGE_VAL;
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - fraction);
  return sign * std::ldexp((1 << fraction) + mantissa, exponent - bias - fraction);
}

/// The code of a number that is not NaN, by a search through all finite ones.
int nearest_code(double value, Fp8Format format, bool saturate) {
  const int largest = format == Fp8Format::e4m3 ? 0x7E : 0x7B;
  const double size = std::abs(value);
  int best = 0;
  for (int code = 1; code <= largest; code++) {
    const double error = std::abs(size - *defined_number(code, format)),
                 least = std::abs(size - *defined_number(best, format));
    if (error < least || (error == least && code % 2 == 0)) best = code;
  }
  // From the middle between the largest number and the one that would be next.
  const double limit = format == Fp8Format::e4m3 ? 464 : 61440;
  const bool over = format == Fp8Format::e4m3 ? size > limit : size >= limit;
  if (over) best = saturate ? largest : format == Fp8Format::e4m3 ? 0x7F : 0x7C;
  return best | (std::signbit(value) ? 0x80 : 0);
}

void expect_rounded(float value, Fp8Format format) {
  for (const bool saturate : {false, true}) {
    ASSERT_EQ(int{to_fp8(value, format, saturate)}, nearest_code(value, format, saturate))
        << fp8_name(format) << " of " << value << (saturate ? ", saturated" : "");
  }
}

TEST(Fp8, EveryCodeIsTheNumberOfItsDefinitionAndComesBack) {
  for (const Fp8Format format : kFormats) {
    for (int code = 0; code < 256; code++) {
      const float number = from_fp8(static_cast<uint8_t>(code), format);
      const std::optional<double> want = defined_number(code, format);
      ASSERT_EQ(std::isnan(number), !want.has_value()) << fp8_name(format) << ' ' << code;
      if (!want) {
        EXPECT_TRUE(std::isnan(from_fp8(to_fp8(number, format), format)));
        continue;
      }
      ASSERT_EQ(double{number}, *want) << fp8_name(format) << ' ' << code;
      ASSERT_EQ(std::signbit(number), code >= 128);
      ASSERT_EQ(int{to_fp8(number, format)}, std::isinf(number) ? code & 0xFC : code);
    }
  }
}

TEST(Fp8, NumbersAreRoundedToTheNearestCodeAndTiesToTheEvenOne) {
  for (const Fp8Format format : kFormats) {
    const int largest = format == Fp8Format::e4m3 ? 0x7E : 0x7B;
    for (int code = 0; code < largest; code++) {
      const auto middle =
          static_cast<float>((*defined_number(code, format) + *defined_number(code + 1, format)) / 2);
      for (const float value : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, kInfinity)}) {
        expect_rounded(value, format);
        expect_rounded(-value, format);
      }
    }
    const RandomStream random(3, "fp8");
    for (uint64_t i = 0; i < 3000; i++) {
      const double size = std::exp2(40 * random.uniform(2 * i) - 22);
      expect_rounded(static_cast<float>(size * random.normal(2 * i + 1)), format);
    }
  }
}

TEST(Fp8, WhatIsTooLargeSaturatesOrStopsBeingFinite) {
  for (const Fp8Format format : kFormats) {
    const float limit = format == Fp8Format::e4m3 ? 464.0F : 61440.0F;
    for (const float value : {limit, std::nextafter(limit, 0.0F), std::nextafter(limit, kInfinity), 1e30F,
                              std::numeric_limits<float>::max(), kInfinity}) {
      expect_rounded(value, format);
      expect_rounded(-value, format);
    }
    for (const float value : {0.0F, -0.0F, 1e-38F, std::numeric_limits<float>::denorm_min()})
      expect_rounded(value, format);
    EXPECT_TRUE(std::isnan(from_fp8(to_fp8(NAN, format), format)));
    EXPECT_TRUE(std::isnan(from_fp8(to_fp8(-NAN, format, true), format)));
  }
}

TEST(Fp8, TheScaleIsTheSmallestPowerOfTwoWithWhichTheLargestNumberFits) {
  for (const Fp8Format format : kFormats) {
    const float largest = format == Fp8Format::e4m3 ? 448.0F : 57344.0F;
    const RandomStream random(4, "fp8");
    for (uint64_t i = 0; i < 2000; i++) {
      auto value = static_cast<float>(std::exp2(200 * random.uniform(2 * i) - 80));
      if (i % 5 == 0) value = std::ldexp(largest, static_cast<int>(i % 50) - 20);
      if (i % 5 == 1) value = std::nextafter(std::ldexp(largest, static_cast<int>(i % 50) - 20), kInfinity);
      const float scale = fp8_scale(value, format);
      int exponent = 0;
      ASSERT_EQ(std::frexp(scale, &exponent), 0.5F) << value;
      ASSERT_LE(value / scale, largest) << value;
      ASSERT_GT(value / (scale / 2), largest) << value;
      ASSERT_EQ(fp8_inverse(scale) * scale, 1.0F);
    }
    // So small that it would not have a reciprocal.
    for (const float value : {0.0F, 1e-45F, 1e-38F, 1e-31F})
      EXPECT_EQ(fp8_scale(value, format), std::ldexp(1.0F, -100)) << value;
    EXPECT_TRUE(std::isfinite(fp8_scale(std::numeric_limits<float>::max(), format)));
  }
}

TEST(Fp8, MatricesLieBehindEachOtherWithTheScalesThatTheirKindHas) {
  const std::vector<int64_t> rows = {5, 0, 130};
  const auto first = [](const Fp8Operand& operand, size_t g) {
    const Fp8Matrix& m = operand.matrices[g];
    return std::vector<int64_t>{m.outer, m.sum, m.codes, m.scales};
  };
  using V = std::vector<int64_t>;
  const Fp8Operand whole = fp8_along_rows(rows, 200, Fp8Format::e4m3, Fp8Scales::matrix, {});
  EXPECT_EQ(first(whole, 2), (V{130, 200, 1000, 2}));
  EXPECT_EQ(whole.codes.numel(), 135 * 200);
  EXPECT_EQ(whole.scales.numel(), 3);
  const Fp8Operand vectors = fp8_along_rows(rows, 200, Fp8Format::e4m3, Fp8Scales::vector, {});
  EXPECT_EQ(first(vectors, 2), (V{130, 200, 1000, 2 * 8}));
  EXPECT_EQ(vectors.codes.numel(), 138 * 200);  // and three rows of zeros
  EXPECT_EQ(vectors.codes.to_vector<uint8_t>().back(), 0);
  EXPECT_EQ(vectors.scales.numel(), 2 * 8 + 2 * 132);
  const Fp8Operand columns = fp8_along_columns(rows, 200, Fp8Format::e5m2, Fp8Scales::vector, 128, {});
  EXPECT_EQ(first(columns, 0), (V{200, 128, 0, 0}));
  EXPECT_EQ(first(columns, 1), (V{200, 0, 200 * 128, 200}));
  EXPECT_EQ(first(columns, 2), (V{200, 256, 200 * 128, 200}));
  EXPECT_EQ(columns.scales.numel(), 3 * 200);
  const Fp8Operand blocks = fp8_along_rows(V{130, 130}, 600, Fp8Format::e4m3, Fp8Scales::block, {});
  EXPECT_EQ(first(blocks, 1), (V{130, 600, 130 * 600, 2 * 8}));
  EXPECT_EQ(fp8_scale_index(Fp8Scales::block, 130, 600, 129, 599), 8 + 4);
  EXPECT_EQ(fp8_scale_index(Fp8Scales::vector, 130, 600, 129, 599), 4 * 132 + 129);
  EXPECT_EQ(fp8_scale_index(Fp8Scales::matrix, 130, 600, 129, 599), 0);
}

}  // namespace
}  // namespace shoal
