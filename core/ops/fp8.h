// 8-bit floating-point numbers (fp8), and matrices of them with scales: the operands of fp8 products.
//
// A value is its code's number times a scale. Scales are powers of two, so that scaling is exact: a number is
// rounded once, to the 4 (e4m3) or 3 (e5m2) significant bits of its format, and that result does not depend
// on the scale unless the number is some 2^14 (e5m2: 2^29) times smaller than the largest one that shares its
// scale. Scaled values are exact in bf16 and in f32, and so are products of two of them in f32.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor/tensor.h"

namespace shoal {

/// e4m3: 1 sign, 4 exponent and 3 fraction bits, up to 448, no infinity. e5m2: 1, 5 and 2, up to 57344.
enum class Fp8Format : uint8_t { e4m3, e5m2 };
const char* fp8_name(Fp8Format format);

/// Rounds to the nearest code, ties to the even one. NaN stays NaN. What is too large becomes the largest
/// number with its sign when `saturate`, else infinity (e5m2) or NaN (e4m3), and so does infinity. constexpr,
/// so that CUDA kernels may call it.
constexpr uint8_t to_fp8(float value, Fp8Format format, bool saturate = false) {
  const bool e4m3 = format == Fp8Format::e4m3;
  const uint32_t fraction = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, largest = e4m3 ? 0x7E : 0x7B;
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 24 & 0x80U, magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7F;  // in either format, as cuda_fp8.h has it
  uint32_t code = 0;
  if (magnitude >> 23 < 128 - bias) {
    // Below the normal numbers: the sum with 2^23 units is rounded to whole units.
    const float units = std::bit_cast<float>((127 + 23 + 1 - bias - fraction) << 23);
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + units) - std::bit_cast<uint32_t>(units);
  } else {
    const uint32_t shift = 23 - fraction;
    const uint32_t rounded = magnitude + ((1U << (shift - 1)) - 1) + (magnitude >> shift & 1U);
    code = (rounded >> shift) - ((127 - bias) << fraction);
  }
  if (code > largest) code = saturate ? largest : e4m3 ? 0x7F : 0x7C;
  return static_cast<uint8_t>(sign | code);
}

/// The number of a code.
constexpr float from_fp8(uint8_t code, Fp8Format format) {
  const bool e4m3 = format == Fp8Format::e4m3;
  const uint32_t fraction = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const uint32_t sign = uint32_t{code} >> 7 << 31, magnitude = code & 0x7FU, exponent = magnitude >> fraction;
  uint32_t bits = (magnitude << (23 - fraction)) + ((127 - bias) << 23);
  if (e4m3 ? magnitude == 0x7F : exponent == 31) {
    bits = e4m3 || (magnitude & 3U) != 0 ? 0x7FC00000U : 0x7F800000U;
  } else if (exponent == 0) {
    const float unit = std::bit_cast<float>((127 + 1 - bias - fraction) << 23);
    bits = std::bit_cast<uint32_t>(static_cast<float>(magnitude) * unit);
  }
  return std::bit_cast<float>(sign | bits);
}

/// The smallest power of two, and at least 2^-100, by which numbers up to `largest` >= 0 (finite) fit the
/// format.
constexpr float fp8_scale(float largest, Fp8Format format) {
  const auto bits = std::bit_cast<uint32_t>(largest);
  // The largest numbers are 1.75 * 2^8 and 1.75 * 2^15.
  const uint32_t above = (bits & 0x7FFFFFU) > 0x600000U ? 1 : 0;
  const uint32_t exponent = (bits >> 23) + above, down = format == Fp8Format::e4m3 ? 8 : 15;
  constexpr uint32_t kLowest = 127 - 100;
  return std::bit_cast<float>((exponent > kLowest + down ? exponent - down : kLowest) << 23);
}
/// 1 / scale, for a power of two within 2^-126 .. 2^126; exact.
constexpr float fp8_inverse(float scale) {
  return std::bit_cast<float>((254U << 23) - std::bit_cast<uint32_t>(scale));
}

/// What shares a scale in a matrix [outer, sum], whose products sum along `sum`: all of it; 128 neighbours
/// along the sum; a block of 128 x 128.
enum class Fp8Scales : uint8_t { matrix, vector, block };
inline constexpr int64_t kFp8Block = 128;

constexpr int64_t fp8_round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}
constexpr int64_t fp8_blocks(int64_t n) {
  return (n + kFp8Block - 1) / kFp8Block;
}

/// A matrix [outer, sum] among the codes of an operand, each row without gaps. codes, scales: where it begins
/// in the tensors of the operand.
struct Fp8Matrix {
  int64_t outer = 0, sum = 0, codes = 0, scales = 0;
};
/// Scales of a matrix, in the order that cublasLt asks for:
///   matrix  1
///   vector  [blocks of sum, outer rounded up to 4]
///   block   [blocks of outer, blocks of sum rounded up to 4]
constexpr int64_t fp8_num_scales(Fp8Scales kind, int64_t outer, int64_t sum) {
  if (kind == Fp8Scales::matrix) return 1;
  return kind == Fp8Scales::vector ? fp8_blocks(sum) * fp8_round_up(outer, 4)
                                   : fp8_blocks(outer) * fp8_round_up(fp8_blocks(sum), 4);
}
/// Where the scale of an element is among those of its matrix.
constexpr int64_t fp8_scale_index(Fp8Scales kind, int64_t outer, int64_t sum, int64_t row, int64_t column) {
  if (kind == Fp8Scales::matrix) return 0;
  return kind == Fp8Scales::vector ? column / kFp8Block * fp8_round_up(outer, 4) + row
                                   : row / kFp8Block * fp8_round_up(fp8_blocks(sum), 4) + column / kFp8Block;
}

/// One operand of a product of each of several groups. Made from rows x [R, C] sorted by group.
struct Fp8Operand {
  Fp8Format format = Fp8Format::e4m3;
  Fp8Scales kind = Fp8Scales::matrix;
  int64_t pad = 1;  // `sum` is rounded up to a multiple of it; the codes added are zeros
  Tensor codes, scales;
  std::vector<Fp8Matrix> matrices;  // one per group
  explicit operator bool() const { return codes.defined(); }
};
/// Memory for the rows of each group as they are: matrices [rows of g, C]. Of `vector` operands three rows
/// of zeros follow the last one, because cublasLt multiplies multiples of 4.
Fp8Operand fp8_along_rows(std::span<const int64_t> rows, int64_t columns, Fp8Format format, Fp8Scales kind,
                          Device device);
/// The same for the transposed ones: matrices [C, rows of g rounded up to `pad`].
Fp8Operand fp8_along_columns(std::span<const int64_t> rows, int64_t columns, Fp8Format format, Fp8Scales kind,
                             int64_t pad, Device device);

}  // namespace shoal
