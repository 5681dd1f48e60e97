#include "core/base/random.h"

#include <cmath>
#include <numbers>

#include "core/base/error.h"

namespace shoal {

std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  constexpr uint32_t kMul0 = 0xD2511F53, kMul1 = 0xCD9E8D57, kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  std::array<uint32_t, 4> c = {static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
                               static_cast<uint32_t>(counter_high),
                               static_cast<uint32_t>(counter_high >> 32)};
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t{kMul0} * c[0], p1 = uint64_t{kMul1} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return c;
}

uint64_t stream_id(std::string_view name) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
  hash ^= hash >> 33;
  hash *= 0xFF51AFD7ED558CCDULL;
  return hash ^ (hash >> 33);
}

uint32_t RandomStream::bits(uint64_t index) const {
  return philox(seed_, index, stream_)[0];
}

uint64_t RandomStream::bits64(uint64_t index) const {
  const auto block = philox(seed_, index, stream_);
  return uint64_t{block[1]} << 32 | block[0];
}

double RandomStream::uniform(uint64_t index) const {
  return static_cast<double>(bits64(index) >> 11) * 0x1.0p-53;
}

double RandomStream::normal(uint64_t index) const {
  const auto block = philox(seed_, index, stream_);
  const double u1 = (static_cast<double>((uint64_t{block[1]} << 32 | block[0]) >> 11) + 0.5) * 0x1.0p-53;
  const double u2 = static_cast<double>((uint64_t{block[3]} << 32 | block[2]) >> 11) * 0x1.0p-53;
  return std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2);
}

uint64_t RandomStream::below(uint64_t index, uint64_t n) const {
  SHOAL_CHECK(n > 0, "RandomStream::below: expected n > 0, got 0");
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits64(index)) * n) >> 64);
}

uint64_t permute_index(uint64_t position, uint64_t n, uint64_t seed, uint64_t stream) {
  SHOAL_CHECK(position < n, "permute_index: expected position < ", n, ", got ", position);
  // A balanced Feistel network permutes [0, 2^(2 half)); outputs >= n are fed back in (cycle walking), so the
  // result is a permutation of [0, n). The domain is < 4n, hence < 4 rounds of walking on average. Eight
  // rounds: with four, small n show a bias of several percent.
  int half = 1;
  while (half < 32 && (uint64_t{1} << (2 * half)) < n) half++;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = position;
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 8; round++) {
      const uint64_t mixed = philox(seed, right, stream + 0x9E3779B97F4A7C15ULL * (round + 1))[0];
      const uint64_t next = left ^ (mixed & mask);
      left = right;
      right = next;
    }
    value = left << half | right;
  } while (value >= n);
  return value;
}

}  // namespace shoal
