#include "data/pre_tokenizer.h"

#include <oniguruma.h>

#include <vector>

#include "core/base/error.h"

namespace shoal {

namespace {

enum Class : uint8_t { kLetter = 1, kNumber = 2, kSpace = 4 };
constexpr uint8_t kWord = kLetter | kNumber | kSpace;  // [\s\p{L}\p{N}]

/// The classes of every code point, as the regex engine that the reference tokenizer uses defines them.
class Classes {
 public:
  Classes() : table_(0x110000) {
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    SHOAL_CHECK(onig_initialize(encodings, 1) == ONIG_NORMAL, "Oniguruma: cannot initialise");
    mark(ctype_of("L"), kLetter);
    mark(ctype_of("N"), kNumber);
    mark(ONIGENC_CTYPE_SPACE, kSpace);
  }
  uint8_t operator[](uint32_t code) const { return table_[code]; }

  static const Classes& instance() {
    static const Classes* const classes =
        new Classes;  // never destroyed: threads may run until the process ends
    return *classes;
  }

 private:
  static OnigCtype ctype_of(const char* property) {
    auto* name = reinterpret_cast<OnigUChar*>(const_cast<char*>(property));
    const int ctype = ONIG_ENCODING_UTF8->property_name_to_ctype(ONIG_ENCODING_UTF8, name, name + 1);
    SHOAL_CHECK(ctype >= 0, "Oniguruma: no Unicode property ", property);
    return static_cast<OnigCtype>(ctype);
  }

  void mark(OnigCtype ctype, uint8_t flag) {
    OnigCodePoint single_byte_limit = 0;
    const OnigCodePoint* ranges = nullptr;  // count, then pairs from..to
    const int result = ONIG_ENCODING_UTF8->get_ctype_code_range(ctype, &single_byte_limit, &ranges);
    SHOAL_CHECK(result == ONIG_NORMAL && ranges != nullptr, "Oniguruma: no code points for class ", ctype);
    for (OnigCodePoint r = 0; r < ranges[0]; r++) {
      for (OnigCodePoint code = ranges[1 + 2 * r]; code <= ranges[2 + 2 * r] && code < table_.size();
           code++) {
        table_[code] = static_cast<uint8_t>(table_[code] | flag);
      }
    }
  }

  std::vector<uint8_t> table_;
};

/// A position in valid UTF-8 text with the character there.
struct Cursor {
  const Classes* classes;
  const char* end;
  const char* at;
  uint32_t code = 0;
  int length = 0;    // bytes of the character; 0 at the end
  uint8_t kind = 0;  // its classes

  Cursor(const char* begin, const char* end) : classes(&Classes::instance()), end(end), at(begin) { load(); }
  bool done() const { return length == 0; }
  bool is(uint8_t classes_wanted) const { return (kind & classes_wanted) != 0; }
  bool is_other() const { return length > 0 && (kind & kWord) == 0; }  // [^\s\p{L}\p{N}]
  bool is_newline() const { return length > 0 && (code == '\n' || code == '\r'); }
  void step() {
    at += length;
    load();
  }
  void skip(uint8_t wanted) {
    while (is(wanted)) step();
  }
  void skip_other() {
    while (is_other()) step();
  }

 private:
  void load() {
    if (at >= end) {
      length = 0;
      kind = 0;
      return;
    }
    length = decode_utf8(at, end, code);
    kind = (*classes)[code];
  }
};

// `\s+(?!\S)|\s+` at a space: the whole run at the end of the text, else all but its last character (at least
// one).
const char* scan_spaces(Cursor cursor) {
  const char* const begin = cursor.at;
  const char* last = begin;
  while (cursor.is(kSpace)) {
    last = cursor.at;
    cursor.step();
  }
  return cursor.done() || last == begin ? cursor.at : last;
}

// 's 't 're 've 'm 'll 'd. `begin` is the apostrophe. Returns the end, or null.
const char* scan_contraction(const char* begin, const char* end, bool ignore_case) {
  const auto letter = [&](int i) -> char {
    if (begin + i >= end) return 0;
    const char c = begin[i];
    return ignore_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char a = letter(1);
  if (a == 's' || a == 't' || a == 'm' || a == 'd') return begin + 2;
  const char b = letter(2);
  if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return begin + 3;
  // The long s U+017F (C5 BF) equals s when case is ignored.
  if (ignore_case && end - begin >= 3 && begin[1] == '\xC5' && begin[2] == '\xBF') return begin + 3;
  return nullptr;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
const char* scan_gpt2(const char* begin, const char* end) {
  if (*begin == '\'') {
    if (const char* after = scan_contraction(begin, end, false)) return after;
  }
  Cursor cursor(begin, end);
  const Cursor first = cursor;
  if (cursor.code == ' ') cursor.step();
  if (cursor.is(kLetter)) {
    cursor.skip(kLetter);
  } else if (cursor.is(kNumber)) {
    cursor.skip(kNumber);
  } else if (cursor.is_other()) {
    cursor.skip_other();
  } else {
    return scan_spaces(first);
  }
  return cursor.at;
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|
// \s+(?!\S)|\s+
const char* scan_llama3(const char* begin, const char* end) {
  if (*begin == '\'') {
    if (const char* after = scan_contraction(begin, end, true)) return after;
  }
  Cursor cursor(begin, end);
  const Cursor first = cursor;
  if (cursor.is(kNumber)) {
    for (int i = 0; i < 3 && cursor.is(kNumber); i++) cursor.step();
    return cursor.at;
  }
  if (!cursor.is(kLetter) && !cursor.is_newline()) cursor.step();
  if (cursor.is(kLetter)) {
    cursor.skip(kLetter);
    return cursor.at;
  }
  cursor = first;
  if (cursor.code == ' ') cursor.step();
  if (cursor.is_other()) {
    cursor.skip_other();
    while (cursor.is_newline()) cursor.step();
    return cursor.at;
  }
  const char* after_newline = nullptr;  // \s*[\r\n]+ ends after the last line end of the run
  for (cursor = first; cursor.is(kSpace);) {
    const bool newline = cursor.is_newline();
    cursor.step();
    if (newline) after_newline = cursor.at;
  }
  return after_newline != nullptr ? after_newline : scan_spaces(first);
}

}  // namespace

const char* pattern_of(PreTokenRegex regex) {
  switch (regex) {
    case PreTokenRegex::gpt2:
      return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
    case PreTokenRegex::llama3:
      return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  }
  return "";
}

const char* name_of(PreTokenRegex regex) {
  return regex == PreTokenRegex::gpt2 ? "gpt2" : "llama3";
}

PreTokenRegex regex_from_name(std::string_view name) {
  if (name == "gpt2") return PreTokenRegex::gpt2;
  if (name == "llama3") return PreTokenRegex::llama3;
  throw UsageError(str("tokenizer regex: expected gpt2 or llama3, got '", name, "'"));
}

PreTokenScanner scanner_of(PreTokenRegex regex) {
  return regex == PreTokenRegex::gpt2 ? scan_gpt2 : scan_llama3;
}

}  // namespace shoal
