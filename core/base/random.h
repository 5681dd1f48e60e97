// Counter-based random numbers (Philox 4x32-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). A value is a pure function of (seed, stream, index), so it depends on no rank, thread or call
// order.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace shoal {

/// The 128-bit block number `counter` of the stream with the given 64-bit key.
std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter_low, uint64_t counter_high);

/// A stable 64-bit hash of a name (XXH64 is not needed here: FNV-1a with a final mix).
uint64_t stream_id(std::string_view name);

/// Random values of one stream, addressed by a 64-bit index.
class RandomStream {
 public:
  RandomStream(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  RandomStream(uint64_t seed, std::string_view name) : RandomStream(seed, stream_id(name)) {}

  uint32_t bits(uint64_t index) const;               // uniform 32 bits
  uint64_t bits64(uint64_t index) const;             // uniform 64 bits
  double uniform(uint64_t index) const;              // [0, 1), 53 bits
  double normal(uint64_t index) const;               // mean 0, standard deviation 1 (Box-Muller)
  uint64_t below(uint64_t index, uint64_t n) const;  // uniform integer in [0, n); n > 0; bias < n / 2^64

 private:
  uint64_t seed_, stream_;
};

/// A pseudo-random permutation of [0, n) that needs no memory: position -> element in O(1) expected time
/// (Feistel network with cycle walking). Equal arguments give equal permutations everywhere.
uint64_t permute_index(uint64_t position, uint64_t n, uint64_t seed, uint64_t stream);

}  // namespace shoal
