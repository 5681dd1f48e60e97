// Broken and mutated YAML: reading it never crashes, and every refusal says where.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/base/random.h"
#include "core/base/text.h"
#include "tests/core/base/config_example.h"

namespace shoal::test {

namespace {

const std::string kValid =
    "# an experiment\n"
    "model:\n"
    "  layers: 12\n"
    "  hidden: auto\n"
    "  tied: false\n"
    "  name: \"a: b # c\"\n"
    "  moe:\n"
    "    num_experts: 16\n"
    "    router: {kind: top_k, top_k: 6, score: 'sigmoid'}\n"
    "lr: ${env:SHOAL_TEST_UNSET:-3e-4}\n"
    "dropout: .5\n"
    "sizes: [7, 0x10, 1e3]\n"
    "betas:\n"
    "- 0.9\n"
    "- 1\n"
    "files: [a.txt, 'b, c']\n"
    "sources:\n"
    "  - path: |\n"
    "      two\n"
    "      lines\n"
    "    weight: 2\n"
    "  - {path: y, tags: [p, q]}\n";

// 1 to 6 edits: bytes replaced, removed or doubled, pieces moved, syntax inserted.
std::string mutated(uint64_t seed) {
  static const std::vector<std::string> kPieces = {
      ":",   ": ",  "\n",  "- ",  "? ",    "[",    "]",
      "{",   "}",   ",",   "&a ", "*a",    "!x ",  "|\n",
      ">\n", "'",   "\"",  "#",   "%",     "@",    "`",
      "\t",  "---", "...", "<<",  "\\",    "~",    "$$",
      "${",  "\r",  "  ",  "\n ", "1e999", "\xFF", std::string(1, 0),
      "-",   ".",   "_",   "\x04"};
  const RandomStream random(seed, "yaml fuzz");
  std::string text = kValid;
  uint64_t draw = 0;
  const uint64_t edits = 1 + random.below(draw++, 6);
  for (uint64_t i = 0; i < edits; i++) {
    const size_t at = random.below(draw++, text.size() + 1), length = random.below(draw++, 12);
    switch (random.below(draw++, 5)) {
      case 0:
        text.insert(at, kPieces[random.below(draw++, kPieces.size())]);
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(random.below(draw++, text.size() + 1), text.substr(at, length * 4));
        break;
      case 3:
        text.resize(at);
        break;
      default:
        if (at < text.size()) text[at] = static_cast<char>(random.below(draw++, 256));
    }
  }
  return text;
}

}  // namespace

TEST(YamlFuzz, TheUnchangedTextIsRight) {
  EXPECT_EQ(parsed(kValid).sources.size(), 2U);
}

TEST(YamlFuzz, MutatedTextIsReadOrRefusedWithItsPlace) {
  int refused = 0;
  for (uint64_t seed = 0; seed < 1500; seed++) {
    const std::string text = mutated(seed);
    Example example;
    const auto problems = problems_of(text, example);
    refused += problems.empty() ? 0 : 1;
    for (const auto& problem : problems) {
      ASSERT_TRUE(names_place(problem)) << "seed " << seed << "\n" << problem;
    }
    if (!problems.empty()) continue;
    const std::string printed = print_fields(example.visitor());
    EXPECT_EQ(print_fields(parsed(printed).visitor()), printed) << "seed " << seed;
  }
  // Both outcomes happen, so both were tested.
  EXPECT_GT(refused, 500);
  EXPECT_LT(refused, 1490);
}

TEST(YamlFuzz, OverridesNeverCrash) {
  for (uint64_t seed = 0; seed < 500; seed++) {
    const RandomStream random(seed, "override fuzz");
    ConfigErrors errors;
    ConfigNode root = load_yaml_text(kValid, "exp.yaml", errors);
    for (uint64_t i = 0; i < 4; i++) {
      const std::string text = mutated(seed * 4 + i);
      const std::vector<std::string> paths = {"model", "sources.1", "model.moe.router", "sizes.0", "new.a.b",
                                              "lr",    "lr.a"};
      const size_t from = std::min<size_t>(random.below(i + 9, 60), text.size());
      apply_override(root, paths[random.below(i, paths.size())] + "=" + text.substr(from, 40), errors);
    }
    Example example;
    parse_fields(root, "", example.visitor(), errors);
    for (const auto& problem : errors.messages()) EXPECT_EQ(problem.substr(0, 7), "config ");
  }
}

}  // namespace shoal::test
