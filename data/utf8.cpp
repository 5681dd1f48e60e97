#include "data/utf8.h"

#include <cstring>

namespace shoal {

size_t valid_utf8_prefix(std::string_view text) {
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const char* p = begin;
  while (p < end) {
    // Eight ASCII bytes at a time.
    uint64_t block = 0;
    while (end - p >= 8) {
      std::memcpy(&block, p, 8);
      if ((block & 0x8080808080808080ULL) != 0) break;
      p += 8;
    }
    if (p == end) break;
    uint32_t code = 0;
    const int length = decode_utf8(p, end, code);
    if (length == 0) break;
    p += length;
  }
  return static_cast<size_t>(p - begin);
}

size_t invalid_utf8_prefix(std::string_view text) {
  const char* const end = text.data() + text.size();
  size_t length = 0;
  uint32_t code = 0;
  while (length < text.size() && decode_utf8(text.data() + length, end, code) == 0) length++;
  return length;
}

void append_utf8(uint32_t code, std::string& out) {
  if (code < 0x80) {
    out += static_cast<char>(code);
  } else if (code < 0x800) {
    out += static_cast<char>(0xC0 | code >> 6);
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    out += static_cast<char>(0xE0 | code >> 12);
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | code >> 18);
    out += static_cast<char>(0x80 | (code >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (code >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (code & 0x3F));
  }
}

}  // namespace shoal
