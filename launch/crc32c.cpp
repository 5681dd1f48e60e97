#include "launch/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace shoal {

namespace {

constexpr uint32_t kPolynomial = 0x82F63B78U;

// Polynomials over GF(2) modulo the CRC polynomial, bit 31 being x^0 (the reflected order of the CRC).
constexpr uint32_t times_x(uint32_t a) {
  return (a & 1U) != 0 ? (a >> 1) ^ kPolynomial : a >> 1;
}
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = times_x(b);
  }
  return product;
}

// kSquares[k] = x^(2^k); 3 more than 64, because lengths are in bytes and powers in bits.
constexpr std::array<uint32_t, 67> kSquares = [] {
  std::array<uint32_t, 67> squares{};
  squares[0] = uint32_t{1} << 30;
  for (size_t k = 1; k < squares.size(); k++) squares[k] = multiply(squares[k - 1], squares[k - 1]);
  return squares;
}();

// x^(8 * bytes): appending that many zero bytes multiplies a CRC by it.
constexpr uint32_t shift_by(uint64_t bytes) {
  uint32_t power = uint32_t{1} << 31;
  for (size_t k = 3; bytes != 0; bytes >>= 1, k++)
    if ((bytes & 1U) != 0) power = multiply(kSquares[k], power);
  return power;
}

// kTables[j][v]: CRC register after byte v followed by j zero bytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t value = 0; value < 256; value++) {
    uint32_t c = value;
    for (int bit = 0; bit < 8; bit++) c = times_x(c);
    tables[0][value] = c;
  }
  for (size_t j = 1; j < 8; j++)
    for (size_t v = 0; v < 256; v++)
      tables[j][v] = (tables[j - 1][v] >> 8) ^ tables[0][tables[j - 1][v] & 0xFFU];
  return tables;
}
constexpr Tables kTables = make_tables();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t one_stream(const unsigned char* p, size_t bytes, uint32_t crc) {
  uint64_t c = ~crc;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    uint64_t word = 0;
    std::memcpy(&word, p, 8);
    c = _mm_crc32_u64(c, word);
  }
  auto c32 = static_cast<uint32_t>(c);
  for (; bytes > 0; bytes--, p++) c32 = _mm_crc32_u8(c32, *p);
  return ~c32;
}

// The instruction has a latency of 3 cycles and a throughput of 1, so three independent lanes run at once and
// are joined by one multiplication each.
constexpr size_t kLaneBytes = 16384;
constexpr uint32_t kLaneShift = shift_by(kLaneBytes);

__attribute__((target("sse4.2"))) uint32_t hardware(const unsigned char* p, size_t bytes, uint32_t crc) {
  for (; bytes >= 3 * kLaneBytes; bytes -= 3 * kLaneBytes, p += 3 * kLaneBytes) {
    uint64_t a = ~crc, b = ~uint32_t{0}, c = ~uint32_t{0};
    for (size_t i = 0; i < kLaneBytes; i += 8) {
      uint64_t word[3];
      std::memcpy(&word[0], p + i, 8);
      std::memcpy(&word[1], p + kLaneBytes + i, 8);
      std::memcpy(&word[2], p + 2 * kLaneBytes + i, 8);
      a = _mm_crc32_u64(a, word[0]);
      b = _mm_crc32_u64(b, word[1]);
      c = _mm_crc32_u64(c, word[2]);
    }
    crc = multiply(kLaneShift, ~static_cast<uint32_t>(a)) ^ ~static_cast<uint32_t>(b);
    crc = multiply(kLaneShift, crc) ^ ~static_cast<uint32_t>(c);
  }
  return one_stream(p, bytes, crc);
}
#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t previous) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t c = ~previous;
  for (; bytes >= 8; bytes -= 8, p += 8) {
    const uint32_t low = c ^ (p[0] | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16 | uint32_t{p[3]} << 24);
    c = kTables[7][low & 0xFFU] ^ kTables[6][(low >> 8) & 0xFFU] ^ kTables[5][(low >> 16) & 0xFFU] ^
        kTables[4][low >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
  }
  for (; bytes > 0; bytes--, p++) c = (c >> 8) ^ kTables[0][(c ^ *p) & 0xFFU];
  return ~c;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t previous) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return hardware(static_cast<const unsigned char*>(data), bytes, previous);
#endif
  return crc32c_portable(data, bytes, previous);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return multiply(shift_by(second_bytes), first) ^ second;
}

}  // namespace shoal
