// Every call of the save path that reaches the file system, one after the other, fails or is the last of its
// process; the call is found by counting, so none can be forgotten.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <set>

#include "launch/checkpoint_format.h"
#include "tests/launch/checkpoint_support.h"
#include "tests/launch/posix_faults.h"

namespace shoal {

using test::Fault;
using test::FaultScope;
using test::TempFolder;
namespace fs = std::filesystem;

namespace {

std::vector<test::Logical> tiny_model() {
  return {{"model/w", DType::f32, {12, 3}, 0}, {"model/norm", DType::bf16, {7}}};
}

std::string save(CheckpointStore& store, Communicator& group, int64_t step) {
  return store.save(
      step, test::make_state(tiny_model(), group.rank(), group.size(), true, static_cast<uint64_t>(step)),
      str("{\"step\":", step, "}"), "seed: 1\n");
}

/// The step that the next start finds; its bytes are all of that step.
int64_t next_start_finds(const fs::path& folder) {
  const auto group = make_single_communicator();
  CheckpointStore store({folder}, *group);
  for (const std::string& name : test::names_in(folder))
    EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
  const auto found = store.find();
  if (!found) return -1;
  EXPECT_TRUE(found->rejected.empty()) << found->rejected.front();
  auto state = test::make_state(tiny_model(), 0, 1, false);
  store.load(*found, state);
  test::expect_state(tiny_model(), state, static_cast<uint64_t>(found->step));
  return found->step;
}

/// A folder with step 1, from which step 2 is saved; step 1 is pruned then.
class Saving {
 public:
  Saving() {
    const auto group = make_single_communicator();
    CheckpointStore store({before_.path() / "checkpoints"}, *group);
    EXPECT_EQ(save(store, *group, 1), "");
    fs::create_directory(work_.path() / "checkpoints");
    again();
    CheckpointStore second({folder(), 1}, *group);
    const FaultScope scope;
    EXPECT_EQ(save(second, *group, 2), "");
    calls_ = scope.calls();
  }
  /// Back to step 1 only.
  void again() const {
    fs::remove_all(folder());
    fs::copy(before_.path() / "checkpoints", folder(), fs::copy_options::recursive);
  }
  fs::path folder() const { return work_.path() / "checkpoints"; }
  const std::vector<std::string>& calls() const { return calls_; }
  int num_calls() const { return static_cast<int>(calls_.size()); }
  int commit() const {
    return static_cast<int>(std::find(calls_.begin(), calls_.end(), "renameat2") - calls_.begin());
  }
  std::string text(int call) const { return str("call ", call, ", ", calls_[static_cast<size_t>(call)]); }

 private:
  TempFolder before_, work_;
  std::vector<std::string> calls_;
};

}  // namespace

TEST(CheckpointPosix, CountsTheCallsOfTheSavePath) {
  const Saving saving;
  for (const char* name : {"mkdir", "statvfs", "open", "posix_fallocate", "pwrite", "fsync", "close",
                           "renameat2", "opendir", "remove", "unlinkat"}) {
    const std::string text = name;
    // The C++ library lists folders through opendir or through openat.
    const auto counted = std::count_if(
        saving.calls().begin(), saving.calls().end(),
        [&](const std::string& call) { return call == text || (text == "opendir" && call == "openat"); });
    EXPECT_GE(counted, 1) << name;
  }
  // Shard, state, configuration and manifest, each written and synced; the folder, and its parent.
  EXPECT_GE(std::count(saving.calls().begin(), saving.calls().end(), "fsync"), 6);
  EXPECT_LT(saving.commit(), saving.num_calls());
}

TEST(CheckpointPosix, CK_01_AKillBeforeOrInAnyCallLeavesTheOldOrTheNewCheckpointWhole) {
  const Saving saving;
  for (int call = 0; call < saving.num_calls(); call++) {
    for (const Fault fault : {Fault::kill, Fault::torn}) {
      SCOPED_TRACE(saving.text(call) + (fault == Fault::kill ? ", before" : ", in the middle or after"));
      saving.again();
      const pid_t child = fork();
      if (child == 0) {
        const auto group = make_single_communicator();
        CheckpointStore store({saving.folder(), 1}, *group);
        const FaultScope scope(fault, call);
        save(store, *group, 2);
        _exit(7);  // the call was not reached
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
      const bool committed = call > saving.commit() || (call == saving.commit() && fault == Fault::torn);
      EXPECT_EQ(next_start_finds(saving.folder()), committed ? 2 : 1);
    }
  }
}

TEST(CheckpointPosix, AnErrorOfAnyCallSkipsTheSaveOrDoesNoHarmAndTheNextSaveWorks) {
  const Saving saving;
  for (int call = 0; call < saving.num_calls(); call++) {
    for (const Fault fault : {Fault::eio, Fault::enospc}) {
      SCOPED_TRACE(saving.text(call) + (fault == Fault::eio ? ", EIO" : ", ENOSPC"));
      saving.again();
      const auto group = make_single_communicator();
      CheckpointStore store({saving.folder(), 1}, *group);
      std::string message;
      {
        const FaultScope scope(fault, call);
        message = save(store, *group, 2);
        ASSERT_GT(scope.calls().size(), static_cast<size_t>(call));
      }
      // The rename stands between two syncs of a folder: open, fsync, close. A close after the fsync does no
      // harm.
      const int commit = saving.commit();
      EXPECT_EQ(message.empty(), call == commit - 1 || call > commit + 2) << message;
      if (message.empty()) {
        EXPECT_EQ(next_start_finds(saving.folder()), 2);
      } else {
        EXPECT_NE(message.find(fault == Fault::eio ? "(errno 5)" : "(errno 28)"), std::string::npos)
            << message;
        EXPECT_NE(message.find("earlier checkpoints are untouched"), std::string::npos) << message;
        EXPECT_EQ(next_start_finds(saving.folder()), 1) << message;
      }
      EXPECT_EQ(save(store, *group, 3), "");
      EXPECT_EQ(next_start_finds(saving.folder()), 3);
    }
  }
}

TEST(CheckpointPosix, AnInterruptedOrShortCallIsGoneOnWith) {
  const Saving saving;
  // Those that POSIX lets a signal interrupt.
  const std::set<std::string> interruptible = {"open",  "pwrite", "pread",
                                               "fsync", "close",  "posix_fallocate"};
  int tried = 0;
  for (int call = 0; call < saving.num_calls(); call++) {
    const std::string& name = saving.calls()[static_cast<size_t>(call)];
    for (const Fault fault : {Fault::eintr, Fault::short_write}) {
      if (fault == Fault::eintr ? !interruptible.contains(name) : name != "pwrite") continue;
      SCOPED_TRACE(saving.text(call) + (fault == Fault::eintr ? ", EINTR" : ", a short write"));
      saving.again();
      const auto group = make_single_communicator();
      CheckpointStore store({saving.folder(), 1}, *group);
      {
        const FaultScope scope(fault, call);
        EXPECT_EQ(save(store, *group, 2), "");
      }
      EXPECT_EQ(next_start_finds(saving.folder()), 2);
      EXPECT_EQ(test::names_in(saving.folder()), std::set<std::string>{step_name(2)})
          << "step 1 is not pruned";
      tried++;
    }
  }
  EXPECT_GE(tried, 30);
}

TEST(CheckpointPosix, AnErrorOnAnotherRankGivesItsNameOnAllRanks) {
  const TempFolder folder;
  for (int call = 0;; call++) {
    size_t num_calls = 0;
    std::string messages[2];
    run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
      CheckpointStore store({folder.path(), 1}, *group);
      EXPECT_EQ(save(store, *group, 2 * call + 1), "");
      const bool victim = group->rank() == 1;
      {
        const FaultScope scope(victim ? Fault::eio : Fault::none, call);
        messages[group->rank()] = save(store, *group, 2 * call + 2);
        if (victim) num_calls = scope.calls().size();
      }
    });
    if (num_calls <= static_cast<size_t>(call)) {
      EXPECT_GE(call, 6) << "rank 1 creates, reserves, writes, syncs and closes a file";
      break;
    }
    EXPECT_EQ(messages[0], messages[1]);
    EXPECT_NE(messages[0].find("rank 1: "), std::string::npos) << messages[0];
    EXPECT_NE(messages[0].find("(errno 5)"), std::string::npos) << messages[0];
    EXPECT_EQ(next_start_finds(folder.path()), 2 * call + 1);
  }
}

}  // namespace shoal
