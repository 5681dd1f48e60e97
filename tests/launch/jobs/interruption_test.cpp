// Signals and kills of a running job of two ranks: whatever happens, the next start goes on, and the end is
// that of a run that nothing has happened to, bit for bit.
#include <set>

#include "tests/launch/jobs/shoal_jobs.h"

namespace shoal::testing {
namespace {

constexpr int kSteps = 240;
constexpr double kTimeLimit = 120;  // seconds, of each start, on a machine with other work

const std::vector<std::string>& train() {
  static const std::vector<std::string> arguments = {"train", "tiny.yaml"};
  return arguments;
}

/// The run that nothing has happened to.
const ShoalFolder& undisturbed() {
  static const ShoalFolder folder(/*slow=*/true);
  static const Ended ended = Job(ShoalFolder::command(2, train()), folder.path("")).wait(kTimeLimit);
  SHOAL_CHECK(ended.code == 0, "the undisturbed run failed with code ", ended.code, ":\n", ended.all());
  return folder;
}

void expect_same_end(const ShoalFolder& folder) {
  const auto want = undisturbed().rows(), got = folder.rows();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); i++) ASSERT_EQ(got[i], want[i]) << "row " << i;
  const auto want_files = undisturbed().checkpoint_bytes(kSteps), files = folder.checkpoint_bytes(kSteps);
  ASSERT_EQ(files.size(), want_files.size());
  for (const auto& [name, bytes] : want_files)
    EXPECT_TRUE(files.at(name) == bytes) << "final checkpoint: " << name << " differs";
}

void expect_nothing_left(Job& job, const ShoalFolder& folder) {
  EXPECT_TRUE(job.leaves_nothing_alive()) << job.processes().size() << " processes are alive";
  const auto segments = folder.shared_memory();
  EXPECT_TRUE(segments.empty()) << segments.size() << " shared memory segments are left, "
                                << segments.front();
}

/// Trains the rest; the job before must have left nothing that disturbs it.
void expect_resumes_to_the_same_end(const ShoalFolder& folder) {
  const Ended rest = Job(ShoalFolder::command(2, train()), folder.path("")).wait(kTimeLimit);
  EXPECT_EQ(rest.code, 0) << rest.all();
  EXPECT_EQ(count(rest.all(), "checkpoint rejected"), 0) << rest.all();
  EXPECT_TRUE(folder.odd_checkpoint_names().empty()) << folder.odd_checkpoint_names().front();
  expect_same_end(folder);
}

/// Starts the job and sends the signal to `target` when `rows` rows are written.
Ended interrupt(const ShoalFolder& folder, int rows, int number,
                const std::function<std::optional<pid_t>(const Job&)>& target) {
  Job job(ShoalFolder::command(2, train()), folder.path(""));
  EXPECT_TRUE(wait_until([&] { return folder.num_rows() >= rows || job.has_ended(); }, kTimeLimit));
  const auto process = target(job);
  EXPECT_TRUE(process && !job.has_ended()) << "the run was over before the signal";
  if (process) ::kill(*process, number);
  const Ended ended = job.wait(kTimeLimit);
  expect_nothing_left(job, folder);
  return ended;
}

/// The newest checkpoint's step; -1: none.
int64_t newest_step(const ShoalFolder& folder) {
  int64_t newest = -1;
  if (!std::filesystem::exists(folder.checkpoints())) return newest;
  for (const auto& info : list_checkpoints(folder.checkpoints(), /*verify=*/true)) {
    EXPECT_EQ(info.problem, "") << info.path;
    newest = std::max(newest, info.step);
  }
  return newest;
}

void expect_saved_on_request(const ShoalFolder& folder, const Ended& ended, int rows) {
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_EQ(count(ended.out, "stopped on request after step"), 1) << ended.out;
  const int64_t saved = newest_step(folder);
  EXPECT_GE(saved, rows - 1);  // one of the rows describes the run
  EXPECT_LT(saved, kSteps) << "the signal came too late to be seen";
  EXPECT_EQ(folder.rows().back()["step"], saved) << "the save is not at the step boundary of the last row";
}

TEST(Interruption, Sigusr1ToMpirunSavesAtTheStepBoundaryAndResumesBitEqual) {
  const ShoalFolder folder(/*slow=*/true);
  const Ended ended = interrupt(folder, 31, SIGUSR1, [](const Job& job) { return std::optional(job.pid()); });
  expect_saved_on_request(folder, ended, 31);
  expect_resumes_to_the_same_end(folder);
}

TEST(Interruption, CK_05_SigtermToOneRankSavesOnAllAndResumesBitEqual) {
  const ShoalFolder folder(/*slow=*/true);
  const Ended ended = interrupt(folder, 52, SIGTERM, [](const Job& job) { return job.rank(1); });
  expect_saved_on_request(folder, ended, 52);
  expect_resumes_to_the_same_end(folder);
}

TEST(Interruption, CtrlCOnOneRankSavesOnAllAndResumesBitEqual) {
  const ShoalFolder folder(/*slow=*/true);
  const Ended ended = interrupt(folder, 40, SIGINT, [](const Job& job) { return job.rank(0); });
  expect_saved_on_request(folder, ended, 40);
  expect_resumes_to_the_same_end(folder);
}

TEST(Interruption, SigtermToMpirunCorruptsNothing) {
  const ShoalFolder folder(/*slow=*/true);
  interrupt(folder, 45, SIGTERM, [](const Job& job) { return std::optional(job.pid()); });
  EXPECT_GE(newest_step(folder), 40);
  expect_resumes_to_the_same_end(folder);
}

TEST(Interruption, SigkillAtRandomMomentsOfRanksAndOfMpirunLosesNothingThatWasSaved) {
  const ShoalFolder folder(/*slow=*/true);
  const char* seed = std::getenv("SHOAL_TEST_SEED");  // to try other moments
  const RandomStream random(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 2024, "kills");
  constexpr int kKills = 6;
  int64_t saved = -1;
  for (uint64_t k = 0; k < kKills; k++) {
    // The first hits a rank while it starts; then mpirun and ranks take turns, over the whole run.
    const int victim = k % 2 == 1 ? -1 : static_cast<int>(random.below(4 * k, 2));
    const int rows = k == 0 ? 0 : static_cast<int>(k * kSteps / (kKills + 2) + random.below(4 * k + 1, 20));
    const auto delay = std::chrono::microseconds(random.below(4 * k + 2, k == 0 ? 400000 : 20000));
    SCOPED_TRACE(
        str("kill ", k, " of ", victim < 0 ? str("mpirun") : str("rank ", victim), " at row ", rows));
    Job job(ShoalFolder::command(2, train()), folder.path(""));
    std::optional<pid_t> process;
    if (victim < 0) process = job.pid();
    auto reached = [&] {
      if (victim >= 0 && !process) process = job.rank(victim);
      // The rows may be those of the job before; the header of the progress table is of this one.
      const bool trains = k == 0 || contains(job.out_so_far(), "grad norm");
      return job.has_ended() || (process && trains && folder.num_rows() >= rows);
    };
    ASSERT_TRUE(wait_until(reached, kTimeLimit)) << job.wait(0).all();
    std::this_thread::sleep_for(delay);
    ASSERT_FALSE(job.has_ended()) << "the run was over before the kill:\n" << job.wait().all();
    ::kill(*process, SIGKILL);
    EXPECT_NE(job.wait(kTimeLimit).code, 124) << "the job hangs";
    expect_nothing_left(job, folder);
    const int64_t now = newest_step(folder);
    EXPECT_GE(now, saved) << "a saved checkpoint is lost";
    saved = now;
  }
  EXPECT_GE(saved, kSteps / 2);
  expect_resumes_to_the_same_end(folder);
}

}  // namespace
}  // namespace shoal::testing
