#include "data/pre_tokenizer.h"

#include <gtest/gtest.h>

// gtest includes POSIX regex.h, which has types of the same names.
#define ONIG_ESCAPE_REGEX_T_COLLISION
#define re_registers onig_re_registers
#include <oniguruma.h>
#undef re_registers

#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/random.h"

namespace shoal {
namespace {

/// Oniguruma's own matcher on valid UTF-8: the matches in order, and what lies between them.
class OnigSplitter {
 public:
  explicit OnigSplitter(const char* pattern) {
    OnigErrorInfo info;
    const auto* begin = reinterpret_cast<const OnigUChar*>(pattern);
    const int result = onig_new(&regex_, begin, begin + std::string_view(pattern).size(), ONIG_OPTION_NONE,
                                ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
    SHOAL_CHECK(result == ONIG_NORMAL, "pattern does not compile");
    region_ = onig_region_new();
  }
  ~OnigSplitter() {
    onig_region_free(region_, 1);
    onig_free(regex_);
  }
  std::vector<std::string> split(const std::string& text) const {
    std::vector<std::string> pieces;
    const auto* begin = reinterpret_cast<const OnigUChar*>(text.data());
    size_t at = 0;
    while (at < text.size()) {
      const int found = onig_search(regex_, begin, begin + text.size(), begin + at, begin + text.size(),
                                    region_, ONIG_OPTION_NONE);
      SHOAL_CHECK(found == static_cast<int>(at) && region_->end[0] > found,
                  "the pattern must match everywhere");
      pieces.push_back(text.substr(at, static_cast<size_t>(region_->end[0]) - at));
      at = static_cast<size_t>(region_->end[0]);
    }
    return pieces;
  }

 private:
  OnigRegexType* regex_ = nullptr;
  OnigRegion* region_ = nullptr;
};

std::vector<std::string> pieces_of(PreTokenRegex regex, const std::string& text) {
  std::vector<std::string> pieces;
  for_each_pre_token(regex, text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

const std::vector<uint32_t> kOddCharacters = {
    'a',    'B',  's',    'S',    't',    'r',    'e',     'v',      'l',    'L',    'm',
    'd',    '\'', '\'',   ' ',    ' ',    ' ',    '\n',    '\r',     '\t',   0x0B,   0x0C,
    0x1C,   0x1F, 0x85,   0xA0,   0x1680, 0x180E, 0x2003,  0x2028,   0x200B, 0x200D, 0x3000,
    0xFEFF, '1',  '2',    '3',    0x0663, 0xBD,   0x2167,  '.',      '-',    '_',    0x0301,
    0x4E2D, 0xE9, 0x017F, 0x212A, 0xDF,   0xFB05, 0x1F468, 0x10FFFF, 0};

TEST(PreTokenizer, ScannersEqualOnigurumaOnRandomText) {
  for (const auto regex : {PreTokenRegex::gpt2, PreTokenRegex::llama3}) {
    const OnigSplitter oracle(pattern_of(regex));
    const RandomStream random(7, name_of(regex));
    uint64_t index = 0;
    for (int round = 0; round < 4000; round++) {
      std::string text;
      const uint64_t length = 1 + random.below(index++, 24);
      // Small alphabets of a round give long runs and deep look-ahead.
      const uint64_t alphabet = 1 + random.below(index++, kOddCharacters.size());
      const uint64_t shift = random.below(index++, kOddCharacters.size());
      for (uint64_t i = 0; i < length; i++) {
        append_utf8(kOddCharacters[(random.below(index++, alphabet) + shift) % kOddCharacters.size()], text);
      }
      ASSERT_EQ(pieces_of(regex, text), oracle.split(text))
          << name_of(regex) << " round " << round << " '" << text << "'";
    }
  }
}

TEST(PreTokenizer, ClassesEqualOnigurumaForEveryCodePoint) {
  // "a<c>1 <c>." cuts differently for letters, numbers, spaces, line ends and others.
  for (const auto regex : {PreTokenRegex::gpt2, PreTokenRegex::llama3}) {
    const OnigSplitter oracle(pattern_of(regex));
    for (uint32_t code = 0; code < 0x110000;
         code += code < 0x3200 || (code >= 0x1F000 && code < 0x20000) ? 1 : 61) {
      if (code >= 0xD800 && code <= 0xDFFF) continue;
      std::string text = "a";
      append_utf8(code, text);
      text += "1 ";
      append_utf8(code, text);
      text += ".";
      ASSERT_EQ(pieces_of(regex, text), oracle.split(text)) << name_of(regex) << " code point " << code;
    }
  }
}

TEST(PreTokenizer, InvalidBytesArePiecesOfTheirOwn) {
  const std::vector<std::string> expected = {"a", "\x80\xFF", " b", " ", "\xE2\x82"};
  EXPECT_EQ(pieces_of(PreTokenRegex::gpt2, "a\x80\xFF b \xE2\x82"), expected);
}

TEST(PreTokenizer, EmptyTextHasNoPieces) {
  EXPECT_TRUE(pieces_of(PreTokenRegex::gpt2, "").empty());
  EXPECT_TRUE(pieces_of(PreTokenRegex::llama3, "").empty());
}

TEST(PreTokenizer, UnknownRegexNameIsRefused) {
  EXPECT_EQ(regex_from_name("llama3"), PreTokenRegex::llama3);
  EXPECT_THROW(regex_from_name("gpt4"), UsageError);
}

TEST(Utf8, RefusesOverlongSurrogateAndTooLargeForms) {
  uint32_t code = 0;
  for (const std::string bad :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xED\xA0\x80", "\xE2\x82", "\xF5\x80\x80\x80", "\xFF",
        "\xE0\x80\x80", "\xF0\x80\x80\x80", "\xF4\x90\x80\x80"}) {
    EXPECT_EQ(decode_utf8(bad.data(), bad.data() + bad.size(), code), 0) << bad;
  }
  for (const uint32_t good :
       {0U, 0x7FU, 0x80U, 0x7FFU, 0x800U, 0xD7FFU, 0xE000U, 0xFFFFU, 0x10000U, 0x10FFFFU}) {
    std::string text;
    append_utf8(good, text);
    EXPECT_EQ(decode_utf8(text.data(), text.data() + text.size(), code), static_cast<int>(text.size()));
    EXPECT_EQ(code, good);
  }
  EXPECT_EQ(valid_utf8_prefix("abcdefghij\xC3\xA9\xC3"), 12U);
}

}  // namespace
}  // namespace shoal
