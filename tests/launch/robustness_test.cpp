// Training runs under bad conditions: a folder in use, a full disk, diverging numbers, foreign rows in the
// metrics. Ranks are threads.
#include <functional>
#include <limits>

#include "launch/console.h"
#include "launch/trainer.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "(no error)";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

/// Puts a regular file where the run wants its folder of checkpoints: nothing can be written there, whoever
/// runs the test.
void block_checkpoints(const TinyRun& run) {
  const auto path = run.folder.path() / "tiny" / "checkpoints";
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << "in the way";
}

TEST(Robustness, SecondTrainingInTheSameFolderIsRefusedOnEveryRank) {
  TinyRun run;
  std::filesystem::create_directories(run.folder.path() / "tiny");
  {
    const auto lock = FileLock::try_lock((run.folder.path() / "tiny" / ".lock").string());
    ASSERT_NE(lock, nullptr);
    for (const int ranks : {1, 2}) {
      const std::string message = message_of([&] { run.train(ranks); });
      expect_contains(message, "another training runs in this folder");
      expect_contains(message, "run.name");
    }
  }
  EXPECT_EQ(run.train(1).end, TrainEnd::done);
}

TEST(Robustness, LastCheckpointThatCannotBeWrittenIsNoSuccess) {
  TinyRun run;
  TinyRun::Hooks hooks;
  hooks.before_run = [&] { block_checkpoints(run); };
  const RunOutcome outcome = run.train(2, {"run.steps=4"}, hooks);
  EXPECT_EQ(outcome.end, TrainEnd::not_saved);
  EXPECT_EQ(outcome.rows.size(), 5U) << "training itself goes on: 4 steps and an evaluation";
}

TEST(Robustness, TrainingThatHasNoFiniteGradientForLongEndsAsDiverged) {
  TinyRun run;
  const RunOutcome outcome = run.train(
      2,
      {"run.steps=400", "optim={learning_rate: 1e30, optimizer: sgd, clip_norm: 0}", "checkpoint.every=0"});
  EXPECT_EQ(outcome.end, TrainEnd::diverged);
  EXPECT_LT(outcome.rows.back()["step"], 120);
  EXPECT_EQ(outcome.rows.back()["skipped"], kMaxSkippedInARow);
  EXPECT_FALSE(std::filesystem::exists(run.checkpoint(outcome.rows.back()["step"])));
}

TEST(Robustness, ResultOfForeignMetricsRowsIsSaidToBeUnknown) {
  const TemporaryFolder folder;
  const auto file = folder / "metrics.jsonl";
  EXPECT_EQ(run_result(file), "");
  for (const char* row :
       {"{\"kind\":3}", "{\"kind\":\"step\"}", "{\"kind\":\"step\",\"step\":\"x\",\"tokens\":1}",
        "{\"kind\":\"step\",\"step\":8,\"tokens\":5,\"moe\":{\"a\":3}}",
        "{\"kind\":\"step\",\"step\":8,\"tokens\":5,\"moe\":[{\"layer\":0,\"counts\":[]}]}", "[1", ""}) {
    std::ofstream(file) << row << "\n";
    const std::string result = run_result(file);
    EXPECT_TRUE(result.empty() || result.starts_with("result     ")) << row << " gave " << result;
  }
  std::ofstream(file) << "{\"kind\":\"step\",\"step\":8,\"tokens\":5}\n{\"kind\":\"eval\"}\n";
  EXPECT_EQ(run_result(file), "result     step 8, 5 tokens");
}

TEST(Robustness, NotANumberIsPrintedWithoutSign) {
  StepMetrics m;
  m.loss = -std::numeric_limits<double>::quiet_NaN();
  m.grad_norm = m.loss;
  EXPECT_EQ(step_line(m, 0).find("-nan"), std::string::npos);
  EvalMetrics e;
  e.loss = m.loss;
  EXPECT_EQ(eval_line(e).find("-nan"), std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
