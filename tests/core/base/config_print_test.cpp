#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/base/config_scalar.h"
#include "core/base/random.h"
#include "core/base/text.h"
#include "tests/core/base/config_example.h"

namespace shoal::test {

namespace {

// Random text of bytes that are hard to write in YAML, valid UTF-8 without NUL.
std::string random_text(const RandomStream& random, uint64_t& draw) {
  static const std::vector<std::string> kPieces = {"a",
                                                   "B",
                                                   "7",
                                                   ".",
                                                   "-",
                                                   "_",
                                                   "/",
                                                   " ",
                                                   "\n",
                                                   "\t",
                                                   ":",
                                                   ": ",
                                                   " #",
                                                   "#",
                                                   "'",
                                                   "\"",
                                                   "\\",
                                                   "$",
                                                   "${env:X}",
                                                   "[",
                                                   "]",
                                                   "{",
                                                   "}",
                                                   ",",
                                                   "&",
                                                   "*",
                                                   "!",
                                                   "|",
                                                   ">",
                                                   "%",
                                                   "@",
                                                   "`",
                                                   "~",
                                                   "\xC3\xA9",
                                                   "\xE2\x82\xAC",
                                                   "\xF0\x9F\x90\x9F",
                                                   "\x01",
                                                   "\x7F",
                                                   "\r",
                                                   "null",
                                                   "true",
                                                   "1e5",
                                                   "0x1",
                                                   "yes",
                                                   "---",
                                                   "\xC2\x85",
                                                   "\xE2\x80\xA8"};
  std::string out;
  for (uint64_t i = random.below(draw++, 6); i > 0; i--) out += kPieces[random.below(draw++, kPieces.size())];
  return out;
}

double random_double(const RandomStream& random, uint64_t index) {
  double value = 0;
  const uint64_t bits = random.bits64(index);
  std::memcpy(&value, &bits, sizeof value);
  return std::isfinite(value) ? value : 0.1;
}

Example random_example(uint64_t seed) {
  const RandomStream random(seed, "print");
  uint64_t draw = 0;
  Example out;
  out.model.layers = 1 + static_cast<int64_t>(random.below(draw++, INT64_MAX));
  if (random.below(draw++, 2)) out.model.hidden.value = 1 + static_cast<int64_t>(random.below(draw++, 100));
  out.model.tied = random.below(draw++, 2) == 0;
  out.model.name = random_text(random, draw);
  out.lr = std::abs(random_double(random, draw++)) + 1e-320;
  out.dropout = random.uniform(draw++);
  out.sizes.resize(random.below(draw++, 3), INT64_MAX);
  out.betas.resize(random.below(draw++, 3), random.uniform(99));
  for (uint64_t i = random.below(draw++, 4); i > 0; i--) out.files.push_back(random_text(random, draw));
  out.sources.resize(random.below(draw++, 3));
  for (auto& source : out.sources) {
    source.path = random_text(random, draw);
    source.weight = random.uniform(draw++);
    for (uint64_t i = random.below(draw++, 3); i > 0; i--) source.tags.push_back(random_text(random, draw));
  }
  if (random.below(draw++, 2)) {
    auto options = std::make_shared<HashOptions>();
    options->seed = static_cast<int64_t>(random.bits64(draw++));
    options->scale = random_double(random, draw++);
    out.model.moe.router = {"hash", options};
  }
  return out;
}

}  // namespace

TEST(PrintFields, WritesEveryFieldAsYaml) {
  Example example =
      parsed("model: {name: 'a b', moe: {router: hash}}\nsources: [{path: x, tags: [p, '1']}, {}]\n");
  EXPECT_EQ(
      print_fields(example.visitor()),
      "model:\n  layers: 4\n  hidden: auto\n  tied: true\n  name: \"a b\"\n  moe:\n    router:\n      kind: "
      "hash\n"
      "      seed: 1\n      scale: 3\n    num_experts: 8\nlr: 1e-4\ndropout: 0\nsizes: [1, 2]\nbetas: [0.9, "
      "0.95]\n"
      "files: []\nsources:\n  - path: x\n    weight: 1\n    tags: [p, \"1\"]\n  - path: \"\"\n    weight: 1\n"
      "    tags: []\n");
}

TEST(PrintFields, ShowsTheOriginOfEachValueInOneColumn) {
  ConfigErrors errors;
  ConfigNode root = load_yaml_text("model: {moe: {router: hash}}\nsources:\n- path: x\n", "exp.yaml", errors);
  apply_override(root, "lr=2", errors);
  Example example;
  parse_fields(root, "", example.visitor(), errors);
  ASSERT_TRUE(errors.empty());
  EXPECT_EQ(print_fields(example.visitor(), &root),
            "model:\n"
            "  layers: 4         # default\n"
            "  hidden: auto      # default\n"
            "  tied: true        # default\n"
            "  name: base        # default\n"
            "  moe:\n"
            "    router:\n"
            "      kind: hash    # exp.yaml:1:23\n"
            "      seed: 1       # default\n"
            "      scale: 3      # default\n"
            "    num_experts: 8  # default\n"
            "lr: 2               # command line\n"
            "dropout: 0          # default\n"
            "sizes: [1, 2]       # default\n"
            "betas: [0.9, 0.95]  # default\n"
            "files: []           # default\n"
            "sources:\n"
            "  - path: x         # exp.yaml:3:9\n"
            "    weight: 1       # default\n"
            "    tags: []        # default\n");
}

TEST(PrintFields, ReadsBackToTheSameConfig) {
  for (uint64_t seed = 0; seed < 500; seed++) {
    Example written = random_example(seed);
    const ConfigNode no_origins;
    const std::string text = print_fields(written.visitor());
    Example read = parsed(text);
    EXPECT_EQ(print_fields(read.visitor()), text);
    EXPECT_EQ(read.model.layers, written.model.layers);
    EXPECT_EQ(read.model.hidden.value, written.model.hidden.value);
    EXPECT_EQ(read.model.name, written.model.name) << text;
    EXPECT_EQ(read.lr, written.lr);
    EXPECT_EQ(read.dropout, written.dropout);
    EXPECT_EQ(read.sizes, written.sizes);
    EXPECT_EQ(read.betas, written.betas);
    EXPECT_EQ(read.files, written.files) << text;
    ASSERT_EQ(read.sources.size(), written.sources.size());
    for (size_t i = 0; i < read.sources.size(); i++) {
      EXPECT_EQ(read.sources[i].path, written.sources[i].path) << text;
      EXPECT_EQ(read.sources[i].tags, written.sources[i].tags) << text;
    }
    if (written.model.moe.router.kind == "hash") {
      const auto& options = dynamic_cast<HashOptions&>(*read.model.moe.router.options);
      EXPECT_EQ(options.seed, dynamic_cast<HashOptions&>(*written.model.moe.router.options).seed);
      EXPECT_EQ(options.scale, dynamic_cast<HashOptions&>(*written.model.moe.router.options).scale);
    }
    // Comments with origins are only comments.
    EXPECT_EQ(print_fields(parsed(print_fields(written.visitor(), &no_origins)).visitor()), text);
  }
}

TEST(PrintFields, WritesEmptySectionsAndChoicesWithoutAKind) {
  struct Empty {
    void fields(FieldVisitor&) {}
  };
  struct Outer {
    Empty none;
    std::vector<Empty> items{2};
    Choice router;
    void fields(FieldVisitor& v) {
      v("none", none, "nothing");
      v("items", items, "nothing, twice");
      v.choice("router", router, GadgetRegistry::instance(), "no default");
    }
  } outer;
  const auto visit = [&](FieldVisitor& v) { outer.fields(v); };
  const std::string text = print_fields(visit);
  EXPECT_EQ(text, "none: {}\nitems:\n  - {}\n  - {}\nrouter: null\n");
  ConfigErrors errors;
  outer.items.clear();
  parse_fields(load_yaml_text(text, "exp.yaml", errors), "", visit, errors);
  EXPECT_EQ(join(errors.messages(), "\n"),
            "config router (exp.yaml:5:9): expected kind: one of hash | top_k");
  EXPECT_EQ(outer.items.size(), 2U);
  EXPECT_NE(explain_field(visit, "router").find("router: choice\n"), std::string::npos);
  EXPECT_NE(schema_of(visit).find("\"required\""), std::string::npos);
}

TEST(FormatNumber, IsTheShortestTextThatReadsBack) {
  for (const auto& [value, text] :
       std::vector<std::pair<double, std::string>>{{0, "0"},
                                                   {-0.0, "-0"},
                                                   {1, "1"},
                                                   {0.1, "0.1"},
                                                   {1e-5, "1e-5"},
                                                   {1e-4, "1e-4"},
                                                   {1e5, "1e5"},
                                                   {1e22, "1e22"},
                                                   {1e-300, "1e-300"},
                                                   {123456, "123456"},
                                                   {-2.5, "-2.5"},
                                                   {1.0 / 3, "0.3333333333333333"}}) {
    EXPECT_EQ(format_number(value), text);
  }
  const RandomStream random(7, "doubles");
  for (uint64_t i = 0; i < 2000; i++) {
    const double value = random_double(random, i);
    double read = 0;
    ASSERT_EQ(parse_number(format_number(value), read), NumberResult::ok) << format_number(value);
    EXPECT_EQ(read, value);
  }
}

TEST(QuoteIfNeeded, QuotesWhatWouldReadAsSomethingElse) {
  for (const char* text : {"abc", "a.b/c-d_1", "top_k", "1a", "truely"})
    EXPECT_EQ(quote_if_needed(text), text);
  for (const char* text :
       {"", "1", "1e5", "0x1", "true", "null", "~", "yes", "off", ".inf", "-a", "a b", "a:", "a,b"}) {
    EXPECT_EQ(quote_if_needed(text), str('"', text, '"'));
  }
  EXPECT_EQ(quote_if_needed("a\n\"\\$\x01"), "\"a\\n\\\"\\\\$$\\x01\"");
}

TEST(Constraint, ReadsAsOnePhrase) {
  EXPECT_EQ(Constraint{}.text(), "");
  EXPECT_EQ(at_least(0).text(), ">= 0");
  EXPECT_EQ(greater_than(0.5).text(), "> 0.5");
  EXPECT_EQ(in_range(1, 8).text(), "1..8");
  EXPECT_EQ(one_of({"a", "b"}).text(), "one of a | b");
  Constraint half_open = in_range(0, 1);
  half_open.exclusive_min = true;
  EXPECT_EQ(half_open.text(), "> 0 and <= 1");
  half_open.min.reset();
  EXPECT_EQ(half_open.text(), "<= 1");
}

}  // namespace shoal::test
