// Signals to a running job, and ranks that stop or leave: the next start goes on, and the end is that of a
// run that nothing has happened to, bit for bit.
#include "data/file_io.h"
#include "tests/launch/jobs/disturbed_run.h"

namespace shoal::testing {
namespace {

constexpr int kMpirun = -1, kAllRanks = -2;

std::vector<pid_t> processes_of(const Job& job, int target, int ranks) {
  if (target == kMpirun) return {job.pid()};
  std::vector<pid_t> found;
  for (int r = 0; r < ranks; r++) {
    const auto process = target == r || target == kAllRanks ? job.rank(r) : std::nullopt;
    if (process) found.push_back(*process);
  }
  return found;
}

/// Until the process has a handler for the signal: before, any program ends.
void wait_for_handler(pid_t process, int number) {
  EXPECT_TRUE(wait_until(
      [&] {
        const std::string status = file_bytes(str("/proc/", process, "/status"));
        const size_t at = status.find("SigCgt:");
        return at != std::string::npos &&
               (std::strtoull(status.c_str() + at + 7, nullptr, 16) >> (number - 1) & 1U) != 0;
      },
      kTimeLimit));
}

struct Signal {
  int number, target;
  int rows = 0;  // when so many rows of the log are written
  int times = 1;
  std::string text() const {
    return str("signal ", number, " to ",
               target == kMpirun     ? "mpirun"
               : target == kAllRanks ? "all ranks"
                                     : str("rank ", target),
               ", ", times, " times, at row ", rows);
  }
};

void send(const Job& job, const Signal& signal, int ranks) {
  const std::vector<pid_t> processes = processes_of(job, signal.target, ranks);
  ASSERT_EQ(processes.size(), signal.target == kAllRanks ? static_cast<size_t>(ranks) : 1U);
  for (int i = 0; i < signal.times; i++)
    for (const pid_t process : processes) ::kill(process, signal.number);
}

void expect_saved_on_request(DisturbedRun& run, const Ended& ended, int rows) {
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_EQ(count(ended.out, "stopped on request after step"), 1) << ended.out;
  EXPECT_GE(run.saved(), rows - 1);  // one of the rows describes the run
  EXPECT_LT(run.saved(), kSteps) << "the signal came too late to be seen";
  EXPECT_EQ(run.folder().rows().back()["step"], run.saved())
      << "the save is not at the step boundary of the last row";
}

/// Starts the job and sends the signal while it trains; returns how it ended.
Ended interrupt(DisturbedRun& run, const Signal& signal) {
  // Slow saves: a busy machine can take longer to bring a signal, above all through mpirun, than 100 such
  // steps.
  const int delay_ms = signal.target == kMpirun ? 300 : 60;
  const auto job = run.start({str("SHOAL_CHECKPOINT_FAILPOINT=mid-write:delay:", delay_ms)});
  EXPECT_TRUE(wait_until(
      [&] {
        return job->has_ended() ||
               (contains(job->out_so_far(), "grad norm") && run.folder().num_rows() >= signal.rows);
      },
      kTimeLimit));
  EXPECT_FALSE(job->has_ended()) << "the run was over before the signal\n" << job->wait().all();
  if (!job->has_ended()) send(*job, signal, run.ranks());
  const Ended ended = job->wait(kTimeLimit);
  run.check_ended(*job);
  return ended;
}

void expect_each_saves(int ranks, const std::vector<Signal>& signals) {
  DisturbedRun run(ranks);
  for (const Signal& signal : signals) {
    SCOPED_TRACE(signal.text());
    expect_saved_on_request(run, interrupt(run, signal), signal.rows);
    if (::testing::Test::HasFailure()) return;
  }
  run.expect_the_undisturbed_end();
}

TEST(Interruption, CK_05_AnySignalToAnyRankSavesAtTheStepBoundaryOfAll) {
  undisturbed(2);
  undisturbed(3);
  const std::vector<std::vector<Signal>> chains = {
      {{SIGTERM, 1, 8}, {SIGTERM, 0, 24}, {SIGTERM, kAllRanks, 40}, {SIGHUP, 0, 55}, {SIGHUP, kAllRanks, 70}},
      {{SIGUSR1, 0, 9}, {SIGUSR1, 2, 25}, {SIGINT, 0, 41}, {SIGINT, 1, 54}, {SIGINT, kAllRanks, 68}}};
  two_at_a_time(2, [&](int i) { expect_each_saves(2 + i, chains[static_cast<size_t>(i)]); });
}

TEST(Interruption, ARepeatedSignalDoesNotDestroyTheSave) {
  undisturbed(2);
  const std::vector<std::vector<Signal>> chains = {
      {{SIGTERM, 0, 8, 2}, {SIGINT, 1, 30, 2}, {SIGTERM, kAllRanks, 60, 20}},
      {{SIGUSR1, kMpirun, 8, 2}, {SIGUSR1, kMpirun, 30}, {SIGINT, kAllRanks, 60, 2}}};
  two_at_a_time(2, [&](int i) { expect_each_saves(2, chains[static_cast<size_t>(i)]); });
}

TEST(Interruption, MpirunGivesASecondAfterSigtermSigintAndSighupAndNothingIsDamaged) {
  undisturbed(2);
  two_at_a_time(2, [&](int i) {
    DisturbedRun run(2);
    for (const Signal& signal : i == 0
                                    ? std::vector<Signal>{{SIGTERM, kMpirun, 8}, {SIGINT, kMpirun, 40}}
                                    : std::vector<Signal>{{SIGHUP, kMpirun, 8}, {SIGINT, kMpirun, 40, 2}}) {
      SCOPED_TRACE(signal.text());
      EXPECT_NE(interrupt(run, signal).code, 124) << "the job hangs";
      EXPECT_GE(run.saved(), signal.rows / 10 * 10 - 10);
    }
    run.expect_the_undisturbed_end();
  });
}

/// Starts a job whose saves take seconds, and sends two signals in the middle of one.
Ended interrupt_a_save(DisturbedRun& run, const Signal& signal) {
  const auto job = run.start({"SHOAL_CHECKPOINT_FAILPOINT=mid-write:delay:700"});
  EXPECT_TRUE(
      wait_until([&] { return job->has_ended() || contains(run.log(), "failpoint mid-write"); }, kTimeLimit));
  EXPECT_FALSE(job->has_ended()) << job->wait().all();
  const int64_t before = newest_step(run.folder());
  for (int i = 0; i < signal.times; i++) {
    send(*job, {signal.number, signal.target}, run.ranks());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const Ended ended = job->wait(kTimeLimit);
  run.check_ended(*job);
  EXPECT_GE(run.saved(), before);
  return ended;
}

TEST(Interruption, SignalsDuringASaveLeaveItWholeAndOnlyTheThirdCtrlCEndsTheJobAtOnce) {
  undisturbed(2);
  two_at_a_time(2, [&](int i) {
    DisturbedRun run(2);
    const std::vector<Signal> chain = i == 0
                                          ? std::vector<Signal>{{SIGTERM, 0, 0, 2}, {SIGUSR1, kMpirun, 0, 2}}
                                          : std::vector<Signal>{{SIGINT, kAllRanks, 0, 2}, {SIGHUP, 1, 0, 2}};
    for (const Signal& signal : chain) {
      SCOPED_TRACE(signal.text());
      const int64_t before = run.saved();
      const Ended ended = interrupt_a_save(run, signal);
      EXPECT_EQ(ended.code, 0) << ended.all();
      EXPECT_EQ(count(ended.out, "stopped on request after step"), 1) << ended.out;
      EXPECT_GE(run.saved(), std::max<int64_t>(before, 0) + 10) << "the save that was interrupted is missing";
    }
    const int64_t before = run.saved();
    EXPECT_NE(interrupt_a_save(run, {SIGINT, 0, 0, 3}).code, 0) << "the third Ctrl-C did not end the job";
    EXPECT_EQ(run.saved(), before);
    run.expect_the_undisturbed_end();
  });
}

TEST(Interruption, ASignalDuringTheStartOfMpiEndsTheRunBeforeItsFirstStepsOrAfterASave) {
  undisturbed(2);
  two_at_a_time(2, [&](int i) {
    DisturbedRun run(2);
    for (const int number : i == 0 ? std::vector{SIGTERM, SIGINT} : std::vector{SIGUSR1, SIGHUP}) {
      const auto job = run.start();
      std::optional<pid_t> rank;
      ASSERT_TRUE(wait_until([&] { return (rank = job->rank(i)).has_value(); }, kTimeLimit));
      wait_for_handler(*rank, number);
      ::kill(*rank, number);
      const Ended ended = job->wait(kTimeLimit);
      run.check_ended(*job);
      EXPECT_EQ(ended.code, 0) << ended.all();
      EXPECT_EQ(count(ended.out, "stopped on request"), 1) << ended.out;
    }
    run.expect_the_undisturbed_end();
  });
}

TEST(Interruption, ASignalDuringThePreparationOfDataEndsItAndLeavesNoPartOfIt) {
  undisturbed(2);
  DisturbedRun run(2);
  const auto data = run.folder().path("runs/data/tiny");
  std::filesystem::create_directories(data);
  for (const Signal& signal : {Signal{SIGTERM, 0}, Signal{SIGUSR1, kMpirun}, Signal{SIGINT, kAllRanks}}) {
    SCOPED_TRACE(signal.text());
    // Another process seems to prepare the same data, for ever.
    const FileLock lock((data / ".lock").string(), [] {});
    const auto job = run.start();
    ASSERT_TRUE(wait_until(
        [&] {
          return job->rank(0) && job->rank(1) &&
                 std::filesystem::exists(run.folder().path("runs/tiny/log/rank-1.log"));
        },
        kTimeLimit));
    for (int r = 0; r < 2; r++) wait_for_handler(*job->rank(r), signal.number);
    send(*job, signal, 2);
    const Ended ended = job->wait(kTimeLimit);
    run.check_ended(*job);
    EXPECT_EQ(ended.code, 0) << ended.all();
    EXPECT_TRUE(contains(ended.out, "stopped on request before the first step")) << ended.out;
    EXPECT_FALSE(std::filesystem::exists(data / "dataset.json"));
  }
  run.expect_the_undisturbed_end();
}

TEST(Interruption, MP_01_AStoppedRankEndsTheJobWithTheNamesOfTheCallAndTheRank) {
  undisturbed(3);
  two_at_a_time(2, [&](int victim) {
    DisturbedRun run(3);
    const auto job = run.start({"SHOAL_COLLECTIVE_TIMEOUT=6"});
    ASSERT_TRUE(wait_until([&] { return job->has_ended() || run.folder().num_rows() >= 15; }, kTimeLimit));
    const auto rank = job->rank(victim);
    ASSERT_TRUE(rank && !job->has_ended()) << job->wait().all();
    ::kill(*rank, SIGSTOP);
    const Ended ended = job->wait(kTimeLimit);
    EXPECT_EQ(ended.code, 1) << ended.all();
    EXPECT_TRUE(contains(ended.err, "error: waited 6 s in ")) << ended.err;
    EXPECT_TRUE(contains(ended.err, str("for rank ", victim, " (process ", *rank, " on "))) << ended.err;
    EXPECT_TRUE(contains(ended.err, ", stopped)")) << ended.err;
    EXPECT_TRUE(contains(ended.err, "SHOAL_COLLECTIVE_TIMEOUT")) << ended.err;
    // The other two have said that they wait.
    for (int r = 0; r < 3; r++) {
      EXPECT_TRUE(r == victim || contains(ended.err, str("[rank ", r, "] warning: waiting in ")))
          << ended.err;
    }
    run.check_ended(*job);
    run.expect_the_undisturbed_end();
  });
}

TEST(Interruption, ARankThatStopsDuringTheStartOfMpiEndsTheJob) {
  undisturbed(2);
  DisturbedRun run(2);
  const auto job = run.start({"SHOAL_COLLECTIVE_TIMEOUT=6"});
  std::optional<pid_t> rank;
  ASSERT_TRUE(wait_until([&] { return (rank = job->rank(1)).has_value(); }, kTimeLimit));
  ::kill(*rank, SIGSTOP);
  const Ended ended = job->wait(kTimeLimit);
  EXPECT_EQ(ended.code, 1) << ended.all();
  EXPECT_TRUE(contains(ended.err, "[rank 0] error: waited 6 s in ")) << ended.err;
  run.check_ended(*job);
  run.expect_the_undisturbed_end();
}

TEST(Interruption, ATimeLimitThatIsNoNumberIsRefused) {
  const ShoalFolder folder;
  const Ended ended =
      Job(train_command(2, {"SHOAL_COLLECTIVE_TIMEOUT=soon"}), folder.path("")).wait(kTimeLimit);
  EXPECT_EQ(ended.code, 2) << ended.all();
  EXPECT_TRUE(contains(ended.err, "SHOAL_COLLECTIVE_TIMEOUT: expected seconds")) << ended.err;
  EXPECT_TRUE(contains(ended.err, "got 'soon'")) << ended.err;
}

TEST(Interruption, ARankThatLeavesWithExitCode0InTheMiddleEndsTheJobWithAFailure) {
  undisturbed(2);
  two_at_a_time(2, [&](int victim) {
    DisturbedRun run(2);
    const auto job = run.start({str("SHOAL_CHECKPOINT_FAILPOINT=mid-write@", victim, ":exit")});
    const Ended ended = job->wait(kTimeLimit);
    EXPECT_NE(ended.code, 124) << "the job hangs";
    EXPECT_NE(ended.code, 0) << ended.all();
    run.check_ended(*job);
    EXPECT_EQ(run.saved(), -1);
    run.expect_the_undisturbed_end();
  });
}

}  // namespace
}  // namespace shoal::testing
