// Cuts text into pre-tokens, the pieces inside which BPE merges: the `gpt2` and `llama3` regular expressions,
// run by hand-written scanners with Oniguruma's Unicode classes. The tests compare them with Oniguruma's own
// matcher. A scanner needs no backtracking, so time is linear and no text meets a retry limit.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "data/utf8.h"

namespace shoal {

enum class PreTokenRegex { gpt2, llama3 };

/// The regular expression in Oniguruma's and Hugging Face's notation.
const char* pattern_of(PreTokenRegex regex);
/// "gpt2" or "llama3"; UsageError for another name.
PreTokenRegex regex_from_name(std::string_view name);
const char* name_of(PreTokenRegex regex);

/// End of the pre-token that begins at `begin`. [begin, end) is valid UTF-8 and not empty.
using PreTokenScanner = const char* (*)(const char* begin, const char* end);
PreTokenScanner scanner_of(PreTokenRegex regex);

/// Calls fn(piece) for consecutive pieces that join to `text`. Stretches that are not valid UTF-8 are pieces
/// of their own, and the text before them ends there for look-ahead.
template <class Fn>
void for_each_pre_token(PreTokenRegex regex, std::string_view text, const Fn& fn) {
  const PreTokenScanner scan = scanner_of(regex);
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    const char* const end = text.data() + valid;
    for (const char* p = text.data(); p < end;) {
      const char* const next = scan(p, end);
      fn(std::string_view(p, static_cast<size_t>(next - p)));
      p = next;
    }
    text.remove_prefix(valid);
    const size_t invalid = invalid_utf8_prefix(text);
    if (invalid > 0) fn(text.substr(0, invalid));
    text.remove_prefix(invalid);
  }
}

}  // namespace shoal
