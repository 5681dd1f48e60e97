// Training runs under bad conditions: a folder in use, a full disk, diverging numbers, foreign rows in the
// metrics. Ranks are threads.
#include <functional>
#include <limits>

#include "core/base/threads.h"
#include "launch/console.h"
#include "launch/finite.h"
#include "launch/trainer.h"
#include "tests/support/error_of.h"
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

TEST(Robustness, ShortTrainingThatEndsWithoutAFiniteGradientIsNoSuccessAndKeepsTheOlderCheckpoints) {
  const char* keep = "checkpoint={every: 2, keep_last: 1}";
  TinyRun run;
  ASSERT_EQ(run.train(2, {"run.steps=4", keep}).end, TrainEnd::done);
  const RunOutcome outcome = run.train(2, {"run.steps=9", "optim.learning_rate=1e30", "optim.clip_norm=0",
                                           "run.allow_config_change=true", keep});
  EXPECT_EQ(outcome.end, TrainEnd::diverged);
  EXPECT_GT(outcome.rows.back()["skipped"], 0);
  EXPECT_TRUE(std::filesystem::exists(run.checkpoint(4))) << "the last good one is gone";
  for (int64_t step = 5; step <= 9; step++)
    EXPECT_FALSE(std::filesystem::exists(run.checkpoint(step))) << step;
}

TEST(Robustness, WeightsThatOverflowInTheLastStepAreNoSuccess) {
  for (const char* save : {"checkpoint.at_end=true", "checkpoint.at_end=false"}) {
    TinyRun run;
    const RunOutcome outcome = run.train(
        2, {"run.steps=1", "optim={learning_rate: 1e30, optimizer: sgd, clip_norm: 0}", "model.init.std=100",
            "model.moe.router={kind: top_k, z_coeff: 1e6}", "eval.at_end=false", save});
    EXPECT_EQ(outcome.end, TrainEnd::diverged) << save;
    EXPECT_FALSE(std::filesystem::exists(run.checkpoint(1))) << save;
  }
}

TEST(Robustness, FirstTensorThatIsNotFiniteIsNamedWithItsRanks) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    std::vector<StateTensor> state(3);
    for (size_t i = 0; i < 3; i++) {
      state[i].name = str("tensor ", i);
      state[i].value = Tensor::zeros({3}, i == 1 ? DType::f32 : DType::f64);
    }
    state[0].value = Tensor::zeros({3}, DType::i64);
    EXPECT_EQ(first_not_finite(state, *world), "");
    if (world->rank() != 1) state[2].value.data<double>()[2] = std::numeric_limits<double>::infinity();
    EXPECT_EQ(first_not_finite(state, *world), "tensor 2 on ranks 0, 2, 3");
    if (world->rank() == 1) state[1].value.data<float>()[0] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_EQ(first_not_finite(state, *world), "tensor 1 on rank 1");
  });
}

TEST(Robustness, ResultOfForeignMetricsRowsIsSaidToBeUnknown) {
  const TemporaryFolder folder;
  const auto file = folder / "metrics.jsonl";
  EXPECT_EQ(run_result(file, 8), "");
  for (const char* row :
       {"{\"kind\":3}", "{\"kind\":\"step\"}", "{\"kind\":\"step\",\"step\":\"x\",\"tokens\":1}",
        "{\"kind\":\"step\",\"step\":8,\"tokens\":5,\"moe\":{\"a\":3}}",
        "{\"kind\":\"step\",\"step\":8,\"tokens\":5,\"traffic\":3}",
        "{\"kind\":\"step\",\"step\":8,\"tokens\":5,\"traffic\":{\"dp\":5}}",
        "{\"kind\":\"step\",\"step\":8,\"tokens\":5,\"moe\":[{\"layer\":0,\"counts\":[]}]}", "[1", ""}) {
    std::ofstream(file) << row << "\n";
    const std::string result = run_result(file, 8);
    EXPECT_TRUE(result.empty() || result.starts_with("result     ")) << row << " gave " << result;
  }
  std::ofstream(file) << "{\"kind\":\"step\",\"step\":8,\"tokens\":5}\n{\"kind\":\"eval\"}\n";
  EXPECT_EQ(run_result(file, 8), "result     step 8, 5 tokens");
  std::ofstream(file) << "{\"kind\":\"step\",\"step\":8,\"tokens\":5}\n{\"kind\":\"eval\",\"loss\":null}\n";
  EXPECT_EQ(run_result(file, 8), "result     step 8, 5 tokens: no finite validation loss");
  std::ofstream(file)
      << "{\"kind\":\"step\",\"step\":8,\"tokens\":5}\n{\"kind\":\"step\",\"step\":9,\"tokens\":6}\n"
      << "{\"kind\":\"eval\",\"step\":9,\"loss\":1}\n";
  EXPECT_EQ(run_result(file, 8), "result     step 8, 5 tokens")
      << "rows that no checkpoint holds are not the result";
}

TEST(Robustness, ExpertLoadOfVeryManyExpertsIsOneLine) {
  const TemporaryFolder folder;
  const auto file = folder / "metrics.jsonl";
  nlohmann::json row = {{"kind", "step"}, {"step", 1}, {"tokens", 600}};
  std::vector<int64_t> counts(300, 2);
  counts[0] = 0;
  counts[1] = 4;
  row["moe"] = nlohmann::json::array({{{"layer", 3}, {"counts", counts}}});
  std::ofstream(file) << row.dump() << "\n";
  expect_contains(run_result(file, 8), "layer  3  300 experts, busiest 2.00, 1 without a token");
}

TEST(Robustness, NotANumberIsPrintedWithoutSign) {
  StepMetrics m;
  m.loss = -std::numeric_limits<double>::quiet_NaN();
  m.grad_norm = m.loss;
  EXPECT_EQ(StepTable(StepTableOptions{}).line(m, 0).find("-nan"), std::string::npos);
  EvalMetrics e;
  e.tokens = 1;
  e.loss = m.loss;
  EXPECT_EQ(eval_line(e).find("-nan"), std::string::npos);
}

std::string config_problem(const std::vector<std::string>& overrides) {
  return message_of([&] {
    load_train_config_text("data: {text: [a.txt]}\nmodel: {hidden_size: 16, heads: 2}\n", "exp.yaml",
                           overrides, 1);
  });
}

TEST(Robustness, CF_03_CF_05_RulesBetweenKeysAreCheckedBeforeAnyDataIsRead) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"model.position.rotary_size=3"}, "config model.position (command line): rope: expected an even"},
      {{"model.position.rotary_size=100"}, "at most the head size (8), got 100"},
      {{"model.head_size=7"},
       "config model.head_size (command line): rope: expected an even head size, got 7"},
      {{"model.moe={num_experts: 4, top_k: 2, router: {kind: top_k, num_groups: 3}}"},
       "config model.moe.router (command line): router top_k: expected num_groups to divide num_experts (4)"},
      {{"model.moe={num_experts: 4, top_k: 2, router: {kind: top_k, num_groups: 2, group_score_top: 9}}"},
       "group_score_top 9"},
      {{"data.split={split: tail, val_documents: 1}"}, "config data.split.val_documents (command line)"},
      {{"data.tokenizer={kind: file}"},
       "config data.tokenizer.path (command line): expected a tokenizer.json"},
      {{"data.text=[]", "data.sources=[{weight: 1}]"}, "config data.sources.0.path"},
      {{"data.global_batch=4611686018427387904"},
       "config data.global_batch (command line): expected 1..1073741824"},
      {{"data.seq_len=1e15"}, "config data.seq_len (command line): expected 1..1073741824"},
      {{"model.layers=9223372036854775807"}, "config model.layers (command line): expected 1..65536"},
      {{"model.moe={num_experts: 4, shared_experts: 9223372036854775807}"},
       "config model.moe.shared_experts (command line): expected 0..1024"},
      {{"model.hidden_size=4611686018427387904"},
       "config model.hidden_size (command line): expected 1..16777216"},
      {{"model.ffn.hidden=4611686018427387904"},
       "config model.ffn.hidden (command line): expected 1..16777216"},
      {{"model.layers=65536", "model.hidden_size=16777216"},
       "config model (exp.yaml:2:8): expected less than 1e15 parameters"},
      {{"parallel.tp=9223372036854775807", "parallel.cp=9223372036854775807"},
       "config parallel.tp (command line): expected 1..1048576"},
      {{"parallel.bucket_mb=1e-9"}, "config parallel.bucket_mb (command line): expected 1e-4..1048576"},
      {{"parallel.bucket_mb=1e300"}, "config parallel.bucket_mb"},
  };
  for (const auto& [overrides, part] : cases) expect_contains(config_problem(overrides), part);
  EXPECT_EQ(config_problem({"model.moe={num_experts: 4, top_k: 2, router: {kind: top_k, num_groups: 2}}"}),
            "(no error)");
}

TEST(Robustness, UnreadableConfigIsNotBlamedForMissingKeys) {
  for (const char* text :
       {"a: &x 1\n", "run: {steps: 1}\nrun: {steps: 2}\n", "[1]\n", "data: {text: {a: b}}\n"}) {
    const std::string message = message_of([&] { load_train_config_text(text, "exp.yaml", {}, 1); });
    EXPECT_EQ(message.find("expected text files or prepared sources"), std::string::npos) << message;
    EXPECT_NE(message, "(no error)");
  }
}

TEST(Robustness, ReadingARunLeavesItsCheckpointFolderAlone) {
  TinyRun run;
  run.train(1, {"run.steps=6"});
  const auto folder = run.folder.path() / "tiny" / "checkpoints";
  const auto being_written = folder / "step-000000009.tmp-0123456789abcdef";
  std::filesystem::create_directories(being_written);
  std::ofstream(run.checkpoint(6) / "state.json") << "damaged";
  const auto single = make_single_communicator();
  CheckpointStore reader({folder, 0, 0, "", /*read_only=*/true}, *single);
  const auto found = reader.find();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step, 3);
  ASSERT_EQ(found->rejected.size(), 1U);
  expect_contains(found->rejected[0], "left in place");
  EXPECT_TRUE(std::filesystem::exists(being_written));
  EXPECT_TRUE(std::filesystem::exists(run.checkpoint(6)));
  CheckpointStore writer({folder}, *single);
  EXPECT_FALSE(std::filesystem::exists(being_written));
  EXPECT_EQ(writer.find()->step, 3);
  EXPECT_FALSE(std::filesystem::exists(run.checkpoint(6)));
}

TEST(Robustness, DataWithoutAnyLabelTrainsToNothingAndHasNoValidationLoss) {
  TinyRun run;
  std::ofstream lines(run.folder / "one.jsonl");
  for (int i = 0; i < 2000; i++)
    lines << "{\"text\": \""
          << "abcd"[i % 4] << "\"}\n";
  lines.close();
  for (const int ranks : {1, 2}) {
    const RunOutcome outcome =
        run.train(ranks, {str("data.text=[", (run.folder / "one.jsonl").string(), "]"),
                          "data.documents=jsonl", "data.tokenizer=char", "data.loader.mask_documents=true",
                          "parallel.ep=auto", str("run.name=ranks", ranks), "checkpoint.every=0"});
    EXPECT_EQ(outcome.end, TrainEnd::done);
    ASSERT_EQ(outcome.rows.size(), 10U);
    EXPECT_EQ(outcome.rows[8]["skipped"], 9) << "no step has an update";
    EXPECT_TRUE(outcome.rows[9]["loss"].is_null());
    EXPECT_EQ(outcome.rows[9]["tokens"], 0);
  }
  expect_contains(eval_line(EvalMetrics{}), "no token of the held-out data has a label");
}

TEST(Robustness, NumberOfThreadsChangesNoBit) {
  const std::vector<std::string> wider = {"model.hidden_size=64", "model.moe.hidden=48", "data.seq_len=96",
                                          "run.steps=3"};
  std::map<std::string, std::vector<double>> one;
  for (const int threads : {1, 2, 3}) {
    set_num_threads(threads);
    TinyRun run;
    const RunOutcome outcome = run.train(1, wider);
    if (threads == 1) one = outcome.state;
    EXPECT_EQ(outcome.state, one) << threads << " threads";
  }
  set_num_threads(1);
}

TEST(Robustness, RunKeepsItsTokenizer) {
  TinyRun run;
  run.train(1, {"run.steps=1"});
  const auto own = run_tokenizer_path((run.folder.path() / "tiny").string());
  const auto prepared = (run.folder.path() / "data" / "tiny" / "tokenizer.json").string();
  EXPECT_EQ(load_tokenizer(own)->to_json(), load_tokenizer(prepared)->to_json());
}

}  // namespace
}  // namespace shoal::testing
