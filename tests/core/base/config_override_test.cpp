#include <gtest/gtest.h>

#include "core/base/text.h"
#include "tests/core/base/config_example.h"

namespace shoal::test {

namespace {

// The config of the text with the overrides on top; problems of either go to `problems`.
Example with_overrides(const std::string& text, const std::vector<std::string>& overrides,
                       std::vector<std::string>* problems = nullptr) {
  ConfigErrors errors;
  ConfigNode root = load_yaml_text(text, "exp.yaml", errors);
  for (const auto& override_text : overrides) apply_override(root, override_text, errors);
  Example example;
  parse_fields(root, "", example.visitor(), errors);
  if (problems) {
    *problems = errors.messages();
  } else {
    EXPECT_EQ(join(errors.messages(), "\n"), "");
  }
  return example;
}

std::string override_problem(const std::string& text, const std::string& assignment) {
  std::vector<std::string> problems;
  with_overrides(text, {assignment}, &problems);
  EXPECT_EQ(problems.size(), 1U) << join(problems, "\n");
  return problems.empty() ? "" : problems.front();
}

}  // namespace

TEST(Override, ReplacesAndCreatesKeys) {
  const Example example =
      with_overrides("model: {layers: 3}\n", {"model.layers=5", "--lr=2e-3", "model.moe.num_experts=16",
                                              "sizes=[4, 5, 6]", "files=[a, 'b c']", "model.name='x: y'"});
  EXPECT_EQ(example.model.layers, 5);
  EXPECT_EQ(example.lr, 2e-3);
  EXPECT_EQ(example.model.moe.num_experts, 16);
  EXPECT_EQ(example.sizes, (std::vector<int64_t>{4, 5, 6}));
  EXPECT_EQ(example.files, (std::vector<std::string>{"a", "b c"}));
  EXPECT_EQ(example.model.name, "x: y");
}

TEST(Override, WorksOnAnEmptyTree) {
  ConfigErrors errors;
  ConfigNode root;
  apply_override(root, "model.moe.router.top_k=3", errors);
  Example example;
  parse_fields(root, "", example.visitor(), errors);
  EXPECT_TRUE(errors.empty());
  EXPECT_EQ(dynamic_cast<TopKOptions&>(*example.model.moe.router.options).top_k, 3);
  EXPECT_EQ(origin_of(root, "model.moe.router.top_k").text(), "command line");
}

TEST(Override, MergesAMapIntoTheSection) {
  const Example example = with_overrides("model: {layers: 3}\n", {"model={tied: false}"});
  EXPECT_EQ(example.model.layers, 3);
  EXPECT_FALSE(example.model.tied);
}

TEST(Override, ReachesListItems) {
  const std::string text = "sources: [{path: a}, {path: b}]\nsizes: [1, 2]\n";
  const Example example = with_overrides(text, {"sources.1.path=c", "sizes.0=9"});
  EXPECT_EQ(example.sources[0].path, "a");
  EXPECT_EQ(example.sources[1].path, "c");
  EXPECT_EQ(example.sizes, (std::vector<int64_t>{9, 2}));
  EXPECT_EQ(
      override_problem(text, "sizes.2=1"),
      "config sizes.2 (command line): expected an index of the list 'sizes', which has 2 items, got '2'");
  EXPECT_EQ(override_problem(text, "sources.x.path=1"),
            "config sources.x.path (command line): expected an index of the list 'sources', which has 2 "
            "items, got 'x'");
}

TEST(Override, ANewKindDropsTheOptionsOfTheOld) {
  const std::string text = "model: {moe: {router: {kind: top_k, score: sigmoid, scale: 9}}}\n";
  for (const char* assignment :
       {"model.moe.router=hash", "model.moe.router.kind=hash", "model.moe.router={kind: hash}"}) {
    const Example example = with_overrides(text, {assignment});
    EXPECT_EQ(dynamic_cast<HashOptions&>(*example.model.moe.router.options).scale, 3.0) << assignment;
  }
  const Example example = with_overrides("model: {moe: {router: hash}}", {"model.moe.router.seed=4"});
  EXPECT_EQ(dynamic_cast<HashOptions&>(*example.model.moe.router.options).seed, 4);
}

TEST(Override, NamesTheCommandLineInProblems) {
  EXPECT_EQ(override_problem("", "model.layer=5"),
            "config model.layer (command line): unknown key, did you mean 'layers'?");
  EXPECT_EQ(override_problem("", "lr=fast"), "config lr (command line): expected a number (> 0), got 'fast'");
  EXPECT_EQ(override_problem("model: {layers: 1}", "model=5"),
            "config model (command line): expected a section (a map), got 5");
  EXPECT_EQ(override_problem("", "lr"),
            "config (command line): expected key=value, got 'lr'; write model.layers=4, say");
  for (const char* assignment : {"=5", "a..b=1", ".a=1", "a.=1", "--=1"}) {
    EXPECT_NE(override_problem("", assignment).find("expected a dotted key in front of '='"),
              std::string::npos);
  }
  EXPECT_EQ(
      override_problem("", "sizes=[1, 2"),
      "config sizes (command line): expected a plain key, got a list or map as a key; is a ] or } missing?");
  EXPECT_EQ(override_problem("", "model={tied: true, tied: true}"),
            "config model.tied (command line): duplicate key");
  EXPECT_NE(
      override_problem("", std::string(200, 'a') + "." + std::string(200, 'b') + "=1").find("unknown key"),
      std::string::npos);
  std::string deep = "a";
  for (int i = 0; i < 5000; i++) deep += ".a";
  EXPECT_NE(override_problem("", deep + "=1").find("expected a dotted key"), std::string::npos);
}

TEST(Override, ABrokenOneChangesNothing) {
  EXPECT_EQ(override_problem("lr: 2\n", "lr=").substr(0, 27), "config lr (command line): e");
  std::vector<std::string> problems;
  EXPECT_EQ(with_overrides("lr: 2\n", {"lr=[1"}, &problems).lr, 2);
  EXPECT_EQ(problems.size(), 1U);
}

}  // namespace shoal::test
