#include <gtest/gtest.h>

#include "core/base/text.h"
#include "tests/core/base/config_example.h"

namespace shoal::test {

namespace {

const TopKOptions& top_k_options(const Example& example) {
  return dynamic_cast<const TopKOptions&>(*example.model.moe.router.options);
}
const HashOptions& hash_options(const Example& example) {
  return dynamic_cast<const HashOptions&>(*example.model.moe.router.options);
}

}  // namespace

TEST(ParseFields, EmptyTextKeepsEveryDefault) {
  for (const char* text :
       {"", "\n", "# only a comment\n", "---\n", "{}", "model:\n", "model: ~\nsources: []\n"}) {
    const Example example = parsed(text);
    EXPECT_EQ(example.model.layers, 4) << text;
    EXPECT_EQ(example.sizes, (std::vector<int64_t>{1, 2})) << text;
    EXPECT_EQ(example.model.moe.router.kind, "top_k") << text;
    ASSERT_TRUE(example.model.moe.router.options) << text;
    EXPECT_EQ(top_k_options(example).top_k, 2) << text;
  }
}

TEST(ParseFields, FillsEveryFieldType) {
  const Example example = parsed(
      "model:\n  layers: 12\n  hidden: 256\n  tied: false\n  name: 'a: b'\n"
      "  moe: {num_experts: 16, router: {kind: top_k, top_k: 6, score: sigmoid}}\n"
      "lr: 3e-4\ndropout: .5\nsizes: [7, 0x10, 1e3]\nbetas: [0, 1]\nfiles:\n- a.txt\n- 'b, c'\n"
      "sources:\n  - path: x\n    weight: 2\n  - path: y\n    tags: [p, q]\n");
  EXPECT_EQ(example.model.layers, 12);
  EXPECT_EQ(example.model.hidden.value, 256);
  EXPECT_FALSE(example.model.tied);
  EXPECT_EQ(example.model.name, "a: b");
  EXPECT_EQ(example.model.moe.num_experts, 16);
  EXPECT_EQ(top_k_options(example).top_k, 6);
  EXPECT_EQ(top_k_options(example).score, "sigmoid");
  EXPECT_EQ(example.lr, 3e-4);
  EXPECT_EQ(example.dropout, 0.5);
  EXPECT_EQ(example.sizes, (std::vector<int64_t>{7, 16, 1000}));
  EXPECT_EQ(example.betas, (std::vector<double>{0, 1}));
  EXPECT_EQ(example.files, (std::vector<std::string>{"a.txt", "b, c"}));
  ASSERT_EQ(example.sources.size(), 2U);
  EXPECT_EQ(example.sources[0].weight, 2);
  EXPECT_EQ(example.sources[1].weight, 1);
  EXPECT_EQ(example.sources[1].tags, (std::vector<std::string>{"p", "q"}));
}

TEST(ParseFields, ReadsIntegersOfYaml12) {
  for (const auto& [text, value] :
       std::vector<std::pair<std::string, int64_t>>{{"1", 1},
                                                    {"+5", 5},
                                                    {"007", 7},
                                                    {"0x1F", 31},
                                                    {"0o17", 15},
                                                    {"1e6", 1000000},
                                                    {"2.0", 2},
                                                    {"1.5e1", 15},
                                                    {"120e-1", 12},
                                                    {"9223372036854775807", INT64_MAX},
                                                    {"9.223372036854775807e18", INT64_MAX}}) {
    EXPECT_EQ(parsed("model: {layers: " + text + "}").model.layers, value) << text;
  }
  EXPECT_EQ(parsed("model: {hidden: auto}").model.hidden.value, std::nullopt);
}

TEST(ParseFields, ReadsNumbersOfYaml12) {
  for (const auto& [text, value] :
       std::vector<std::pair<std::string, double>>{{"1e-4", 1e-4},
                                                   {"1e3", 1e3},
                                                   {"+5", 5},
                                                   {".5", 0.5},
                                                   {"5.", 5},
                                                   {"+.5e-1", 0.05},
                                                   {"0x10", 16},
                                                   {"1E+2", 100},
                                                   {"0.1", 0.1},
                                                   {"1.7976931348623157e308", 1.7976931348623157e308},
                                                   {"5e-324", 5e-324}}) {
    EXPECT_EQ(parsed("lr: " + text).lr, value) << text;
  }
}

TEST(ParseFields, ReadsOnlyTrueAndFalseAsBooleans) {
  for (const char* text : {"true", "True", "TRUE"})
    EXPECT_TRUE(parsed(str("model: {tied: ", text, "}")).model.tied);
  for (const char* text : {"false", "False", "FALSE"}) {
    EXPECT_FALSE(parsed(str("model: {tied: ", text, "}")).model.tied);
  }
  for (const char* text : {"yes", "no", "on", "off", "tRUE", "1"}) {
    EXPECT_NE(problem_of(str("model: {tied: ", text, "}")).find("expected true or false, got "),
              std::string::npos);
  }
}

TEST(ParseFields, TakesAnyScalarAsText) {
  for (const char* text : {"007", "yes", "true", "1e-4", "x y", "https://a/b"}) {
    EXPECT_EQ(parsed(str("model:\n  name: ", text)).model.name, text);
  }
  EXPECT_EQ(parsed("model: {name: ''}").model.name, "");
}

TEST(ParseFields, NamesTheWrongTypeOfEveryFieldType) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"model: {layers: abc}", "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got 'abc'"},
      {"model: {layers: 1.5}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got 1.5, which has a fraction"},
      {"model: {layers: 1e19}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got 1e19, which does not fit in 64 "
       "bits"},
      {"model: {layers: 9223372036854775808}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got 9223372036854775808, which does "
       "not fit in "
       "64 bits"},
      {"model: {layers: '3'}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got the string '3'; remove the "
       "quotes"},
      {"model: {layers: }",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got nothing; remove the key to keep "
       "the default"},
      {"model: {layers: [1]}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got a list of 1"},
      {"model: {layers: {a: 1}}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got a map"},
      {"model: {layers: 1_000}",
       "config model.layers (exp.yaml:1:17): expected an integer (>= 1), got '1_000'"},
      {"model: {hidden: big}",
       "config model.hidden (exp.yaml:1:17): expected an integer or auto (>= 1), got 'big'"},
      {"model: {tied: yes}", "config model.tied (exp.yaml:1:15): expected true or false, got 'yes'"},
      {"model: {tied: \"true\"}",
       "config model.tied (exp.yaml:1:15): expected true or false, got the string 'true'; remove the quotes"},
      {"model: {name: [a]}", "config model.name (exp.yaml:1:15): expected text, got a list of 1"},
      {"model: {name: ~}",
       "config model.name (exp.yaml:1:15): expected text, got nothing; write '' for an empty text or remove "
       "the key to "
       "keep the default"},
      {"model: 5", "config model (exp.yaml:1:8): expected a section (a map), got 5"},
      {"lr: fast", "config lr (exp.yaml:1:5): expected a number (> 0), got 'fast'"},
      {"lr: .inf", "config lr (exp.yaml:1:5): expected a finite number (> 0), got .inf"},
      {"lr: .NaN", "config lr (exp.yaml:1:5): expected a finite number (> 0), got .NaN"},
      {"lr: 1e400", "config lr (exp.yaml:1:5): expected a number (> 0), got 1e400, which no double can hold"},
      {"sizes: x", "config sizes (exp.yaml:1:8): a list of integers: expected an integer (>= 0), got 'x'"},
      {"sizes: -5", "config sizes (exp.yaml:1:8): a list of integers: expected >= 0, got -5"},
      {"sizes: [1, x]", "config sizes.1 (exp.yaml:1:12): expected an integer (>= 0), got 'x'"},
      {"betas: ~",
       "config betas (exp.yaml:1:8): expected a list of numbers, got nothing; write [] for an empty list"},
      {"files: {a: b}", "config files (exp.yaml:1:8): expected a list of texts, got a map"},
      {"sources: {path: x}", "config sources (exp.yaml:1:10): expected a list of sections, got a map"},
      {"sources: [x]", "config sources.0 (exp.yaml:1:11): expected a section (a map), got 'x'"},
  };
  for (const auto& [text, problem] : cases) EXPECT_EQ(problem_of(text), problem);
}

TEST(ParseFields, CF_05_RefusesValuesOutsideTheirRange) {
  EXPECT_EQ(problem_of("model:\n  layers: 0\n"), "config model.layers (exp.yaml:2:11): expected >= 1, got 0");
  EXPECT_EQ(problem_of("lr: 0"), "config lr (exp.yaml:1:5): expected > 0, got 0");
  EXPECT_EQ(problem_of("dropout: 1.25"), "config dropout (exp.yaml:1:10): expected 0..1, got 1.25");
  EXPECT_EQ(problem_of("betas: [0.9, -1]"), "config betas.1 (exp.yaml:1:14): expected 0..1, got -1");
  EXPECT_EQ(problem_of("model: {hidden: -2}"), "config model.hidden (exp.yaml:1:17): expected >= 1, got -2");
  EXPECT_EQ(problem_of("model: {moe: {router: {score: sigmod}}}"),
            "config model.moe.router.score (exp.yaml:1:31): expected one of softmax | sigmoid, got 'sigmod', "
            "did you mean "
            "'sigmoid'?");
}

TEST(ParseFields, CF_01_SuggestsTheNearestKeyAndTheSectionThatHasIt) {
  EXPECT_EQ(problem_of("model:\n  moe:\n    router:\n      topk: 3\n"),
            "config model.moe.router.topk (exp.yaml:4:7): unknown key, did you mean 'top_k'?");
  EXPECT_EQ(
      problem_of("model:\n  top_k: 3\n"),
      "config model.top_k (exp.yaml:2:3): unknown key; 'top_k' belongs to model.moe.router (kind top_k)");
  EXPECT_EQ(problem_of("layers: 3\n"),
            "config layers (exp.yaml:1:1): unknown key; 'layers' belongs to model");
  EXPECT_EQ(problem_of("model: {moe: {zzzzzzzz: 1}}"),
            "config model.moe.zzzzzzzz (exp.yaml:1:15): unknown key; known keys: router, num_experts");
  EXPECT_EQ(problem_of("sources: [{path: a}, {wieght: 2}]"),
            "config sources.1.wieght (exp.yaml:1:23): unknown key, did you mean 'weight'?");
  EXPECT_EQ(problem_of("'': 1"), "config (exp.yaml:1:1): expected a plain key, got an empty one");
}

TEST(ParseFields, CollectsAllProblemsAndThrowsThemOnce) {
  ConfigErrors errors;
  Example example;
  const ConfigNode node =
      load_yaml_text("lr: x\nlr: 2\nmodel: {layers: 0, tied: 3}\nzzz: 1\n", "exp.yaml", errors);
  parse_fields(node, "", example.visitor(), errors);
  ASSERT_EQ(errors.messages().size(), 5U) << join(errors.messages(), "\n");
  try {
    errors.throw_if_any();
    FAIL() << "expected a UsageError";
  } catch (const UsageError& e) {
    const std::string text = e.what();
    EXPECT_EQ(text.substr(0, text.find('\n')), "5 problems in the config:");
    for (const auto& message : errors.messages()) EXPECT_NE(text.find("\n  " + message), std::string::npos);
  }
  EXPECT_NO_THROW(ConfigErrors().throw_if_any());
}

TEST(ParseFields, PrefixesPathsWithTheGivenOne) {
  ConfigErrors errors;
  Moe moe;
  const ConfigNode node = load_yaml_text("num_experts: 0\nx: 1\n", "exp.yaml", errors);
  parse_fields(
      node, "model.moe", [&](FieldVisitor& v) { moe.fields(v); }, errors);
  ASSERT_EQ(errors.messages().size(), 2U);
  EXPECT_EQ(errors.messages()[0], "config model.moe.num_experts (exp.yaml:1:14): expected 1..4096, got 0");
  EXPECT_EQ(errors.messages()[1],
            "config model.moe.x (exp.yaml:2:1): unknown key; known keys: router, num_experts");
}

TEST(ParseChoice, TakesAShortForm) {
  const Example example = parsed("model: {moe: {router: hash}}");
  EXPECT_EQ(example.model.moe.router.kind, "hash");
  EXPECT_EQ(hash_options(example).scale, 3.0);
}

TEST(ParseChoice, KeepsTheDefaultKindWhenNoneIsGiven) {
  EXPECT_EQ(top_k_options(parsed("model: {moe: {router: {top_k: 5}}}")).top_k, 5);
  EXPECT_EQ(parsed("model: {moe: {router: {}}}").model.moe.router.kind, "top_k");
}

TEST(ParseChoice, RP_09_ListsTheRegisteredKinds) {
  EXPECT_EQ(problem_of("model: {moe: {router: topk}}"),
            "config model.moe.router (exp.yaml:1:23): unknown kind 'topk', did you mean 'top_k'?; "
            "registered: hash | top_k");
  EXPECT_EQ(problem_of("model:\n  moe:\n    router:\n      kind: magic\n"),
            "config model.moe.router.kind (exp.yaml:4:13): unknown kind 'magic'; registered: hash | top_k");
  EXPECT_EQ(problem_of("model: {moe: {router: [hash]}}"),
            "config model.moe.router (exp.yaml:1:23): expected a kind or a map with kind, got a list of 1");
  EXPECT_EQ(problem_of("model: {moe: {router: {kind: [hash]}}}"),
            "config model.moe.router.kind (exp.yaml:1:30): expected one of hash | top_k, got a list of 1");
}

TEST(ParseChoice, RefusesOptionsOfAnotherKind) {
  EXPECT_EQ(
      problem_of("model: {moe: {router: {kind: hash, score: sigmoid}}}"),
      "config model.moe.router.score (exp.yaml:1:36): unknown key, did you mean 'scale'? ('score' belongs to "
      "model.moe.router (kind top_k))");
}

TEST(ParseChoice, ListsTheOptionsOfTheKindForAnUnknownOne) {
  EXPECT_EQ(
      problem_of("model: {moe: {router: {kind: hash, temperature: 1}}}"),
      "config model.moe.router.temperature (exp.yaml:1:36): unknown key; known keys: kind, seed, scale");
}

TEST(ParseChoice, DoesNotTouchTheOptionsOfACopiedConfig) {
  Example first = parsed("model: {moe: {router: {top_k: 5}}}");
  Example second = first;
  EXPECT_TRUE(problems_of("model: {moe: {router: {score: sigmoid}}}", second).empty());
  EXPECT_EQ(top_k_options(second).top_k, 5);
  EXPECT_EQ(top_k_options(second).score, "sigmoid");
  EXPECT_EQ(top_k_options(first).score, "softmax");
}

TEST(ParseChoice, ASecondParseStartsNewOptionsWhenTheKindChanges) {
  Example example = parsed("model: {moe: {router: {kind: hash, scale: 9}}}");
  EXPECT_TRUE(problems_of("model: {moe: {router: top_k}}", example).empty());
  EXPECT_EQ(top_k_options(example).scale, 1.0);
}

}  // namespace shoal::test
