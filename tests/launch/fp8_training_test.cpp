// Whole runs whose experts are multiplied in fp8.
#include "tests/support/sanitized.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using Settings = std::vector<std::string>;

class Fp8Training : public ::testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { log::set_quiet(false); }
  Settings settings(const Settings& more, const std::string& experts = GetParam()) const {
    Settings all = {"model.moe.hidden=32", "model.hidden_size=32", "model.moe.expert_precision=" + experts};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

/// The mean loss of the last 20 steps: those of two runs differ by chance.
double last_losses(const RunOutcome& outcome, int64_t steps) {
  double sum = 0;
  for (const auto& row : outcome.rows) {
    if (row["kind"] == "step" && row["step"] > steps - 20) sum += double{row["loss"]};
  }
  return sum / 20;
}

// Until it has learnt what there is to learn; before that the seed decides. Under sanitizers steps are slow.
TEST_P(Fp8Training, EndsWithALossCloseToThatOfBf16) {
  const int64_t steps = kSanitized ? 40 : 400;
  const auto run_with = [&](const std::string& experts) {
    TinyRun run;
    return run.train(
        1, settings({"run.precision=bf16", str("run.steps=", steps), "checkpoint.every=0"}, experts));
  };
  static const RunOutcome bf16 = run_with("same");
  const RunOutcome fp8 = run_with(GetParam());
  const double first = bf16.rows.front()["loss"], want = last_losses(bf16, steps);
  EXPECT_LT(want, (kSanitized ? 0.7 : 0.1) * first) << "it did not learn";
  EXPECT_NEAR(last_losses(fp8, steps), want, (kSanitized ? 0.05 : 0.006) * first);
  EXPECT_NE(last_losses(fp8, steps), want) << "nothing was multiplied in fp8";
}

TEST_P(Fp8Training, ResumesWithTheBitsOfARunThatWasNotInterrupted) {
  TinyRun run;
  const RunOutcome whole = run.train(2, settings({"parallel.ep=2"}));
  run.forget(9);
  run.forget(6);
  const RunOutcome resumed = run.train(2, settings({"parallel.ep=2"}));
  EXPECT_EQ(whole.state, resumed.state);
  EXPECT_EQ(whole.rows, resumed.rows);
}

// Copies of weights that are kept, and results that are made again, change nothing.
TEST_P(Fp8Training, RecomputesWithTheSameBits) {
  const auto state_with = [&](const Settings& more) {
    TinyRun run;
    return run.train(1, settings(more)).state;
  };
  const auto want = state_with({"run.precision=bf16", "data.micro_batch=2", "run.steps=3"});
  for (const char* what :
       {"model.recompute=block", "model.recompute=[norms, activations, up_projections, packed_weights]"})
    EXPECT_EQ(state_with({"run.precision=bf16", "data.micro_batch=2", "run.steps=3", what}), want) << what;
}

INSTANTIATE_TEST_SUITE_P(Scalings, Fp8Training, ::testing::Values("fp8", "fp8_block"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace shoal::testing
