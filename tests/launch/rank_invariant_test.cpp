// run.deterministic: rank_invariant through the whole program: what it refuses, and runs that change their
// ranks.
#include "tests/support/rank_invariant.h"

#include "tests/support/error_of.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using RankInvariantRuns = RankInvariant;
constexpr const char* kMode = "run.deterministic=rank_invariant";

std::string refusal(const std::vector<std::string>& overrides, int ranks) {
  TinyRun run;
  return error_of<UsageError>([&] { load_train_config_text(run.yaml(), "tiny.yaml", overrides, ranks); });
}

TEST(RankInvariantConfig, SettingsUnderWhichBitsDependOnTheLayoutAreRefused) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"parallel.tp=2"},
       "config parallel.tp (command line): with run.deterministic: rank_invariant expected 1"},
      {{"parallel.cp=2"},
       "config parallel.cp (command line): with run.deterministic: rank_invariant expected 1"},
      {{"parallel.etp=2"},
       "config parallel.etp (command line): with run.deterministic: rank_invariant expected 1"},
      {{"parallel.zero=2"},
       "config parallel.zero (command line): with run.deterministic: rank_invariant expected 0 or 1"},
      {{"run.device=cuda"},
       "config run.device (command line): with run.deterministic: rank_invariant expected cpu"},
      {{"model.moe.capacity_factor=2", "model.moe.capacity_scope=micro_batch"},
       "config model.moe.capacity_scope (command line): with run.deterministic: rank_invariant expected "
       "sequence"},
      {{"model.moe.router.aux_coeff=0.1", "model.moe.router.aux_scope=micro_batch"},
       "set aux_scope: sequence"},
      {{"model.moe.hidden=16", "model.moe.expert_precision=fp8_block"}, "set expert_precision: same"},
      {{"data.global_batch=65538"}, "expected at most 65536 sequences, got 65538"},
  };
  for (const auto& [overrides, expected] : cases) {
    std::vector<std::string> all = overrides;
    EXPECT_EQ(refusal(all, 2), "") << overrides[0];
    all.emplace_back(kMode);
    EXPECT_NE(refusal(all, 2).find(expected), std::string::npos) << overrides[0] << '\n' << refusal(all, 2);
  }
  const std::string both = refusal({kMode, "parallel.tp=2", "run.device=cuda"}, 2);
  EXPECT_NE(both.find("parallel.tp"), std::string::npos) << both;
  EXPECT_NE(both.find("run.device"), std::string::npos) << both;
}

// A scope that is off changes nothing.
TEST(RankInvariantConfig, WhatIsOffIsNotRefused) {
  EXPECT_EQ(refusal({kMode, "model.moe.capacity_scope=micro_batch", "model.moe.router.aux_scope=micro_batch",
                     "parallel.zero=1", "data.micro_batch=2", "parallel.pp=2"},
                    2),
            "");
}

TEST(RankInvariantConfig, OpenBlasIsRefusedByTheEngine) {
  if (rows_are_independent(Device{}, DType::f32))
    GTEST_SKIP() << "products are not OpenBLAS's; SHOAL_GEMM=openblas runs this";
  TinyRun run;
  EXPECT_NE(error_of<Error>([&] { run.train(1, {kMode}); }).find("SHOAL_GEMM=tiled"), std::string::npos);
}

/// 20 steps of six sequences; from step 10 on `ranks` ranks with `layout` go on.
RunOutcome changed_at_step_10(TinyRun& run, int ranks, std::vector<std::string> layout, bool invariant) {
  std::vector<std::string> settings = {"run.steps=20", "data.global_batch=6", "checkpoint.every=10",
                                       "eval.every=5", "eval.samples=5"};
  if (invariant) settings.emplace_back(kMode);
  if (!std::filesystem::exists(run.checkpoint(20))) run.train(1, settings);
  run.forget(20);
  layout.insert(layout.end(), settings.begin(), settings.end());
  RunOutcome outcome = run.train(ranks, layout);
  for (nlohmann::json& row : outcome.rows) row.erase("traffic");  // what ranks sent
  return outcome;
}

TEST_F(RankInvariantRuns, ARunThatChangesItsRanksGoesOnWithTheSameBits) {
  TinyRun run;
  const RunOutcome want = changed_at_step_10(run, 1, {}, true);
  ASSERT_EQ(want.end, TrainEnd::done);
  ASSERT_EQ(want.rows.size(), 24U);
  for (const auto& [ranks, layout] : std::vector<std::pair<int, std::vector<std::string>>>{
           {3, {}},
           {2, {"parallel.ep=2", "data.micro_batch=1"}},
           {3, {"parallel.dispatcher=all_gather", "data.micro_batch=2", "parallel.zero=1"}},
           {6, {"parallel.ep=2", "parallel.zero=1"}},
           {4, {"parallel.pp=2", "parallel.ep=2"}}}) {
    const RunOutcome got = changed_at_step_10(run, ranks, layout, true);
    EXPECT_EQ(got.state, want.state) << ranks;
    EXPECT_EQ(got.rows, want.rows) << ranks;
  }
}

TEST_F(RankInvariantRuns, WithoutTheModeBitsDependOnTheRanks) {
  TinyRun run;
  const RunOutcome want = changed_at_step_10(run, 1, {}, false);
  EXPECT_EQ(changed_at_step_10(run, 1, {}, false).state, want.state);
  EXPECT_NE(changed_at_step_10(run, 3, {}, false).state, want.state);
}

TEST_F(RankInvariantRuns, TheModeIsASettingThatAResumeMayNotChange) {
  TinyRun run;
  run.train(1, {"run.steps=2", kMode});
  EXPECT_NE(error_of<Error>([&] { run.train(1, {"run.steps=4"}); }).find("run.deterministic"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
