// UTF-8 as the tokenizers need it: strict decoding (no overlong forms, no surrogates, at most U+10FFFF).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace shoal {

/// Decodes the code point at `p` (p < end) into `code` and returns its length 1..4; 0 when the bytes there
/// are not valid UTF-8.
inline int decode_utf8(const char* p, const char* end, uint32_t& code) {
  const auto byte = [p](int i) { return static_cast<uint32_t>(static_cast<unsigned char>(p[i])); };
  const auto continues = [&](int i) { return (byte(i) & 0xC0) == 0x80; };
  const uint32_t first = byte(0);
  if (first < 0x80) {
    code = first;
    return 1;
  }
  const auto available = end - p;
  if (first >= 0xC2 && first <= 0xDF && available >= 2 && continues(1)) {
    code = (first & 0x1F) << 6 | (byte(1) & 0x3F);
    return 2;
  }
  if ((first & 0xF0) == 0xE0 && available >= 3 && continues(1) && continues(2)) {
    code = (first & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    return code >= 0x800 && (code < 0xD800 || code > 0xDFFF) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4 && available >= 4 && continues(1) && continues(2) && continues(3)) {
    code = (first & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F);
    return code >= 0x10000 && code <= 0x10FFFF ? 4 : 0;
  }
  return 0;
}

/// Length in bytes of the longest prefix that is valid UTF-8.
size_t valid_utf8_prefix(std::string_view text);
/// Length in bytes of the longest prefix in which no position begins a valid code point.
size_t invalid_utf8_prefix(std::string_view text);
/// `code` must be a Unicode scalar value.
void append_utf8(uint32_t code, std::string& out);

}  // namespace shoal
