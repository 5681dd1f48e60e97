#include "launch/crc32c.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/base/random.h"

namespace shoal {

namespace {

std::vector<unsigned char> random_bytes(size_t count) {
  std::vector<unsigned char> bytes(count);
  const RandomStream random(7, "crc");
  for (size_t i = 0; i < count; i++) bytes[i] = static_cast<unsigned char>(random.bits(i));
  return bytes;
}

// One bit at a time, straight from the definition.
uint32_t reference(const unsigned char* p, size_t count) {
  uint32_t c = ~uint32_t{0};
  for (size_t i = 0; i < count; i++) {
    c ^= p[i];
    for (int bit = 0; bit < 8; bit++) c = (c & 1U) != 0 ? (c >> 1) ^ 0x82F63B78U : c >> 1;
  }
  return ~c;
}

}  // namespace

TEST(Crc32c, MatchesThePublishedCheckValues) {
  EXPECT_EQ(crc32c(""), 0U);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43U);
}

TEST(Crc32c, HardwareAndPortableFormsMatchTheDefinitionForAllLengthsAndAlignments) {
  const auto bytes = random_bytes(200000);
  for (const size_t begin : {0, 1, 3, 7})
    for (const size_t count : {0, 1, 7, 8, 9, 63, 1000, 49151, 49152, 49153, 98304, 150001}) {
      const uint32_t expected = reference(bytes.data() + begin, count);
      EXPECT_EQ(crc32c(bytes.data() + begin, count), expected) << begin << ' ' << count;
      EXPECT_EQ(crc32c_portable(bytes.data() + begin, count), expected) << begin << ' ' << count;
    }
}

TEST(Crc32c, PiecesCanBeChainedAndCombined) {
  const auto bytes = random_bytes(120000);
  const uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (const size_t cut : {0, 1, 8, 4097, 60000, 119999, 120000}) {
    const uint32_t first = crc32c(bytes.data(), cut);
    const uint32_t second = crc32c(bytes.data() + cut, bytes.size() - cut);
    EXPECT_EQ(crc32c(bytes.data() + cut, bytes.size() - cut, first), whole) << cut;
    EXPECT_EQ(crc32c_portable(bytes.data() + cut, bytes.size() - cut, first), whole) << cut;
    EXPECT_EQ(crc32c_combine(first, second, bytes.size() - cut), whole) << cut;
  }
}

TEST(Crc32c, CombiningLengthsBeyond32BitsAssociates) {
  // (a b) c == a (b c) for parts of 2^40 bytes and more, whose bytes need not exist.
  const uint32_t a = 0x12345678U, b = 0x9ABCDEF0U, c = 0x0F1E2D3CU;
  const uint64_t bytes_b = (uint64_t{1} << 40) + 12345, bytes_c = (uint64_t{1} << 36) + 7;
  EXPECT_EQ(crc32c_combine(crc32c_combine(a, b, bytes_b), c, bytes_c),
            crc32c_combine(a, crc32c_combine(b, c, bytes_c), bytes_b + bytes_c));
}

}  // namespace shoal
