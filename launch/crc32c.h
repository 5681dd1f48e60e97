// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78): the checksum of checkpoint files. It finds
// accidents, not attackers. Uses the processor's CRC instruction when it has one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace shoal {

/// Checksum of `bytes` bytes. With `previous`, the checksum of the bytes it was made from followed by these.
uint32_t crc32c(const void* data, size_t bytes, uint32_t previous = 0);
inline uint32_t crc32c(std::string_view text) {
  return crc32c(text.data(), text.size());
}

/// Checksum of A followed by B, from the checksums of A and of B alone and the length of B.
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes);

/// The portable form, which crc32c() falls back to; the tests compare the two.
uint32_t crc32c_portable(const void* data, size_t bytes, uint32_t previous = 0);

}  // namespace shoal
