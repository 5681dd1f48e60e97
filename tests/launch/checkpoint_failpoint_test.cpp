// Errors, full disks and kills at every named point of the save path.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <mutex>

#include "launch/checkpoint_format.h"
#include "tests/launch/checkpoint_support.h"

namespace shoal {

using test::TempFolder;
namespace fs = std::filesystem;

namespace {

std::vector<test::Logical> two_tensors() {
  return {{"model/w", DType::f32, {40, 3}, 0}, {"model/norm", DType::bf16, {7}}};
}

std::string save_model(CheckpointStore& store, Communicator& group, int64_t step) {
  return store.save(
      step, test::make_state(two_tensors(), group.rank(), group.size(), true, static_cast<uint64_t>(step)),
      str("{\"step\":", step, "}"), "seed: 1\n");
}

// In the order of docs/checkpoints.md. A checkpoint exists from "after-commit" on for errors, and from
// "after-rename" on for kills.
const std::vector<std::string> kBeforeRename = {
    "before-directory", "after-directory", "before-layout",  "after-layout",     "before-create",
    "before-reserve",   "before-write",    "mid-write",      "before-file-sync", "after-file-sync",
    "before-state",     "before-manifest", "after-manifest", "before-rename"};
const std::vector<std::string> kAfterCommit = {"after-commit", "prune-renamed", "prune-manifest-removed",
                                               "after-prune"};
// Where every writing rank comes past; the others are rank 0's.
const std::vector<std::string> kEveryRank = {"before-layout",    "after-layout",   "before-create",
                                             "before-reserve",   "before-write",   "mid-write",
                                             "before-file-sync", "after-file-sync"};

std::vector<std::string> all_points() {
  std::vector<std::string> points = kBeforeRename;
  points.emplace_back("after-rename");
  points.insert(points.end(), kAfterCommit.begin(), kAfterCommit.end());
  return points;
}

void expect_found(const fs::path& folder, int64_t step, const std::string& what) {
  const auto group = make_single_communicator();
  CheckpointStore store({folder}, *group);
  for (const std::string& name : test::names_in(folder))
    EXPECT_EQ(name.find(".tmp-"), std::string::npos) << what << ": " << name;
  const auto found = store.find();
  ASSERT_TRUE(found) << what;
  EXPECT_EQ(found->step, step) << what;
  EXPECT_TRUE(found->rejected.empty()) << what;
  auto state = test::make_state(two_tensors(), 0, 1, false);
  store.load(*found, state);
  test::expect_state(two_tensors(), state, static_cast<uint64_t>(step));
}

/// 2 MiB of tmpfs, when this machine lets us mount it.
struct SmallDisk {
  explicit SmallDisk(const fs::path& path) : path(path) {
    if (mount("tmpfs", path.c_str(), "tmpfs", 0, "size=2m") != 0) failure = errno;
  }
  ~SmallDisk() {
    if (failure == 0) umount2(path.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  fs::path path;
  int failure = 0;
};

std::set<std::string> only(int64_t step) {
  return {step_name(step)};
}

}  // namespace

TEST(CheckpointFailpoint, SavingPassesEveryPointInTheDocumentedOrder) {
  const TempFolder folder;
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path(), 1}, *group);
  EXPECT_EQ(save_model(store, *group, 1), "");
  std::vector<std::string> passed;
  store.set_failpoint([&](const std::string& point) { passed.push_back(point); });
  EXPECT_EQ(save_model(store, *group, 2), "");
  EXPECT_EQ(passed, all_points());
}

TEST(CheckpointFailpoint, AnErrorOnAnyRankGivesTheSameMessageOnAllAndLeavesTheOldCheckpoint) {
  for (const std::string& point : all_points()) {
    for (int victim = 0; victim < 3; victim++) {
      const bool everywhere = std::find(kEveryRank.begin(), kEveryRank.end(), point) != kEveryRank.end();
      if (victim > 0 && !everywhere) continue;
      const bool committed = std::find(kAfterCommit.begin(), kAfterCommit.end(), point) != kAfterCommit.end();
      const TempFolder folder;
      std::mutex mutex;
      std::set<std::string> messages;
      run_ranks(3, [&](const std::shared_ptr<Communicator>& group) {
        CheckpointStore store({folder.path(), 1}, *group);
        EXPECT_EQ(save_model(store, *group, 1), "");
        store.set_failpoint([&](const std::string& at) {
          if (at == point && group->rank() == victim) throw Error("the disk burns");
        });
        const std::string message = save_model(store, *group, 2);
        // The first save after the failure works.
        store.set_failpoint({});
        group->barrier();
        if (group->rank() == 0 && !committed) {
          EXPECT_EQ(test::names_in(folder.path()), only(1)) << point;
        }
        group->barrier();
        EXPECT_EQ(save_model(store, *group, 3), "");
        const std::lock_guard lock(mutex);
        messages.insert(message);
      });
      ASSERT_EQ(messages.size(), 1U) << point;
      const std::string& message = *messages.begin();
      if (committed) {
        EXPECT_EQ(message, "") << point;
      } else {
        EXPECT_NE(message.find("checkpoint of step 2 in " + folder.path().string() + " was not written: "),
                  std::string::npos);
        EXPECT_NE(message.find("the disk burns; earlier checkpoints are untouched"), std::string::npos)
            << message;
        if (everywhere) {
          EXPECT_NE(message.find(str("rank ", victim, ": the disk burns")), std::string::npos);
        }
      }
      expect_found(folder.path(), 3, point);
    }
  }
}

TEST(CheckpointFailpoint, CK_01_H5_03_AfterAKillAtAnyPointTheNewestWholeCheckpointIsFound) {
  for (const std::string& point : all_points()) {
    const TempFolder folder;
    {
      const auto group = make_single_communicator();
      CheckpointStore store({folder.path(), 1}, *group);
      ASSERT_EQ(save_model(store, *group, 1), "");
    }
    const pid_t child = fork();
    if (child == 0) {
      const auto group = make_single_communicator();
      setenv("SHOAL_CHECKPOINT_FAILPOINT", (point + ":kill").c_str(), 1);
      CheckpointStore store({folder.path(), 1}, *group);
      save_model(store, *group, 2);
      _exit(7);  // the point was not reached
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << point << ": status " << status;
    const bool old = std::find(kBeforeRename.begin(), kBeforeRename.end(), point) != kBeforeRename.end();
    expect_found(folder.path(), old ? 1 : 2, point);
    // And the same step can be saved again.
    const auto group = make_single_communicator();
    CheckpointStore store({folder.path(), 1}, *group);
    EXPECT_EQ(save_model(store, *group, 2), "");
    expect_found(folder.path(), 2, point);
  }
}

TEST(CheckpointFailpoint, CK_01_AfterAKillAtARandomMomentOfManySavesNothingCommittedIsLost) {
  const RandomStream random(3, "kills");
  for (uint64_t trial = 0; trial < 30; trial++) {
    const TempFolder folder;
    int channel[2];
    ASSERT_EQ(pipe(channel), 0);
    const pid_t child = fork();
    if (child == 0) {
      // One byte for each point passed, 'C' for each save that has returned.
      const auto tell = [&](char what) {
        if (write(channel[1], &what, 1) != 1) _exit(8);
      };
      run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
        CheckpointStore store({folder.path(), 2}, *group);
        store.set_failpoint([&](const std::string&) { tell('.'); });
        for (int64_t step = 1; step <= 8; step++) {
          if (!save_model(store, *group, step).empty()) _exit(9);
          if (group->rank() == 0) tell('C');
        }
      });
      _exit(0);
    }
    close(channel[1]);
    // The child goes on while the signal is on its way, so the moment is not tied to a point.
    int64_t committed = 0;
    char what = 0;
    for (uint64_t left = 30 + random.below(trial, 120); left > 0 && read(channel[0], &what, 1) == 1; left--)
      committed += what == 'C' ? 1 : 0;
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) != 0) << WEXITSTATUS(status);
    while (read(channel[0], &what, 1) == 1) committed += what == 'C' ? 1 : 0;
    close(channel[0]);
    ASSERT_GE(committed, 1) << "killed before the first save; let more points pass";
    const auto group = make_single_communicator();
    CheckpointStore store({folder.path()}, *group);
    const int64_t step = store.find()->step;
    EXPECT_GE(step, committed);
    EXPECT_LE(step, committed + 1);
    expect_found(folder.path(), step, str("trial ", trial));
  }
}

TEST(CheckpointFailpoint, CK_07_NothingNamesACheckpointBeforeAllRanksAreDone) {
  // Rank 0 has done its part when rank 1 fails: the folder must never have shown step 2.
  const TempFolder folder;
  run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder.path()}, *group);
    EXPECT_EQ(save_model(store, *group, 1), "");
    store.set_failpoint([&](const std::string& point) {
      if (group->rank() != 1 || point != "before-file-sync") return;
      // Wait for rank 0's file; its size is reserved early, so its last step before the gather is not
      // visible.
      for (const std::string& name : test::names_in(folder.path())) {
        if (name == step_name(1)) continue;
        EXPECT_EQ(name.find(step_name(2) + ".tmp-"), 0U) << name;
        EXPECT_FALSE(fs::exists(folder.path() / name / kManifestName));
      }
      throw Error("rank 1 stops");
    });
    EXPECT_NE(save_model(store, *group, 2), "");
  });
  EXPECT_EQ(test::names_in(folder.path()), only(1));
}

TEST(CheckpointFailpoint, TheEnvironmentVariableStopsOneRank) {
  setenv("SHOAL_CHECKPOINT_FAILPOINT", "mid-write@1:error", 1);
  const TempFolder folder;
  run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder.path()}, *group);
    EXPECT_NE(save_model(store, *group, 1).find("rank 1: failpoint mid-write: error asked for by"),
              std::string::npos);
  });
  setenv("SHOAL_CHECKPOINT_FAILPOINT", "mid-write:delay:1", 1);
  const auto group = make_single_communicator();
  CheckpointStore delayed({folder.path()}, *group);
  EXPECT_EQ(save_model(delayed, *group, 1), "");
  for (const char* wrong : {"mid-write", "mid-write:explode", "mid-write:delay:x", "Mid:kill", "a@x:kill"}) {
    setenv("SHOAL_CHECKPOINT_FAILPOINT", wrong, 1);
    EXPECT_THROW(CheckpointStore({folder.path()}, *group), UsageError) << wrong;
  }
  unsetenv("SHOAL_CHECKPOINT_FAILPOINT");
}

TEST(CheckpointFailpoint, AFileSizeLimitSkipsTheSaveAndKeepsTheOldCheckpoint) {
  const TempFolder folder;
  {
    const auto group = make_single_communicator();
    CheckpointStore store({folder.path()}, *group);
    ASSERT_EQ(save_model(store, *group, 1), "");
  }
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{600, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto group = make_single_communicator();
    CheckpointStore store({folder.path()}, *group);
    const std::string message = save_model(store, *group, 2);
    const bool right = message.find("w0000.h5: cannot reserve") != std::string::npos &&
                       message.find("File too large") != std::string::npos &&
                       test::names_in(folder.path()) == only(1);
    const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &none);
    _exit(!right ? 1 : save_model(store, *group, 3).empty() ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  expect_found(folder.path(), 3, "after the limit");
}

TEST(CheckpointFailpoint, AFullDiskSkipsTheSaveKeepsTheOldOneAndTheNextSaveWorks) {
  const TempFolder folder;
  const fs::path disk = folder / "disk";
  fs::create_directory(disk);
  const SmallDisk mounted(disk);
  if (mounted.failure != 0)
    GTEST_SKIP() << "SKIPPED: cannot mount a tmpfs here (errno " << mounted.failure
                 << "); the file size limit is tested instead";
  const fs::path checkpoints = disk / "checkpoints";
  for (const std::string point : {"", "before-create", "before-reserve", "before-state", "before-manifest"}) {
    run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
      CheckpointStore store({checkpoints}, *group);
      const auto fill = [&] {
        if (group->rank() == 0) test::write_all(disk / "filler", std::string(3 << 20, 'x'));
      };
      EXPECT_EQ(save_model(store, *group, 1), "");
      if (point.empty()) fill();
      group->barrier();
      store.set_failpoint([&](const std::string& at) {
        if (at == point) fill();
      });
      const std::string message = save_model(store, *group, 2);
      EXPECT_NE(message.find("was not written"), std::string::npos) << point;
      EXPECT_NE(message.find(point.empty() ? "not enough space: needed " : "No space left on device"),
                std::string::npos)
          << point << ": " << message;
      EXPECT_NE(message.find(" needed "), std::string::npos) << message;
      EXPECT_NE(message.find(" free "), std::string::npos) << message;
      group->barrier();
      if (group->rank() == 0) {
        EXPECT_EQ(test::names_in(checkpoints), only(1));
        fs::remove(disk / "filler");
      }
      group->barrier();
      store.set_failpoint({});
      EXPECT_EQ(save_model(store, *group, 3), "");
    });
    expect_found(checkpoints, 3, point);
    fs::remove_all(checkpoints);
  }
}

}  // namespace shoal
