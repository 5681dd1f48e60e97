#include "core/base/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/error.h"

namespace shoal {

namespace {

// Sets the team size for one test.
struct Team {
  explicit Team(int threads) : before(num_threads()) { set_num_threads(threads); }
  ~Team() { set_num_threads(before); }
  int before;
};

std::vector<std::pair<int64_t, int64_t>> ranges_of(int64_t n, int64_t grain) {
  std::mutex mutex;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

}  // namespace

TEST(ParallelFor, CoversEveryIndexOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    const Team team(threads);
    for (const int64_t n : {0, 1, 2, 7, 64, 1001}) {
      for (const int64_t grain : {0, 1, 10, 5000}) {
        int64_t next = 0;
        for (const auto& [begin, end] : ranges_of(n, grain)) {
          EXPECT_EQ(begin, next) << n << " " << grain << " " << threads;
          EXPECT_LT(begin, end);
          next = end;
        }
        EXPECT_EQ(next, n) << n << " " << grain << " " << threads;
      }
    }
  }
}

TEST(ParallelFor, GivesNoWorkerLessThanAGrain) {
  const Team team(8);
  EXPECT_EQ(ranges_of(100, 60).size(), 1U);
  EXPECT_EQ(ranges_of(100, 50).size(), 2U);
  EXPECT_EQ(ranges_of(100, 1).size(), 8U);
  for (const auto& [begin, end] : ranges_of(103, 20)) EXPECT_GE(end - begin, 20);
}

TEST(ParallelFor, SplitsTheSameWayEachTime) {
  const Team team(3);
  EXPECT_EQ(ranges_of(1000, 7), ranges_of(1000, 7));
}

TEST(ParallelTasks, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 5}) {
    const Team team(threads);
    for (const int64_t n : {0, 1, 3, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(n));
      parallel_tasks(n, [&](int64_t task) { runs[static_cast<size_t>(task)]++; });
      for (const auto& count : runs) EXPECT_EQ(count.load(), 1);
    }
  }
}

// Workers that wake late must neither run a share of a later job nor one that another has taken.
TEST(ParallelTasks, ManySmallJobsOfChangingSizesRunEachShareOnce) {
  const Team team(6);  // more than the machine may have cores
  std::vector<std::atomic<int>> runs(6);
  std::vector<int> expected(6, 0);
  for (int job = 0; job < 20000; job++) {
    const int shares = 2 + job * 7 % 5;
    run_shares(shares, [&](int i) { runs[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed); });
    for (int i = 0; i < shares; i++) expected[static_cast<size_t>(i)]++;
    for (size_t i = 0; i < 6; i++) ASSERT_EQ(runs[i].load(), expected[i]) << "job " << job << ", share " << i;
  }
}

TEST(ParallelTasks, ABodySeesATeamOfOne) {
  const Team team(3);
  std::atomic<int> sum{0};
  parallel_tasks(6, [&](int64_t) {
    EXPECT_EQ(num_threads(), 1);
    parallel_for(10, 1, [&](int64_t begin, int64_t end) { sum += static_cast<int>(end - begin); });
  });
  EXPECT_EQ(sum, 60);
  EXPECT_EQ(num_threads(), 3);
}

TEST(ParallelTasks, AForkedProcessWorksWithoutItsParentsWorkers) {
  const Team team(3);
  parallel_tasks(3, [](int64_t) {});  // the workers are there now
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<int> sum{0};
    parallel_tasks(100, [&](int64_t task) { sum += static_cast<int>(task); });
    set_num_threads(2);  // ends the team of three, whose threads do not exist here
    parallel_tasks(100, [&](int64_t task) { sum += static_cast<int>(task); });
    _exit(sum == 2 * 4950 ? 7 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(NumThreads, BelongsToTheRanksThread) {
  const Team team(4);
  int seen = 0;
  std::thread([&] { seen = num_threads(); }).join();
  EXPECT_EQ(seen, 1) << "another rank of the process starts with its own default";
  EXPECT_EQ(num_threads(), 4);
}

TEST(NumThreads, RefusesLessThanOne) {
  EXPECT_THROW(set_num_threads(0), Error);
  EXPECT_THROW(set_num_threads(-3), Error);
  EXPECT_GE(num_threads(), 1);
}

}  // namespace shoal
