#include "data/content_hash.h"

#include <algorithm>
#include <cstdio>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "data/file_io.h"

namespace shoal {

std::string hash_text(std::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  char digits[33];
  std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(hash.high64),
                static_cast<unsigned long long>(hash.low64));
  return digits;
}

std::string hex_of(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

uint64_t content_hash(const std::string& path) {
  const MappedFile file(path, MappedFile::Access::sequential);
  return XXH3_64bits(file.text().data(), file.text().size());
}

uint64_t sampled_hash(const std::string& path, int64_t max_blocks) {
  constexpr int64_t kBlock = 4096;
  const MappedFile file(path);
  if (file.size() <= kBlock * max_blocks) return XXH3_64bits(file.text().data(), file.text().size());
  const int64_t last = file.size() - kBlock, gaps = std::max<int64_t>(1, max_blocks - 1);
  uint64_t hash = 0;
  for (int64_t i = 0; i < max_blocks; i++) {
    // Not last * i / gaps, which could overflow.
    const int64_t begin = last / gaps * i + last % gaps * i / gaps;
    hash = XXH3_64bits_withSeed(file.data() + begin, kBlock, hash);
  }
  return hash;
}

}  // namespace shoal
