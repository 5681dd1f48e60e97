#include "tests/core/base/config_example.h"

#include <gtest/gtest.h>

#include "core/base/text.h"

namespace shoal::test {

namespace {

struct Named final : Gadget {
  explicit Named(std::string name) : name_(std::move(name)) {}
  std::string name() const override { return name_; }
  std::string name_;
};

const bool kTopKRegistered =
    GadgetRegistry::add<TopKOptions>("top_k", "best k experts", [](const TopKOptions& options, int number) {
      return std::make_unique<Named>(str("top_k ", options.top_k, " of ", number));
    });
const bool kHashRegistered = GadgetRegistry::add<HashOptions>(
    "hash", "experts by token id",
    [](const HashOptions& options, int) { return std::make_unique<Named>(str("hash ", options.seed)); });

}  // namespace

std::vector<std::string> problems_of(const ConfigNode& node, Example& example) {
  ConfigErrors errors;
  parse_fields(node, "", example.visitor(), errors);
  return errors.messages();
}

std::vector<std::string> problems_of(const std::string& text, Example& example) {
  ConfigErrors errors;
  const ConfigNode node = load_yaml_text(text, "exp.yaml", errors);
  parse_fields(node, "", example.visitor(), errors);
  return errors.messages();
}

std::string problem_of(const std::string& text) {
  Example example;
  const auto problems = problems_of(text, example);
  EXPECT_EQ(problems.size(), 1U) << text << "\n" << join(problems, "\n");
  return problems.empty() ? "" : problems.front();
}

bool names_place(const std::string& message) {
  const std::string file = "(exp.yaml:";
  size_t at = message.find(file);
  if (!message.starts_with("config ") || at == std::string::npos) return false;
  at += file.size();
  for (const char* after : {":", "): "}) {
    const size_t end = message.find_first_not_of("0123456789", at);
    if (end == std::string::npos || end == at || message[at] == '0') return false;
    if (message.compare(end, std::string(after).size(), after) != 0) return false;
    at = end + std::string(after).size();
  }
  return at < message.size();
}

Example parsed(const std::string& text) {
  Example example;
  const auto problems = problems_of(text, example);
  EXPECT_EQ(problems.size(), 0U) << text << "\n" << join(problems, "\n");
  return example;
}

TEST(ConfigExample, RegistersBothKinds) {
  EXPECT_TRUE(kTopKRegistered && kHashRegistered);
  EXPECT_EQ(GadgetRegistry::instance().names(), (std::vector<std::string>{"hash", "top_k"}));
}

TEST(ConfigExample, TellsMessagesWithAPlaceFromOthers) {
  EXPECT_TRUE(names_place("config a.b (exp.yaml:3:14): wrong"));
  EXPECT_TRUE(names_place("config (exp.yaml:1:1): wrong"));
  for (const char* text : {"config a (exp.yaml:0:1): x", "config a (exp.yaml:1): x", "config a (exp.yaml): x",
                           "config a (exp.yaml:1:): x", "a (exp.yaml:1:1): x", "config a (exp.yaml:1:1): "}) {
    EXPECT_FALSE(names_place(text)) << text;
  }
}

}  // namespace shoal::test
