// Starts the MPI test binary under mpirun in the ways a job can go wrong (see run_probe in tests/mpi).
#include "parallel/bootstrap.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace shoal {
namespace {

struct Outcome {
  int exit_code = -1;
  std::string output;
};

/// Runs a shell command; stdout and stderr together. A command built with ASan looks for no leaks: Open MPI
/// keeps memory until exit.
Outcome run_command(const std::string& command) {
  Outcome outcome;
  std::FILE* pipe = popen(("ASAN_OPTIONS=detect_leaks=0 " + command + " 2>&1").c_str(), "r");
  std::array<char, 4096> buffer{};
  while (pipe != nullptr && std::fgets(buffer.data(), buffer.size(), pipe) != nullptr)
    outcome.output += buffer.data();
  const int status = pclose(pipe);
  if (WIFEXITED(status)) outcome.exit_code = WEXITSTATUS(status);
  return outcome;
}

/// A job that hangs ends with 124.
Outcome run_probe_job(const std::string& probe, const std::string& environment = "") {
  return run_command(str(environment, " SHOAL_TEST_PROBE=", probe,
                         " OMPI_MCA_mpi_yield_when_idle=1 timeout -k 5 60 mpirun -n 3 --oversubscribe "
                         "--allow-run-as-root --bind-to none " SHOAL_BINARY_DIR "/tests/mpi_test"));
}

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) n++;
  return n;
}

TEST(RunWorld, MP_01_AThrowingRankEndsTheJobWithItsMessageAndCode) {
  const Outcome job = run_probe_job("throw_in_step");
  EXPECT_EQ(job.exit_code, 1) << job.output;
  EXPECT_EQ(count(job.output, "[rank 1] error: probe: cannot read shard 7"), 1) << job.output;
  EXPECT_EQ(count(job.output, "error: probe"), 1) << job.output;
}

TEST(RunWorld, MP_01_AUsageErrorOfOneRankEndsTheJobWithCode2) {
  const Outcome job = run_probe_job("usage_on_one");
  EXPECT_EQ(job.exit_code, 2) << job.output;
  EXPECT_EQ(count(job.output, "[rank 1] error: config data.path: no such file"), 1) << job.output;
}

TEST(RunWorld, AUsageErrorOfAllRanksIsPrintedOnceWithoutAnAbort) {
  const Outcome job = run_probe_job("usage_on_all");
  EXPECT_EQ(job.exit_code, 2) << job.output;
  EXPECT_EQ(count(job.output, "error: config train.steps: expected >= 1, got 0"), 1) << job.output;
  EXPECT_EQ(count(job.output, "MPI_ABORT"), 0) << job.output;
}

TEST(RunWorld, AFailureOfAllRanksIsPrintedOnceWithoutAnAbort) {
  const Outcome job = run_probe_job("failure_on_all");
  EXPECT_EQ(job.exit_code, 1) << job.output;
  EXPECT_EQ(count(job.output, "probe: no space left"), 1) << job.output;
  EXPECT_EQ(job.output.substr(0, 7), "error: ") << "no rank is to blame:\n" << job.output;
  EXPECT_EQ(count(job.output, "MPI_ABORT"), 0) << job.output;
}

TEST(RunWorld, RanksWithTheSameFailureSpeakOnceAndOthersForThemselves) {
  const Outcome job = run_probe_job("two_messages");
  EXPECT_EQ(job.exit_code, 1) << job.output;
  EXPECT_EQ(count(job.output, "[ranks 0, 2] error: probe: no space left"), 1) << job.output;
  EXPECT_EQ(count(job.output, "[rank 1] error: probe: shard 1 is damaged"), 1) << job.output;
  EXPECT_EQ(count(job.output, "error: probe"), 2) << job.output;
}

TEST(RunWorld, SomeRanksWithTheSameFailureEndTheJobOfAll) {
  const Outcome job = run_probe_job("failure_on_two");
  EXPECT_EQ(job.exit_code, 1) << job.output;
  EXPECT_EQ(count(job.output, "[ranks 0, 2] error: probe: no space left"), 1) << job.output;
  EXPECT_EQ(count(job.output, "error: probe"), 1) << job.output;
}

TEST(RunWorld, AUsageErrorWithCallsInFlightStillEndsTheJob) {
  const Outcome job = run_probe_job("usage_in_flight");
  EXPECT_EQ(job.exit_code, 2) << job.output;
  EXPECT_GE(count(job.output, "error: config x: all ranks"), 1) << job.output;
}

TEST(RunWorld, RanksWithOtherCollectiveSettingsAreRefusedByName) {
  const std::string program = " --allow-run-as-root --bind-to none " SHOAL_BINARY_DIR "/tests/mpi_test";
  for (const auto& [setting, told] :
       {std::pair{"SHOAL_COLLECTIVES=mpi", "SHOAL_COLLECTIVES: mpi on some ranks, auto on others"},
        std::pair{"SHOAL_CHECK_COLLECTIVES=1", "SHOAL_CHECK_COLLECTIVES: 1 on some ranks"}}) {
    const Outcome job =
        run_command(str("SHOAL_TEST_PROBE=usage_on_all OMPI_MCA_mpi_yield_when_idle=1 timeout -k 5 60 mpirun "
                        "--oversubscribe ",
                        "-n 1 -x ", setting, program, " : -n 2", program));
    EXPECT_EQ(job.exit_code, 2) << job.output;
    EXPECT_EQ(count(job.output, told), 1) << job.output;
    EXPECT_EQ(count(job.output, "error: all ranks must be started with the same environment"), 1)
        << job.output;
  }
}

TEST(RunWorld, RefusesVariablesOfCollectivesThatAreNoneAlsoOnOneRank) {
  for (const char* name : {"SHOAL_COLLECTIVES", "SHOAL_CHECK_COLLECTIVES", "SHOAL_COLLECTIVE_TIMEOUT"}) {
    const Outcome run = run_command(
        str(name, "=fast SHOAL_TEST_PROBE=usage_on_all timeout 60 " SHOAL_BINARY_DIR "/tests/mpi_test"));
    EXPECT_EQ(run.exit_code, 2) << run.output;
    EXPECT_EQ(count(run.output, str("error: ", name, ": expected ")), 1) << run.output;
  }
}

TEST(RunWorld, MP_01_AKilledRankEndsTheJob) {
  const Outcome job = run_probe_job("kill");
  EXPECT_EQ(job.exit_code, 134) << job.output;
}

TEST(RunWorld, ReturnsTheCodeOfTheBody) {
  EXPECT_EQ(run_probe_job("code_3").exit_code, 3);
  const std::string alone = "SHOAL_TEST_PROBE=";
  EXPECT_EQ(run_command(alone + "code_3 " SHOAL_BINARY_DIR "/tests/mpi_test").exit_code, 3);
  EXPECT_EQ(run_command(alone + "none " SHOAL_BINARY_DIR "/tests/mpi_test").exit_code, 0);
}

TEST(RunWorld, PrintsOneErrorLineWithoutMpi) {
  const Outcome outcome = run_command("SHOAL_TEST_PROBE=usage_on_all " SHOAL_BINARY_DIR "/tests/mpi_test");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_EQ(outcome.output, "error: config train.steps: expected >= 1, got 0\n");
}

class Environment {
 public:
  Environment() { clear(); }
  ~Environment() { clear(); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  void set(const char* name, const char* value) { setenv(name, value, 1); }

 private:
  static void clear() {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                             "MPI_LOCALNRANKS", "PMIX_RANK", "SLURM_PROCID", "SLURM_NTASKS",
                             "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"})
      unsetenv(name);
  }
};

TEST(LaunchInfo, IsASingleProcessWithoutALauncher) {
  const Environment environment;
  const LaunchInfo info = launch_info();
  EXPECT_FALSE(info.mpi);
  EXPECT_EQ(info.size, 1);
}

TEST(LaunchInfo, ReadsOpenMpiHydraAndSlurm) {
  Environment environment;
  environment.set("SLURM_PROCID", "5");
  EXPECT_FALSE(launch_info().mpi) << "a batch script is not a step";
  environment.set("SLURM_STEP_NUM_TASKS", "8");
  environment.set("SLURM_STEP_TASKS_PER_NODE", "4(x2)");
  environment.set("SLURM_LOCALID", "1");
  EXPECT_EQ(launch_info().rank, 5);
  EXPECT_EQ(launch_info().size, 8);
  EXPECT_EQ(launch_info().local_rank, 1);
  EXPECT_EQ(launch_info().local_size, 4);
  environment.set("PMI_RANK", "3");
  environment.set("PMI_SIZE", "6");
  EXPECT_EQ(launch_info().rank, 3);
  EXPECT_EQ(launch_info().size, 6);
  environment.set("OMPI_COMM_WORLD_RANK", "1");
  environment.set("OMPI_COMM_WORLD_SIZE", "2");
  environment.set("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  environment.set("OMPI_COMM_WORLD_LOCAL_RANK", "1");
  const LaunchInfo info = launch_info();
  EXPECT_TRUE(info.mpi);
  EXPECT_EQ(info.rank, 1);
  EXPECT_EQ(info.size, 2);
  EXPECT_EQ(info.local_rank, 1);
  EXPECT_EQ(info.local_size, 2);
}

TEST(MpiLibraryVersion, NamesTheLibrary) {
  const std::string version = mpi_library_version();
  EXPECT_NE(version.find_first_of("0123456789"), std::string::npos) << version;
  EXPECT_EQ(version.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace shoal
