// Overrides of the command line on the experiment schema.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/launch/every_key.h"

namespace shoal::testing {
namespace {

const char* const kBase = "run: {steps: 5}\ndata: {text: [text.txt]}\n";

std::string problem_with(const std::vector<std::string>& overrides, const std::string& text = kBase) {
  const Loaded loaded = load(text, overrides);
  EXPECT_EQ(loaded.problems.size(), 1U) << join(overrides, " ") << "\n" << join(loaded.problems, "\n");
  return loaded.problems.empty() ? "(no problem)" : loaded.problems.front();
}

bool has_line(const std::string& yaml, const std::string& line) {
  return ("\n" + yaml).find("\n" + line + "\n") != std::string::npos;
}

TEST(ConfigOverride, WrongTypesOfEveryKeyNameTheCommandLineAndTheKey) {
  for (const SchemaKey& key : every_key()) {
    if (!key.is_scalar()) continue;
    YamlTree tree = key.tree();
    if (key.path.starts_with("data.sources.")) tree.set("data.text", "[]");
    if (key.path.starts_with("data.sources.")) tree.set("data.sources.0.path", "p");
    const std::string wrong = key.info.is_list ? "{a: b}" : "[a]";
    for (const std::string& override : {key.path + "=" + wrong, "--" + key.path + "=" + wrong}) {
      const std::string problem = problem_with({override}, tree.text());
      EXPECT_TRUE(problem.starts_with("config " + key.path + " (command line): expected")) << problem;
    }
  }
}

TEST(ConfigOverride, EveryDefaultCanBeGivenAsItIsPrinted) {
  for (const SchemaKey& key : every_key()) {
    if (!key.is_scalar() || key.is_required() || key.path.starts_with("data.sources")) continue;
    if (key.path == "run.name" || key.path == "data.text" || key.path == "data.prepared") continue;
    YamlTree tree = key.tree();
    const std::string text = tree.text();
    const Loaded plain = load(text), overridden = load(text, {key.path + "=" + key.info.default_text()});
    EXPECT_EQ(overridden.problems, std::vector<std::string>()) << key.path;
    EXPECT_EQ(overridden.yaml, plain.yaml) << key.path;
  }
}

TEST(ConfigOverride, BrokenOnesSayWhatIsExpected) {
  for (const auto& [override, problem] : std::vector<std::pair<std::string, std::string>>{
           {"run.steps",
            "config (command line): expected key=value, got 'run.steps'; write model.layers=4, say"},
           {"", "config (command line): expected key=value, got ''; write model.layers=4, say"},
           {"=5",
            "config (command line): expected a dotted key in front of '=', such as model.layers=4, got '=5'"},
           {"run..steps=5", "got 'run..steps=5'"},
           {".run=5", "got '.run=5'"},
           {"run.=5", "got 'run.=5'"},
           {"run.stepz=5", "config run.stepz (command line): unknown key, did you mean 'steps'?"},
           {"rum.steps=5", "config rum (command line): unknown key, did you mean 'run'?"},
           {"steps=5", "config steps (command line): unknown key; 'steps' belongs to run"},
           {"run.steps=", "config run.steps (command line): expected an integer"},
           {"run.steps=''", "config run.steps (command line): expected an integer"},
           {"run.steps='7'", "got the string '7'; remove the quotes"},
           {"run.steps=7 # of 9", ""},
           {"run.steps= 7 ", ""},
           {"run.steps=7=8", "config run.steps (command line): expected an integer"},
           {"run.steps=\xEF\xBC\x97", "config run.steps (command line): expected an integer"},
           {"run.steps.x=1", "config run.steps (command line): expected an integer (0..1e12), got a map"},
           {"run=5", "config run (command line): expected a section (a map), got 5"},
           {"run=[1]", "config run (command line): expected a section (a map), got a list of 1"},
           {"run={steps: 7", "is a ] or } missing?"},
           {"run.name=\"a", "config run.name (command line): not valid YAML"},
           {"run.name=a/b", "config run.name (command line): expected a plain folder name"},
           {"run.name=\"a\\nb\"", "config run.name (command line): expected a plain folder name"},
           {"run.name=\xFF", "invalid UTF-8"},
           {"run.\xFF=1", "expected a dotted key"},
           {"run.steps=&a 7", "anchors"},
           {"run.steps=!!int 7", "tags"},
           {"run.steps=*a", "config run.steps (command line): "},
           {"run.steps=7\n---\n8", "one YAML document"},
           {"data.text.3=x", "expected an index of the list 'data.text', which has 1 items, got '3'"},
           {"data.text.-1=x", "expected an index of the list"},
           {"data.text.18446744073709551617=x", "expected an index of the list"},
           {"model.moe.router=topk",
            "config model.moe.router (command line): unknown kind 'topk', did you mean "
            "'top_k'?"}}) {
    const Loaded loaded = load(kBase, {override});
    if (problem.empty()) {
      EXPECT_TRUE(loaded.problems.empty()) << override << join(loaded.problems, "\n");
      EXPECT_TRUE(has_line(loaded.yaml, "  steps: 7")) << override << "\n" << loaded.yaml;
      continue;
    }
    ASSERT_EQ(loaded.problems.size(), 1U) << override << "\n" << join(loaded.problems, "\n");
    EXPECT_NE(loaded.problems[0].find(problem), std::string::npos) << loaded.problems[0];
    EXPECT_NE(loaded.problems[0].find("(command line)"), std::string::npos) << loaded.problems[0];
  }
}

TEST(ConfigOverride, TheLastOneHoldsAndMapsAreMerged) {
  const Loaded loaded = load(
      kBase, {"run.steps=6", "run={seed: 3, log_every: 4}", "run.steps=8", "run.name=\xC3\xA9t\xC3\xA9"});
  ASSERT_TRUE(loaded.problems.empty()) << join(loaded.problems, "\n");
  for (const char* line : {"  steps: 8", "  seed: 3", "  log_every: 4", "  name: \"\xC3\xA9t\xC3\xA9\""})
    EXPECT_TRUE(has_line(loaded.yaml, line)) << line << "\n" << loaded.yaml;
}

TEST(ConfigOverride, ManyBrokenOnesAreReportedTogetherWithTheFile) {
  const Loaded loaded = load("run: {steps: many}\ndata: {text: [text.txt]}\n",
                             {"run.seed=-1", "nothing", "model.layer=3", "optim.learning_rate=-1"});
  EXPECT_EQ(loaded.problems.size(), 5U) << join(loaded.problems, "\n");
}

TEST(ConfigOverride, AScalarIsAListOfOne) {
  const Loaded loaded = load("data: {text: a b.txt, extensions: .txt}\n", {});
  ASSERT_TRUE(loaded.problems.empty()) << join(loaded.problems, "\n");
  EXPECT_TRUE(has_line(loaded.yaml, "  text: [\"a b.txt\"]")) << loaded.yaml;
  const Loaded overridden = load(kBase, {"data.text=my.txt", "model.moe={num_experts: 4, layers: 1}"});
  ASSERT_TRUE(overridden.problems.empty()) << join(overridden.problems, "\n");
  EXPECT_TRUE(has_line(overridden.yaml, "  text: [my.txt]")) << overridden.yaml;
  EXPECT_TRUE(has_line(overridden.yaml, "    layers: [1]")) << overridden.yaml;
}

TEST(ConfigOverride, AnUnsetVariableIsOneProblemWhateverTheKeyTakes) {
  unsetenv("SHOAL_TEST_UNSET");
  for (const SchemaKey& key : every_key()) {
    YamlTree tree = key.tree();
    if (key.path.starts_with("data.sources.")) tree.set("data.text", "[]");
    tree.set(key.path, "${env:SHOAL_TEST_UNSET}", true);
    const Loaded loaded = load(tree.text());
    ASSERT_EQ(loaded.problems.size(), 1U) << tree.text() << join(loaded.problems, "\n");
    EXPECT_EQ(loaded.problems[0], str("config ", key.path, " (exp.yaml:", tree.line(), ":", tree.column(),
                                      "): environment variable SHOAL_TEST_UNSET is not set; set it or write "
                                      "${env:SHOAL_TEST_UNSET:-default}"));
  }
  EXPECT_EQ(load("data: {text: [\"${env:SHOAL_TEST_UNSET}\"]}").problems.size(), 1U);
  EXPECT_EQ(load("data: {sources: [\"${env:SHOAL_TEST_UNSET}\"]}").problems.size(), 1U);
  EXPECT_EQ(load("extends: \"${env:SHOAL_TEST_UNSET}\"\ndata: {text: t}").problems.size(), 1U);
}

TEST(ConfigOverride, OneUnsupportedPieceOfYamlIsOneProblem) {
  EXPECT_EQ(load("run: {steps: *a}\ndata: {text: t}").problems.size(), 1U);
  const Loaded merge = load("run:\n  <<: {seed: 3}\n  steps: 5\ndata: {text: t}");
  ASSERT_EQ(merge.problems.size(), 1U) << join(merge.problems, "\n");
  EXPECT_NE(merge.problems[0].find("run.<< (exp.yaml:2:3): merge keys (<<) are not supported"),
            std::string::npos)
      << merge.problems[0];
}

TEST(ConfigOverride, TokensThatOverflow64BitsAreRefused) {
  const std::string problem = problem_with({"run.steps=1e12", "data.global_batch=1e6", "data.seq_len=1e6"});
  EXPECT_TRUE(problem.starts_with("config run.steps (command line): steps x data.global_batch")) << problem;
}

TEST(ConfigOverride, OptionsThatContradictEachOtherAreRefused) {
  EXPECT_EQ(problem_with({"optim.optimizer={kind: sgd, momentum: 0, nesterov: true}"}),
            "config optim.optimizer (command line): nesterov without momentum changes nothing; set momentum");
  EXPECT_EQ(problem_with({"data.tokenizer={kind: bpe, special_tokens: [<a>, <a>]}"}),
            "config data.tokenizer (command line): special_tokens: '<a>' is listed twice");
}

}  // namespace
}  // namespace shoal::testing
