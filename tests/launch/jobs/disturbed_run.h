// A run that is long enough to be disturbed, by signals and kills of its job, again and again, and that must
// end like the run that nothing has happened to, bit for bit.
#pragma once

#include <atomic>
#include <cstdlib>
#include <random>
#include <regex>
#include <thread>

#include "launch/checkpoint_format.h"
#include "tests/launch/jobs/shoal_jobs.h"

namespace shoal::testing {

constexpr int kSteps = 120;         // a checkpoint every 10
constexpr double kTimeLimit = 120;  // seconds, of each start, on a machine with other work

/// `variables`: "NAME=value".
inline std::vector<std::string> train_command(int ranks, const std::vector<std::string>& variables = {}) {
  std::vector<std::string> command = {"env"};  // replaces itself, so the job's process is mpirun
  command.insert(command.end(), variables.begin(), variables.end());
  const auto shoal = ShoalFolder::command(ranks, {"train", "tiny.yaml"});
  command.insert(command.end(), shoal.begin(), shoal.end());
  return command;
}

/// The run that nothing has happened to, on 2 or 3 ranks.
inline const ShoalFolder& undisturbed(int ranks) {
  struct Reference {
    explicit Reference(int ranks) {
      const Ended ended = Job(train_command(ranks), folder.path("")).wait(kTimeLimit);
      SHOAL_CHECK(ended.code == 0, "the undisturbed run failed with code ", ended.code, ":\n", ended.all());
    }
    ShoalFolder folder{/*slow=*/true};
  };
  if (ranks == 2) {
    static const Reference two(2);
    return two.folder;
  }
  static const Reference three(3);
  return three.folder;
}

/// The newest checkpoint's step; -1: none. All must verify.
inline int64_t newest_step(const ShoalFolder& folder) {
  int64_t newest = -1;
  if (!std::filesystem::exists(folder.checkpoints())) return newest;
  for (const auto& info : list_checkpoints(folder.checkpoints(), /*verify=*/true)) {
    EXPECT_EQ(info.problem, "") << info.path;
    newest = std::max(newest, info.step);
  }
  return newest;
}

/// The number after the last `before` in the text; -1: there is none.
inline int64_t last_number(const std::string& text, const std::string& before) {
  const size_t at = text.rfind(before);
  return at == std::string::npos ? -1 : std::strtoll(text.c_str() + at + before.size(), nullptr, 10);
}

/// A manifest without what names the run: every run has an id of its own, and so another checksum.
inline std::string without_run_id(const std::string& manifest) {
  const std::string lines = manifest.substr(0, manifest.rfind("crc32c "));
  return std::regex_replace(lines, std::regex("\"run\": ?\"[0-9a-f]{32}\""), "");
}

/// What a job must not leave in the folder once the next one has started: temporary files and folders of
/// Shoal, folders of the launcher, shared memory.
inline std::vector<std::string> leftovers(const ShoalFolder& folder) {
  std::vector<std::string> left = folder.shared_memory();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path(""))) {
    const std::string name = entry.path().filename().string();
    if (contains(name, ".tmp") || name.starts_with("pid.")) left.push_back(entry.path().string());
  }
  return left;
}

class DisturbedRun {
 public:
  explicit DisturbedRun(int ranks) : ranks_(ranks) {}

  const ShoalFolder& folder() const { return folder_; }
  int ranks() const { return ranks_; }
  std::unique_ptr<Job> start(const std::vector<std::string>& variables = {}) {
    log_begin_ = log_of_rank_0().size();
    return std::make_unique<Job>(train_command(ranks_, variables), folder_.path(""));
  }
  /// What rank 0 has logged in the present job.
  std::string log() const { return log_of_rank_0().substr(log_begin_); }

  /// After the job's end: nothing lives, nothing committed is lost, and the job had gone on from the newest
  /// checkpoint of those before it.
  void check_ended(Job& job) {
    EXPECT_TRUE(job.leaves_nothing_alive()) << job.processes().size() << " processes are alive";
    const std::string out = job.out_so_far();
    const size_t resumed = out.find("resume     ");
    if (resumed != std::string::npos) {
      EXPECT_EQ(last_number(out.substr(0, out.find('\n', resumed)), "(step "), saved_) << out;
    } else if (contains(out, "grad norm")) {
      EXPECT_EQ(saved_, -1) << "began anew\n" << out;
    }
    EXPECT_FALSE(contains(job.err_so_far(), "checkpoint rejected")) << job.err_so_far();
    const int64_t now = newest_step(folder_);
    EXPECT_GE(now, saved_) << "a saved checkpoint is lost";
    EXPECT_GE(now, last_number(out, "  checkpoint of step ")) << "a checkpoint that was reported is lost\n"
                                                              << out;
    saved_ = now;
  }
  int64_t saved() const { return saved_; }

  /// Trains the rest and compares every row of the log and every byte of the last checkpoint.
  void expect_the_undisturbed_end() {
    const std::unique_ptr<Job> job = start();
    const Ended rest = job->wait(kTimeLimit);
    EXPECT_EQ(rest.code, 0) << rest.all();
    check_ended(*job);
    const std::vector<std::string> left = leftovers(folder_);
    EXPECT_TRUE(left.empty()) << left.size() << " leftovers, " << left.front();
    EXPECT_TRUE(folder_.odd_checkpoint_names().empty()) << folder_.odd_checkpoint_names().front();
    const ShoalFolder& reference = undisturbed(ranks_);
    const auto want = reference.rows(), got = folder_.rows();
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) ASSERT_EQ(got[i], want[i]) << "row " << i;
    const auto want_files = reference.checkpoint_bytes(kSteps), files = folder_.checkpoint_bytes(kSteps);
    ASSERT_EQ(files.size(), want_files.size());
    for (const auto& [name, bytes] : want_files) {
      const bool same = name == kManifestName ? without_run_id(files.at(name)) == without_run_id(bytes)
                                              : files.at(name) == bytes;
      EXPECT_TRUE(same) << "final checkpoint: " << name << " differs";
    }
  }

 private:
  std::string log_of_rank_0() const { return file_bytes(folder_.path("runs/tiny/log/rank-0.log")); }

  ShoalFolder folder_{/*slow=*/true};
  int ranks_;
  int64_t saved_ = -1;
  size_t log_begin_ = 0;
};

/// Calls work(0), ..., work(n - 1), two at a time: one job alone leaves the machine idle while mpirun starts
/// and ends.
inline void two_at_a_time(int n, const std::function<void(int)>& work) {
  std::atomic<int> next = 0;
  auto run = [&] {
    for (int i = next++; i < n; i = next++) work(i);
  };
  std::thread other(run);
  run();
  other.join();
}

/// SHOAL_TEST_SEED repeats a run of the tests, or tries other moments.
inline uint64_t test_seed() {
  const char* given = std::getenv("SHOAL_TEST_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("replay with SHOAL_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

}  // namespace shoal::testing
