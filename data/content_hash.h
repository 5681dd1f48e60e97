// Hashes that tell whether a text file still has the content that was prepared: a cheap one of sampled
// blocks, and one of every byte. Used by dataset preparation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shoal {

/// 128 bits of a text as 32 hexadecimal digits.
std::string hash_text(std::string_view text);
/// 16 hexadecimal digits.
std::string hex_of(uint64_t value);

/// Hash of every byte. Error when the file cannot be read.
uint64_t content_hash(const std::string& path);

/// Hash of up to max_blocks (>= 1) blocks of 4 KiB, evenly spaced, the first and the last one included. A
/// file that is not longer than these blocks is hashed as a whole. Error when the file cannot be read.
uint64_t sampled_hash(const std::string& path, int64_t max_blocks);

}  // namespace shoal
