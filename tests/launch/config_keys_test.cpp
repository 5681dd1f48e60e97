// Every key of the experiment schema against wrong types, values out of range, typos, repetitions and its
// absence. Every refusal is one message with file, line, column and key.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "core/base/config_scalar.h"
#include "tests/launch/every_key.h"

namespace shoal::testing {
namespace {

bool is_number(const FieldInfo& info) {
  return info.type == FieldType::integer || info.type == FieldType::auto_integer ||
         info.type == FieldType::number;
}

/// YAML of values that the key must refuse, by its type alone.
std::vector<std::string> wrong_types(const FieldInfo& info) {
  switch (info.type) {
    case FieldType::boolean:
      return {"maybe", "1", "0.5", "'true'", "yes", "[true]", "{a: true}", "null", "''"};
    case FieldType::auto_integer:
    case FieldType::integer:
      return {"many",
              "'3'",
              "''",
              "[3]",
              "{a: 3}",
              "null",
              "1.5",
              "1e400",
              "-1e400",
              ".nan",
              ".inf",
              "nan",
              "0x",
              "true",
              "1_000",
              "1,000",
              "Auto",
              "-.inf",
              "99999999999999999999"};
    case FieldType::number:
      return {"fast", "'0.5'", "''",    "[0.5]",  "{a: 1}", "null", ".nan", ".inf", "-.inf",
              "nan",  "inf",   "1e400", "-1e400", "1,5",    "--1",  "1e",   "true", "1..2"};
    case FieldType::text: {
      std::vector<std::string> values = {"[a]", "{a: b}", "null"};
      if (!info.constraint.choices.empty()) values.insert(values.end(), {"7", "nonsense", "''", "true"});
      if (info.constraint.no_empty_text) values.emplace_back("''");
      return values;
    }
    case FieldType::section:
      return {"5", "words", "'x'", "true", "[1]", "[a, b]"};
    case FieldType::section_list:
      return {"5", "words", "{a: b}", "null", "[5]", "[[a]]", "[words]"};
    case FieldType::choice:
      return {"no_such_kind",         "7",           "''",           "[a]",
              "{kind: no_such_kind}", "{kind: [a]}", "{kind: null}", "{kind: 7}"};
  }
  return {};
}

/// Values just outside and far outside the range.
std::vector<std::string> out_of_range(const FieldInfo& info) {
  std::vector<std::string> values;
  if (!is_number(info)) return values;
  const Constraint& c = info.constraint;
  const bool integer = info.type != FieldType::number;
  if (c.min) {
    if (c.exclusive_min) values.push_back(format_number(*c.min));
    const double below = integer ? *c.min - 1 : *c.min - std::max(1.0, std::abs(*c.min));
    values.push_back(format_number(below));
    values.emplace_back(integer ? "-9223372036854775808" : "-1e308");
    if (*c.min > 0) values.emplace_back("0");
  }
  if (c.max) {
    values.push_back(format_number(integer ? *c.max + 1 : *c.max * 1.0000001));
    values.emplace_back(integer ? "9223372036854775807" : "1e308");
  }
  return values;
}

std::vector<std::string> bad_values(const FieldInfo& info) {
  std::vector<std::string> values = wrong_types(info);
  const std::vector<std::string> more = out_of_range(info);
  values.insert(values.end(), more.begin(), more.end());
  if (!info.is_list) return values;
  // A list: the same as items, and as a list of one without its brackets where that is no list itself.
  std::vector<std::string> lists = {"{a: b}", "null"};
  for (const std::string& value : values) {
    if (value.find(',') == std::string::npos) lists.push_back("[" + value + "]");
    if (value[0] != '[' && value[0] != '{' && value != "null") lists.push_back(value);
  }
  return lists;
}

/// Whether a message is about `path`, or what is directly below it, at the place of the watched value.
bool is_about(const std::string& message, const std::string& path, const YamlTree& tree) {
  const std::string start = "config " + path;
  if (!message.starts_with(start)) return false;
  std::string_view rest = std::string_view(message).substr(start.size());
  const bool below = rest.starts_with(".kind (") || rest.starts_with(".0 (");
  rest.remove_prefix(std::min(rest.size(), below ? rest.find(' ') : 0));
  const std::string line = str(" (exp.yaml:", tree.line(), ":");
  if (!rest.starts_with(line)) return false;
  const int column = std::atoi(std::string(rest.substr(line.size())).c_str());
  // Of an item or a kind: within the value.
  return below ? column > tree.column() : column == tree.column();
}

TEST(ConfigKeys, SchemaIsWalkedWithTheOptionsOfEveryKind) {
  const std::vector<SchemaKey> keys = every_key();
  const auto has = [&](const std::string& path, const std::string& kind) {
    return std::ranges::any_of(keys, [&](const SchemaKey& key) {
      return key.path == path && (kind.empty() || (!key.kinds.empty() && key.kinds.back().second == kind));
    });
  };
  EXPECT_GT(keys.size(), 100U);
  EXPECT_TRUE(has("run.steps", ""));
  EXPECT_TRUE(has("data.sources.0.weight", ""));
  EXPECT_TRUE(has("model.moe.router.bias_rate", "top_k"));
  EXPECT_TRUE(has("model.moe.router.seed", "hash"));
  EXPECT_TRUE(has("model.position.theta", "rope"));
  EXPECT_TRUE(has("data.tokenizer.path", "file"));
  EXPECT_TRUE(has("optim.optimizer.beta1", "lion"));
  EXPECT_TRUE(has("optim.schedule.decay_share", "wsd"));
}

TEST(ConfigKeys, EveryNumberHasARange) {
  for (const SchemaKey& key : every_key()) {
    if (!is_number(key.info)) continue;
    EXPECT_TRUE(key.info.constraint.min.has_value()) << key.path;
    // A seed is any number that is not negative.
    if (key.info.key == "seed") continue;
    EXPECT_TRUE(key.info.constraint.max.has_value()) << key.path;
  }
}

TEST(ConfigKeys, WrongTypesAndValuesOutOfRangeAreOneMessageWithTheirPlace) {
  for (const SchemaKey& key : every_key()) {
    for (const std::string& value : bad_values(key.info)) {
      YamlTree tree = key.tree();
      if (key.path.starts_with("data.sources.")) tree.set("data.text", "[]");
      tree.set(key.path, value, true);
      const std::string text = tree.text();
      const Loaded loaded = load(text);
      ASSERT_EQ(loaded.problems.size(), 1U) << key.path << ": " << value << "\n"
                                            << text << join(loaded.problems, "\n") << loaded.yaml;
      EXPECT_TRUE(is_about(loaded.problems[0], key.path, tree)) << text << "\n" << loaded.problems[0];
      EXPECT_TRUE(loaded.problems[0].find("expected") != std::string::npos ||
                  loaded.problems[0].find("; registered: ") != std::string::npos)
          << loaded.problems[0];
    }
  }
}

TEST(ConfigKeys, AllProblemsOfAFileAreReportedAtOnce) {
  YamlTree tree;
  std::vector<std::string> paths;
  for (const SchemaKey& key : every_key()) {
    const bool default_kinds = std::ranges::all_of(key.kinds, [](const auto& kind) {
      return kind.second == "transformer" || kind.second == "top_k" || kind.second == "adamw" ||
             kind.second == "cosine" || kind.second == "rope" || kind.second == "bpe" ||
             kind.second == "swiglu" || kind.second == "all_to_all";
    });
    if (!key.is_scalar() || !default_kinds) continue;
    tree.set(key.path, "{no: no}");
    paths.push_back(key.path);
  }
  ConfigErrors errors;
  const ConfigNode node = load_yaml_text(tree.text(), "exp.yaml", errors);
  TrainConfig config;
  config.model.options = ModelRegistry::instance().make_options(config.model.kind);
  parse_fields(
      node, "", [&](FieldVisitor& v) { config.fields(v); }, errors);
  EXPECT_EQ(errors.messages().size(), paths.size());
  EXPECT_GT(paths.size(), 70U);
  for (const std::string& path : paths) {
    EXPECT_TRUE(std::ranges::any_of(errors.messages(), [&](const std::string& message) {
      return message.starts_with("config " + path + " (exp.yaml:");
    })) << path;
  }
  const Loaded loaded = load(tree.text());
  EXPECT_GE(loaded.problems.size(), 50U);
  EXPECT_NE(loaded.problems.back().find("more"), std::string::npos) << loaded.problems.back();
}

/// What a tired hand makes of a key.
std::vector<std::string> typos(const std::string& key) {
  std::vector<std::string> out = {key + key.back()};
  if (key.size() < 4) return out;
  const size_t middle = key.size() / 2;
  std::string swapped = key, dashed = key, upper = key;
  if (key[middle] != key[middle - 1]) std::swap(swapped[middle], swapped[middle - 1]);
  std::ranges::replace(dashed, '_', '-');
  upper[0] = static_cast<char>(std::toupper(upper[0]));
  std::string dropped = key;
  dropped.erase(middle, 1);
  std::string doubled = key;
  doubled.insert(middle, 1, key[middle]);
  for (const std::string& typo : {swapped, dashed, upper, dropped, doubled}) {
    if (typo != key) out.push_back(typo);
  }
  return out;
}

TEST(ConfigKeys, ATypoOfEveryKeyIsRefusedWithTheKeyAsSuggestion) {
  for (const SchemaKey& key : every_key()) {
    const std::string above = key.path.substr(0, key.path.size() - key.info.key.size());
    for (const std::string& typo : typos(key.info.key)) {
      YamlTree tree = key.tree();
      if (above == "data.sources.0.") tree.set("data.text", "[]");
      tree.set(above + typo, "1");
      const Loaded loaded = load(tree.text());
      ASSERT_EQ(loaded.problems.size(), 1U) << tree.text() << join(loaded.problems, "\n");
      EXPECT_TRUE(loaded.problems[0].starts_with(str("config ", above, typo, " (exp.yaml:")))
          << loaded.problems[0];
      EXPECT_NE(loaded.problems[0].find(str("unknown key, did you mean '", key.info.key, "'?")),
                std::string::npos)
          << loaded.problems[0];
    }
  }
}

TEST(ConfigKeys, EveryKeyWrittenTwiceIsRefusedWithBothPlaces) {
  for (const SchemaKey& key : every_key()) {
    YamlTree tree = key.tree();
    if (key.path.starts_with("data.sources")) tree.remove("data");
    tree.set(key.path, "1", true);
    std::string text = tree.text();
    // The line of the key once more below itself.
    size_t begin = 0;
    for (int line = 1; line < tree.line(); line++) begin = text.find('\n', begin) + 1;
    std::string again = text.substr(begin, text.find('\n', begin) + 1 - begin);
    if (const size_t dash = again.find("- "); dash != std::string::npos) again[dash] = ' ';
    text.insert(text.find('\n', begin) + 1, again);
    const Loaded loaded = load(text);
    const std::string wanted = str("config ", key.path, " (exp.yaml:", tree.line() + 1, ":");
    const auto found = std::ranges::find_if(
        loaded.problems, [&](const std::string& problem) { return problem.starts_with(wanted); });
    ASSERT_NE(found, loaded.problems.end()) << text << join(loaded.problems, "\n");
    EXPECT_NE(found->find(str("duplicate key; first at exp.yaml:", tree.line(), ":")), std::string::npos)
        << *found;
  }
}

TEST(ConfigKeys, AMissingKeyHasItsDefaultAndARequiredOneIsNamed) {
  for (const SchemaKey& key : every_key()) {
    YamlTree tree = key.tree();
    if (key.path.starts_with("data.sources.")) tree.set("data.text", "[]");
    if (key.is_required()) {
      if (key.path.starts_with("data.sources.")) tree.set("data.sources", "[{}]");
      const Loaded loaded = load(tree.text());
      ASSERT_EQ(loaded.problems.size(), 1U) << tree.text() << join(loaded.problems, "\n");
      EXPECT_TRUE(loaded.problems[0].starts_with("config " + key.path + " (exp.yaml:")) << loaded.problems[0];
      continue;
    }
    const Loaded loaded = load(tree.text());
    ASSERT_TRUE(loaded.problems.empty()) << tree.text() << join(loaded.problems, "\n");
    if (!key.is_scalar() || key.path == "data.text") continue;
    // The default, written out, is the same config; these two follow from other keys.
    if (key.path == "run.name" || key.path == "data.prepared") continue;
    tree.set(key.path, key.info.default_text());
    const Loaded written = load(tree.text());
    EXPECT_EQ(written.problems, std::vector<std::string>()) << tree.text();
    EXPECT_EQ(written.yaml, loaded.yaml) << tree.text();
  }
}

TEST(ConfigKeys, TheEdgesOfARangeAreTakenAsTheyAreOrRefusedByARuleWithItsPlace) {
  int taken = 0, refused = 0;
  for (const SchemaKey& key : every_key()) {
    if (!is_number(key.info)) continue;
    const Constraint& c = key.info.constraint;
    std::vector<std::string> edges;
    if (c.min && !c.exclusive_min) edges.push_back(format_number(*c.min));
    if (c.max) edges.push_back(format_number(*c.max));
    if (!c.max) edges.emplace_back("9223372036854775807");
    for (const std::string& edge : edges) {
      YamlTree tree = key.tree();
      if (key.path.starts_with("data.sources.")) tree.set("data.text", "[]");
      tree.set(key.path, key.info.is_list ? "[" + edge + "]" : edge);
      const Loaded loaded = load(tree.text());
      for (const std::string& problem : loaded.problems) {
        EXPECT_TRUE(problem.starts_with("config ")) << problem;
        EXPECT_NE(problem.find(" (exp.yaml:"), std::string::npos) << problem;
      }
      refused += loaded.problems.empty() ? 0 : 1;
      if (!loaded.problems.empty()) continue;
      taken++;
      const Loaded again = load(loaded.yaml);
      EXPECT_EQ(again.yaml, loaded.yaml) << join(again.problems, "\n");
    }
  }
  EXPECT_GT(taken, 60);
  EXPECT_GT(refused, 5);
}

}  // namespace
}  // namespace shoal::testing
