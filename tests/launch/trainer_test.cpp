// Whole training runs: resuming, other layouts, evaluation, ends. Ranks are threads.
#include "launch/trainer.h"

#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

TEST(Trainer, LossFallsOnLearnableText) {
  TinyRun run;
  const RunOutcome outcome = run.train(2, {"run.steps=60", "parallel.ep=2", "checkpoint.every=0"});
  EXPECT_EQ(outcome.end, TrainEnd::done);
  EXPECT_LT(outcome.last_loss, 3.0);
  EXPECT_GT(outcome.rows.front()["loss"], 5.0);
}

TEST(Trainer, RS_03_RS_13_ResumedRunIsBitEqualToTheUninterruptedOneLogRowsIncluded) {
  for (const auto& [ranks, precision] : {std::pair{1, "f32"}, {2, "f32"}, {2, "bf16"}}) {
    const std::vector<std::string> settings = {"parallel.ep=auto", str("run.precision=", precision)};
    TinyRun run;
    const RunOutcome whole = run.train(ranks, settings);
    run.forget(9);
    run.forget(6);
    const RunOutcome resumed = run.train(ranks, settings);
    EXPECT_EQ(resumed.end, TrainEnd::done);
    EXPECT_EQ(whole.state, resumed.state) << ranks << " ranks, " << precision;
    EXPECT_EQ(whole.rows, resumed.rows) << ranks << " ranks, " << precision;
    EXPECT_EQ(whole.rows.size(), 10U);  // 9 steps and one evaluation
  }
}

TEST(Trainer, RE_01_ResumesUnderAnyLayoutWithTheSameResult) {
  TinyRun run;
  const RunOutcome whole = run.train(2, {"run.precision=f64", "parallel.ep=1"});
  run.forget(9);
  run.forget(6);
  run.train(4,
            {"run.precision=f64", "parallel.ep=4", "parallel.tp=2"});  // steps 4..9, experts and tensors cut
  run.forget(9);
  run.train(4, {"run.precision=f64", "parallel.ep=2", "parallel.etp=2"});  // steps 7..9, experts cut too
  run.forget(9);
  run.train(
      6, {"run.precision=f64", "parallel.cp=3", "parallel.ep=3", "parallel.context=ring"});  // sequences cut
  run.forget(9);
  run.train(2,
            {"run.precision=f64", "parallel.ep=2", "parallel.zero=1"});  // steps 7..9 with expert parallelism
  run.forget(9);
  const RunOutcome last = run.train(1, {"run.precision=f64", "parallel.ep=1"});  // steps 7..9 alone
  ASSERT_EQ(whole.state.size(), last.state.size());
  for (const auto& [name, values] : whole.state) {
    double largest = 0;
    for (const double v : values) largest = std::max(largest, std::abs(v));
    EXPECT_TRUE(close(last.state.at(name), values, {1e-9, 1e-9 * largest})) << name;
  }
}

TEST(Trainer, PipelineRunsResumeUnderOtherNumbersOfStages) {
  TinyRun run;
  const auto train = [&](int ranks, std::vector<std::string> settings) {
    settings.insert(settings.end(),
                    {"run.precision=f64", "model.layers=4", "eval.every=3", "parallel.ep=auto"});
    return run.train(ranks, settings);
  };
  const RunOutcome whole = train(1, {"run.name=whole"});
  train(4, {"parallel.pp=2"});
  run.forget(9);
  run.forget(6);
  train(1, {});  // 4..9
  run.forget(9);
  const RunOutcome three = train(6, {"parallel.pp=3", "parallel.dp=1", "parallel.tp=2"});  // 7..9
  run.forget(9);
  const RunOutcome interleaved =
      train(2, {"parallel.pp=2", "parallel.pipeline={schedule: interleaved, virtual_stages: 2}"});  // 7..9
  for (const RunOutcome* last : {&three, &interleaved}) {
    ASSERT_EQ(whole.state.size(), last->state.size());
    for (const auto& [name, values] : whole.state) {
      double largest = 0;
      for (const double v : values) largest = std::max(largest, std::abs(v));
      EXPECT_TRUE(close(last->state.at(name), values, {1e-9, 1e-9 * largest})) << name;
    }
    ASSERT_EQ(whole.rows.size(), last->rows.size());
    EXPECT_EQ(whole.rows.back()["kind"], "eval");
    EXPECT_NEAR(whole.rows.back()["loss"], last->rows.back()["loss"], 1e-9);
    const auto counts = [](const nlohmann::json& row) {
      std::vector<std::string> all;
      for (const auto& layer : row.value("moe", nlohmann::json::array()))
        all.push_back(layer["counts"].dump() + layer["bias_max"].dump());
      return all;
    };
    for (size_t i = 0; i < whole.rows.size(); i++)
      EXPECT_EQ(counts(whole.rows[i]), counts(last->rows[i])) << i;
  }
}

TEST(Trainer, EV_01_EvaluationAndSavingChangeNothing) {
  TinyRun never, often;
  const RunOutcome a = never.train(
      2, {"eval.at_end=false", "checkpoint.every=0", "checkpoint.at_end=false", "run.log_every=5"});
  const RunOutcome b = often.train(2, {"eval.every=1", "eval.samples=7", "checkpoint.every=1"});
  EXPECT_EQ(a.state, b.state);
  // Nor what is counted: the expert loads of the steps that both have logged.
  std::map<int64_t, nlohmann::json> loads;
  for (const auto& row : b.rows)
    if (row["kind"] == "step") loads[row["step"]] = row["moe"];
  for (const auto& row : a.rows) EXPECT_EQ(row["moe"], loads.at(row["step"])) << row["step"];
  EXPECT_GE(a.rows.size(), 3U);
}

TEST(Trainer, RS_11_SavesAtTheEndAndAFinishedRunStaysAsItIs) {
  TinyRun run;
  const RunOutcome first = run.train(1, {"run.steps=7"});
  for (const int64_t step : {3, 6, 7}) EXPECT_TRUE(std::filesystem::exists(run.checkpoint(step))) << step;
  const RunOutcome again = run.train(1, {"run.steps=7"});
  EXPECT_EQ(again.end, TrainEnd::already_done);
  EXPECT_EQ(first.state, again.state);
  EXPECT_EQ(first.rows, again.rows);
}

TEST(Trainer, RS_07_ResumeThatCannotBeMetIsAnError) {
  TinyRun run;
  EXPECT_THROW(run.train(1, {"run.resume=required"}), Error);
  run.train(1, {"run.steps=3"});
  EXPECT_THROW(run.train(1, {"run.resume=never"}), Error);
}

TEST(Trainer, RS_09_ChangedSettingsAreRefusedOrListed) {
  TinyRun run;
  run.train(1, {"run.steps=3"});
  for (const char* change :
       {"model.moe.top_k=1", "data.seq_len=8", "run.seed=2", "optim.learning_rate=0.5"}) {
    try {
      run.train(1, {change});
      FAIL() << change << " was accepted";
    } catch (const Error& e) {
      const std::string key = std::string(change).substr(0, std::string(change).find('='));
      EXPECT_NE(std::string(e.what()).find(key), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("run.allow_config_change"), std::string::npos) << e.what();
    }
  }
  EXPECT_EQ(run.train(1, {"run.steps=5", "run.log_every=2", "eval.every=2"}).end, TrainEnd::done);
  EXPECT_EQ(run.train(1, {"run.steps=6", "optim.learning_rate=0.5", "run.allow_config_change=true"}).end,
            TrainEnd::done);
}

TEST(Trainer, RS_09_AnAcceptedChangeOfTheDataIsAcceptedOnce) {
  TinyRun run;
  run.train(1, {"run.steps=3"});
  EXPECT_THROW(run.train(1, {"run.steps=4", "data.seq_len=8"}), Error);
  run.train(1, {"run.steps=4", "data.seq_len=8", "run.allow_config_change=true"});
  EXPECT_EQ(run.train(1, {"run.steps=5", "data.seq_len=8"}).end, TrainEnd::done);
  EXPECT_THROW(run.train(1, {"run.steps=6"}), Error) << "back to the old data is a change, too";
}

TEST(Trainer, LR_03_ScheduleAndCountersAdvancePerStepNotPerMicroBatch) {
  TinyRun one, four;
  const RunOutcome a = one.train(1, {"run.steps=4"}),
                   b = four.train(1, {"run.steps=4", "data.micro_batch=2"});
  ASSERT_GE(a.rows.size(), 4U);
  ASSERT_GE(b.rows.size(), 4U);
  for (size_t i = 0; i < 4; i++) {
    EXPECT_EQ(a.rows[i]["learning_rate"], b.rows[i]["learning_rate"]);
    EXPECT_EQ(a.rows[i]["tokens"], static_cast<int64_t>(i + 1) * 8 * 16);
    EXPECT_EQ(a.rows[i]["tokens"], b.rows[i]["tokens"]);
  }
}

TEST(Trainer, BI_01_BiasMovesOncePerStepWhateverTheAccumulation) {
  TinyRun parts, whole;
  const RunOutcome a = parts.train(1, {"run.steps=4", "run.precision=f64", "data.micro_batch=2"});
  const RunOutcome b = whole.train(1, {"run.steps=4", "run.precision=f64"});
  const char* name = "buffer/layers.1.moe.router.bias";
  EXPECT_EQ(a.state.at(name), b.state.at(name));
  for (size_t i = 0; i < 4; i++) {
    const auto& moe = a.rows[i]["moe"][0];
    EXPECT_EQ(moe["counts"], b.rows[i]["moe"][0]["counts"]) << "step " << i + 1;
    // One move of 0.01 per step, up or down.
    const double reach = 0.01 * static_cast<double>(i + 1) + 1e-6;
    EXPECT_LE(moe["bias_max"].get<double>() - moe["bias_min"].get<double>(), 2 * reach);
  }
  EXPECT_GT(a.rows[0]["moe"][0]["bias_max"], 0.005);
}

TEST(Trainer, ZeroStepsOnlyEvaluatesAndSaves) {
  TinyRun run;
  const RunOutcome outcome = run.train(1, {"run.steps=0"});
  ASSERT_EQ(outcome.rows.size(), 1U);
  EXPECT_EQ(outcome.rows[0]["kind"], "eval");
  EXPECT_TRUE(std::filesystem::exists(run.checkpoint(0)));
}

TEST(Trainer, EMP_07_EvaluationWithUnevenSampleCountsFinishesAndEqualsOneRank) {
  TinyRun run;
  auto eval_loss = [](const RunOutcome& o) { return o.rows.back()["loss"].get<double>(); };
  const double alone =
      eval_loss(run.train(1, {"run.name=a", "run.precision=f64", "run.steps=2", "eval.samples=5"}));
  const double two = eval_loss(run.train(2, {"run.name=b", "run.precision=f64", "run.steps=2",
                                             "eval.samples=5", "parallel.ep=2", "data.micro_batch=2"}));
  const double four = eval_loss(
      run.train(4, {"run.name=c", "run.precision=f64", "run.steps=2", "eval.samples=5", "parallel.ep=4"}));
  EXPECT_NEAR(alone, two, 1e-9);
  EXPECT_NEAR(alone, four, 1e-9);
}

}  // namespace
}  // namespace shoal::testing
