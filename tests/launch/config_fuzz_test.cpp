// Mutated experiment files through everything that `shoal config` does: YAML, schema, rules between keys,
// layout, memory estimate. Each is refused with its place, or printed so that it reads back to itself.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/base/random.h"
#include "launch/memory.h"
#include "tests/launch/every_key.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

namespace fs = std::filesystem;

/// Draws one after the other from a stream.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed, "config fuzz") {}
  size_t below(size_t n) { return n == 0 ? 0 : random_.below(draw_++, n); }
  template <class T>
  const T& one_of(const std::vector<T>& items) {
    return items[below(items.size())];
  }

 private:
  RandomStream random_;
  uint64_t draw_ = 0;
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  return join(lines, "\n") + "\n";
}

/// A value that a person, or a bad template, might write.
const std::vector<std::string>& unusual_scalars() {
  static const std::vector<std::string> scalars = {"~",
                                                   "null",
                                                   "''",
                                                   "\"\"",
                                                   "yes",
                                                   "off",
                                                   "True",
                                                   "0x1F",
                                                   "0o17",
                                                   "017",
                                                   "1e3",
                                                   "1_000",
                                                   "1e400",
                                                   "-1e400",
                                                   "99999999999999999999999",
                                                   "-9223372036854775808",
                                                   "9223372036854775807",
                                                   ".inf",
                                                   "-.INF",
                                                   ".nan",
                                                   "1e-320",
                                                   "-0",
                                                   "+5",
                                                   "1.",
                                                   ".5",
                                                   "12:30:45",
                                                   "2001-01-01",
                                                   "|\n    text",
                                                   ">-\n    text",
                                                   "\"\\u00e9\\x41\\0\"",
                                                   "'it''s'",
                                                   "[]",
                                                   "{}",
                                                   "[1, [2, [3]]]",
                                                   "{a: {b: c}}",
                                                   "${env:SHOAL_FUZZ_UNSET}",
                                                   "${env:HOME}",
                                                   "${env:SHOAL_FUZZ_UNSET:-7}",
                                                   "${",
                                                   "$$",
                                                   "@x",
                                                   "`x`",
                                                   "%x",
                                                   "? x",
                                                   "- x",
                                                   "!!int 3",
                                                   "!x y",
                                                   "&a 3",
                                                   "*a",
                                                   "\xC3\xA9\xE2\x82\xAC",
                                                   "\"unclosed",
                                                   "'unclosed",
                                                   "a: b",
                                                   "# only a comment",
                                                   std::string(3000, 'x')};
  return scalars;
}

std::string flips_bits(std::string text, Dice& dice) {
  const size_t n = 1 + dice.below(4);
  for (size_t i = 0; i < n; i++) text[dice.below(text.size())] ^= static_cast<char>(1U << dice.below(8));
  return text;
}

std::string removes_a_piece(std::string text, Dice& dice) {
  return text.erase(dice.below(text.size()), 1 + dice.below(40));
}

std::string ends_early(std::string text, Dice& dice) {
  return text.substr(0, dice.below(text.size()));
}

std::string doubles_a_line(std::string text, Dice& dice) {
  auto lines = lines_of(text);
  const std::string line = dice.one_of(lines);
  lines.insert(lines.begin() + static_cast<ptrdiff_t>(dice.below(lines.size() + 1)), line);
  return joined(lines);
}

std::string removes_a_line(std::string text, Dice& dice) {
  auto lines = lines_of(text);
  lines.erase(lines.begin() + static_cast<ptrdiff_t>(dice.below(lines.size())));
  return joined(lines);
}

std::string swaps_lines(std::string text, Dice& dice) {
  auto lines = lines_of(text);
  std::swap(lines[dice.below(lines.size())], lines[dice.below(lines.size())]);
  return joined(lines);
}

std::string changes_an_indentation(std::string text, Dice& dice) {
  auto lines = lines_of(text);
  std::string& line = lines[dice.below(lines.size())];
  static const std::vector<std::string> starts = {" ", "  ", "    ", "\t", " \t", "\xC2\xA0"};
  if (dice.below(2) == 0)
    line.erase(0, 1 + dice.below(3));
  else
    line.insert(0, dice.one_of(starts));
  return joined(lines);
}

std::string splices_tokens(std::string text, Dice& dice) {
  static const std::vector<std::string> tokens = {": ",
                                                  ":",
                                                  "- ",
                                                  "? ",
                                                  "[",
                                                  "]",
                                                  "{",
                                                  "}",
                                                  ", ",
                                                  "&a ",
                                                  "*a",
                                                  "!!str ",
                                                  "<<: *a\n",
                                                  "|\n",
                                                  ">\n",
                                                  "'",
                                                  "\"",
                                                  " #",
                                                  "%YAML 1.1\n---\n",
                                                  "---\n",
                                                  "...\n",
                                                  "@",
                                                  "`",
                                                  "\\",
                                                  std::string(1, '\0'),
                                                  "\xFF",
                                                  "\xC3",
                                                  "\xEF\xBB\xBF",
                                                  "\r",
                                                  "\r\n",
                                                  "\t",
                                                  "\x1B",
                                                  "\x7F",
                                                  "\xE2\x80\xA8",
                                                  "1e999",
                                                  "=",
                                                  "<<"};
  const size_t n = 1 + dice.below(3);
  for (size_t i = 0; i < n; i++) text.insert(dice.below(text.size() + 1), dice.one_of(tokens));
  return text;
}

std::string replaces_a_value(std::string text, Dice& dice) {
  auto lines = lines_of(text);
  for (int attempt = 0; attempt < 20; attempt++) {
    std::string& line = lines[dice.below(lines.size())];
    const size_t colon = line.find(": ");
    if (colon == std::string::npos || line[0] == '#') continue;
    line = line.substr(0, colon + 2) + dice.one_of(unusual_scalars());
    break;
  }
  return joined(lines);
}

std::string changes_a_number(std::string text, Dice& dice) {
  static const std::vector<std::string> numbers = {"0", "-1", "1e18", "0.5", "1e-9", "7", "1000000007", "64"};
  for (int attempt = 0; attempt < 200; attempt++) {
    const size_t at = dice.below(text.size());
    if (std::isdigit(static_cast<unsigned char>(text[at])) == 0) continue;
    return text.replace(at, 1, dice.one_of(numbers));
  }
  return text;
}

std::string mistypes_a_key(std::string text, Dice& dice) {
  for (int attempt = 0; attempt < 200; attempt++) {
    const size_t colon = text.find(':', dice.below(text.size()));
    if (colon == std::string::npos || colon < 2) continue;
    std::swap(text[colon - 1], text[colon - 2]);
    break;
  }
  return text;
}

std::string moves_a_piece(std::string text, Dice& dice) {
  const std::string piece = text.substr(dice.below(text.size()), 1 + dice.below(60));
  return text.insert(dice.below(text.size() + 1), piece);
}

using Mutator = std::string (*)(std::string text, Dice& dice);

const std::vector<std::pair<const char*, Mutator>>& mutators() {
  static const std::vector<std::pair<const char*, Mutator>> all = {
      {"flips bits", flips_bits},
      {"removes a piece", removes_a_piece},
      {"ends early", ends_early},
      {"doubles a line", doubles_a_line},
      {"removes a line", removes_a_line},
      {"swaps lines", swaps_lines},
      {"changes an indentation", changes_an_indentation},
      {"splices tokens", splices_tokens},
      {"replaces a value", replaces_a_value},
      {"changes a number", changes_a_number},
      {"mistypes a key", mistypes_a_key},
      {"moves a piece", moves_a_piece}};
  return all;
}

/// A folder with copies of every file in configs/, so that `extends` finds its neighbours.
class ConfigFolder {
 public:
  ConfigFolder() {
    setenv("TEXT", "/usr/share/some/text.txt", 1);
    for (const auto& entry : fs::directory_iterator(fs::path(SHOAL_SOURCE_DIR) / "configs")) {
      if (entry.path().extension() != ".yaml") continue;
      fs::copy(entry.path(), folder_.path());
      std::ifstream file(entry.path(), std::ios::binary);
      std::stringstream text;
      text << file.rdbuf();
      seeds.push_back(text.str());
    }
  }
  ~ConfigFolder() { unsetenv("TEXT"); }
  ConfigFolder(const ConfigFolder&) = delete;
  ConfigFolder& operator=(const ConfigFolder&) = delete;

  std::vector<std::string> seeds;

  /// What `shoal config FILE --world 2` prints; the problem when it is refused.
  struct Outcome {
    std::string printed, refusal;
  };
  Outcome load(const std::string& text) {
    const std::string path = folder_ / "mutated.yaml";
    std::ofstream(path, std::ios::binary) << text;
    return load_path(path);
  }
  Outcome load_path(const std::string& path) {
    Outcome out;
    try {
      LoadedConfig loaded = load_train_config(path, {}, 2);
      const ParallelLayout layout = layout_of(loaded.config, 2);
      EXPECT_GT(estimate_memory(loaded.config, layout, expected_vocab(loaded.config, true).size).total(), 0);
      out.printed = print_fields([&](FieldVisitor& v) { loaded.config.fields(v); }, &loaded.tree);
    } catch (const UsageError& e) {
      out.refusal = e.what();
    }
    return out;
  }
  std::string path(const std::string& name) const { return folder_ / name; }

 private:
  TemporaryFolder folder_;
};

/// "config [KEY ](FILE:LINE:COLUMN): PROBLEM"
bool names_key_and_place(const std::string& message) {
  if (!message.starts_with("config ")) return false;
  const size_t end = message.find("): ");
  if (end == std::string::npos) return false;
  const size_t column = message.rfind(':', end), line = message.rfind(':', column - 1);
  if (column == std::string::npos || line == std::string::npos) return false;
  const auto digits = [&](size_t from, size_t to) {
    return to > from && message.substr(from, to - from).find_first_not_of("0123456789") == std::string::npos;
  };
  return digits(line + 1, column) && digits(column + 1, end) && message.rfind(".yaml", line) == line - 5;
}

void expect_places(const std::string& refusal, const std::string& about) {
  const auto lines = lines_of(refusal);
  const bool many = lines[0].find(" problems in the config:") != std::string::npos;
  for (size_t i = many ? 1 : 0; i < lines.size(); i++) {
    const std::string line = many ? lines[i].substr(2) : lines[i];
    if (line.starts_with("and ")) continue;  // "and 3 more"
    EXPECT_TRUE(names_key_and_place(line)) << about << "\n" << refusal;
  }
}

/// Refused with places, or printed and read back to the same.
bool is_taken(ConfigFolder& folder, const std::string& text, const std::string& about) {
  const ConfigFolder::Outcome first = folder.load(text);
  if (!first.refusal.empty()) {
    expect_places(first.refusal, about);
    return false;
  }
  const ConfigFolder::Outcome again = folder.load(first.printed);
  EXPECT_EQ(again.refusal, "") << about << "\n" << first.printed;
  const auto values = [](const std::string& printed) {  // without the origins
    std::vector<std::string> lines = lines_of(printed);
    for (std::string& line : lines) {
      line.erase(std::min(line.size(), line.rfind("  # ")));
      line.erase(line.find_last_not_of(' ') + 1);
    }
    return lines;
  };
  EXPECT_EQ(values(again.printed), values(first.printed)) << about;
  return true;
}

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t kMaxGrowth = int64_t{1} << 30;  // freed memory is kept for a while
#else
constexpr int64_t kMaxGrowth = int64_t{256} << 20;
#endif

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

TEST(ConfigFuzz, EveryFileInConfigsIsRight) {
  ConfigFolder folder;
  EXPECT_GE(folder.seeds.size(), 3U);
  for (const std::string& seed : folder.seeds) EXPECT_TRUE(is_taken(folder, seed, seed));
}

TEST(ConfigFuzz, AThousandMutatedFilesAreRefusedWithTheirPlaceOrReadBackToThemselves) {
  ConfigFolder folder;
  constexpr uint64_t kFiles = 1000;
  const int64_t memory_before = peak_resident_bytes();
  std::map<std::string, int> taken;
  for (uint64_t seed = 0; seed < kFiles; seed++) {
    Dice dice(seed);
    std::string text = folder.seeds[seed % folder.seeds.size()];
    const auto& [name, mutate] = mutators()[seed / folder.seeds.size() % mutators().size()];
    text = mutate(text, dice);
    if (dice.below(4) == 0 && !text.empty()) text = dice.one_of(mutators()).second(text, dice);
    taken[name] += is_taken(folder, text, str("seed ", seed, " ", name, ":\n", text)) ? 1 : 0;
  }
  int all = 0;
  for (const auto& [name, count] : taken) all += count;
  // Both outcomes happen often, so both were tested.
  EXPECT_GT(all, 100);
  EXPECT_LT(all, 900);
  EXPECT_EQ(taken.size(), mutators().size());
  EXPECT_LT(peak_resident_bytes() - memory_before, kMaxGrowth);
}

TEST(ConfigFuzz, FilesThatAreNoConfigAtAllAreRefusedWithTheirPlace) {
  ConfigFolder folder;
  const int64_t memory_before = peak_resident_bytes();
  const auto repeated = [](const std::string& piece, size_t times) {
    std::string out;
    for (size_t i = 0; i < times; i++) out += piece;
    return out;
  };
  std::string nested;
  for (int i = 0; i < 200; i++) nested += std::string(static_cast<size_t>(i), ' ') + "a:\n";
  const std::vector<std::string> texts = {"",
                                          "\n\n",
                                          "# only\n# comments\n",
                                          "   ",
                                          "\t",
                                          "---",
                                          "---\n...\n",
                                          "~",
                                          "null",
                                          "42",
                                          "words",
                                          "[]",
                                          "{}",
                                          std::string(1, '\0'),
                                          std::string(100000, '\0'),
                                          "\xEF\xBB\xBF",
                                          "\xEF\xBB\xBF\xEF\xBB\xBF",
                                          "\xFF\xFE\0r",
                                          "\r\r\r",
                                          "run",
                                          "run:",
                                          "run: {",
                                          "run: {]",
                                          "%TAG ! x\n---\n",
                                          repeated("[", 5000),
                                          repeated("{a: ", 5000),
                                          repeated("- ", 5000),
                                          repeated("? ", 5000),
                                          nested,
                                          repeated("a", 1 << 19),
                                          repeated("a: b\n", 50000),
                                          repeated("run: {steps: 3}\n", 20000),
                                          repeated("&a ", 3000),
                                          repeated("\"", 4001),
                                          "run: " + repeated("[", 2000) + repeated("]", 2000),
                                          repeated("x", (1 << 20) + 1),
                                          "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
                                          "<<: {run: {steps: 3}}\n",
                                          repeated("run.steps: 3\n", 10),
                                          "run: {steps: " + repeated("9", 100000) + "}\n",
                                          "run: {steps: 1e" + repeated("9", 1000) + "}\n",
                                          "run: {name: " + repeated("n", 100000) + "}\n"};
  for (const std::string& text : texts)
    EXPECT_FALSE(is_taken(folder, text, text.substr(0, 80))) << text.substr(0, 80);
  EXPECT_LT(peak_resident_bytes() - memory_before, kMaxGrowth);
}

TEST(ConfigFuzz, WindowsFilesAndByteOrderMarksAreTaken) {
  ConfigFolder folder;
  for (const std::string& seed : folder.seeds) {
    EXPECT_TRUE(is_taken(folder, "\xEF\xBB\xBF" + seed, "byte order mark"));
    EXPECT_TRUE(is_taken(folder, join(lines_of(seed), "\r\n") + "\r\n", "windows line ends"));
  }
}

TEST(ConfigFuzz, ALongChainOfExtendsIsRefusedAndAShortOneTaken) {
  ConfigFolder folder;
  std::ofstream(folder.path("chain0.yaml")) << "data: {text: t.txt}\n";
  for (int i = 1; i <= 100; i++) {
    std::ofstream(folder.path(str("chain", i, ".yaml")))
        << "extends: chain" << i - 1 << ".yaml\nrun: {steps: " << i << "}\n";
  }
  EXPECT_EQ(folder.load_path(folder.path("chain30.yaml")).refusal, "");
  const std::string refusal = folder.load_path(folder.path("chain100.yaml")).refusal;
  expect_places(refusal, "chain of 100");
  EXPECT_NE(refusal.find("chain of extends"), std::string::npos) << refusal;
  EXPECT_EQ(refusal.find('\n'), std::string::npos) << "one cause, one message:\n" << refusal;
}

}  // namespace
}  // namespace shoal::testing
