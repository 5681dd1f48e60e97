// Exchanged and stale files of checkpoints: parts of other steps, runs and layouts, leftovers, links. All of
// them are detected, or do no harm; the newest good checkpoint is found, or the start is refused with the
// reasons.
#include <gtest/gtest.h>

#include <cstdio>

#include "launch/checkpoint_folder.h"
#include "launch/checkpoint_format.h"
#include "launch/crc32c.h"
#include "tests/launch/checkpoint_support.h"
#include "tests/support/error_of.h"

namespace shoal {

using test::TempFolder;
using testing::error_of;
namespace fs = std::filesystem;

namespace {

const std::string kRun = std::string(31, 'a') + "1", kOther = std::string(31, 'b') + "2";
using Files = std::map<std::string, std::string>;

std::vector<test::Logical> model() {
  return {{"model/w", DType::f32, {40, 3}, 0},
          {"model/norm", DType::bf16, {7}},
          {"optim/m/w", DType::f32, {40, 3}, 0}};
}

std::string save_one(CheckpointStore& store, Communicator& group, int64_t step, uint64_t seed) {
  return store.save(
      step,
      test::make_state(model(), group.rank(), group.size(), true, static_cast<uint64_t>(step) + 1000 * seed),
      str("{\"step\":", step, ",\"seed\":", seed, "}"), str("seed: ", seed, "\nsteps: 100\n"));
}

void save_steps(const fs::path& folder, const std::string& run, uint64_t seed, int world,
                const std::vector<int64_t>& steps = {10, 20}) {
  run_ranks(world, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder, 3, 0, run}, *group);
    for (const int64_t step : steps) EXPECT_EQ(save_one(store, *group, step, seed), "");
  });
}

Files files_of(const fs::path& folder) {
  Files files;
  for (const std::string& name : test::names_in(folder)) files[name] = test::read_all(folder / name);
  return files;
}

void put(const fs::path& folder, const Files& files) {
  fs::remove_all(folder);
  fs::create_directories(folder);
  for (const auto& [name, bytes] : files) test::write_all(folder / name, bytes);
}

class CheckpointSwap : public ::testing::Test {
 protected:
  void SetUp() override {
    save_steps(folder_.path(), kRun, 1, 2);
    save_steps(other_.path(), kOther, 2, 2);
    save_steps(layout_.path(), kRun, 1, 3);
    own10_ = files_of(folder_ / step_name(10));
    own20_ = files_of(folder_ / step_name(20));
    other10_ = files_of(other_ / step_name(10));
    other20_ = files_of(other_ / step_name(20));
    layout20_ = files_of(layout_ / step_name(20));
    ASSERT_EQ(own20_.size(), 5U);
    ASSERT_EQ(layout20_.size(), 6U);
  }

  /// Puts steps 10 and 20 back as they were saved, and nothing else.
  void restore() {
    for (const std::string& name : test::names_in(folder_.path())) fs::remove_all(folder_ / name);
    put(folder_ / step_name(10), own10_);
    put(folder_ / step_name(20), own20_);
  }

  /// find() returns `step` with the right state; every directory in `bad` is set aside with a reason.
  void expect_found(int64_t step, const std::vector<std::string>& bad, const std::string& what) {
    const auto group = make_single_communicator();
    CheckpointStore store({folder_.path(), 3, 0, kRun}, *group);
    std::optional<LoadedCheckpoint> found;
    const std::string error = error_of([&] { found = store.find(); });
    ASSERT_TRUE(found) << what << ": " << error;
    EXPECT_EQ(found->step, step) << what;
    EXPECT_EQ(found->state_json, str("{\"step\":", step, ",\"seed\":1}")) << what;
    ASSERT_EQ(found->rejected.size(), bad.size()) << what;
    for (size_t i = 0; i < bad.size(); i++) {
      const std::string& line = found->rejected[i];
      EXPECT_EQ(line.find(bad[i] + ": "), 0U) << what << ": " << line;
      EXPECT_TRUE(line.find("MANIFEST.json: ") != std::string::npos ||
                  line.find(".h5: ") != std::string::npos || line.find("state.json") != std::string::npos ||
                  line.find("config.yaml") != std::string::npos)
          << what << ": " << line;
      EXPECT_NE(line.find("(set aside as " + bad[i] + ".bad-1)"), std::string::npos) << what << ": " << line;
    }
    auto state = test::make_state(model(), 0, 1, false);
    store.load(*found, state);
    test::expect_state(model(), state, static_cast<uint64_t>(step) + 1000);
  }

  void expect_link_harmless(int64_t step, bool to_older) {
    fs::create_directory_symlink(folder_ / (to_older ? step_name(10) : "nowhere"), folder_ / step_name(step));
    expect_found(20, to_older ? std::vector<std::string>{step_name(step)} : std::vector<std::string>{},
                 "a link");
  }

  TempFolder folder_, other_, layout_;
  Files own10_, own20_, other10_, other20_, layout20_;
};

}  // namespace

TEST_F(CheckpointSwap, TwoHundredExchangesOfFilesAreDetected) {
  const std::vector<std::pair<std::string, const Files*>> sources = {
      {"this checkpoint", &own20_},
      {"step 10", &own10_},
      {"another run", &other20_},
      {"another step of another run", &other10_},
      {"another layout", &layout20_}};
  int trials = 0, equal = 0;
  const auto attempt = [&](const Files& mixed, const std::string& what) {
    if (mixed == own20_) {
      equal++;
      return;
    }
    put(folder_ / step_name(20), mixed);
    expect_found(10, {step_name(20)}, what);
    fs::remove_all(folder_ / (step_name(20) + ".bad-1"));
    trials++;
  };
  // Every file in the place of every other one.
  for (const auto& [target, bytes] : own20_)
    for (const auto& [source, files] : sources)
      for (const auto& [name, content] : *files) {
        Files mixed = own20_;
        mixed[target] = content;
        attempt(mixed, str(target, " replaced by ", name, " of ", source));
      }
  for (auto a = own20_.begin(); a != own20_.end(); a++)
    for (auto b = std::next(a); b != own20_.end(); b++) {
      Files mixed = own20_;
      std::swap(mixed[a->first], mixed[b->first]);
      attempt(mixed, str(a->first, " and ", b->first, " exchanged"));
    }
  // A whole checkpoint of another run or step, and random mixtures.
  attempt(other20_, "the checkpoint of another run");
  attempt(own10_, "the checkpoint of step 10");
  const RandomStream random(13, "mixtures");
  for (uint64_t draw = 0; trials < 200 && draw < 10000;) {
    Files mixed;
    for (const auto& [name, bytes] : own20_) mixed[name] = sources[random.below(draw++, 4)].second->at(name);
    attempt(mixed, str("mixture ending at draw ", draw));
  }
  EXPECT_EQ(trials, 200);
  if (!HasFailure()) std::printf("seed 13: 200 exchanges (%d more changed no byte): 200 detected\n", equal);
}

TEST_F(CheckpointSwap, TwoHundredStaleFoldersAreDetectedOrDoNoHarm) {
  const RandomStream random(14, "stale");
  uint64_t draw = 0;
  std::map<std::string, int> counts;
  for (int trial = 0; trial < 200 && !HasFailure(); trial++) {
    restore();
    const int64_t newer = 21 + static_cast<int64_t>(random.below(draw++, 1000));
    switch (trial % 8) {
      case 0:  // an older checkpoint under a newer name
        put(folder_ / step_name(newer), trial % 16 == 0 ? own10_ : own20_);
        expect_found(20, {step_name(newer)}, "older checkpoint under a newer name");
        counts["older under a newer name: detected"]++;
        break;
      case 1:  // what a killed save leaves, whole or in parts
      case 2: {
        Files part = own20_;
        for (const auto& [name, bytes] : own20_)
          if (random.below(draw++, 2) == 0) part.erase(name);
        const std::string name = step_name(newer) + (trial % 8 == 1 ? ".tmp-0123" : ".tmp-removed-4567");
        put(folder_ / name, part);
        expect_found(20, {}, name);
        EXPECT_FALSE(fs::exists(folder_ / name));
        counts["temporary folders: removed, no harm"]++;
        break;
      }
      case 3: {  // half removed by hand
        Files part = own20_;
        const uint64_t gone = 1 + random.below(draw++, 31);
        uint64_t bit = 1;
        for (const auto& [name, bytes] : own20_) {
          if ((gone & bit) != 0) part.erase(name);
          bit *= 2;
        }
        put(folder_ / step_name(20), part);
        expect_found(10, {step_name(20)}, str("half removed, files ", gone));
        counts["half removed: detected"]++;
        break;
      }
      case 4: {  // a manifest with one file more
        Manifest manifest = read_manifest(folder_ / step_name(20)).manifest;
        FileRecord more = manifest.files[random.below(draw++, manifest.files.size())];
        more.name = str("w", 1000 + trial, ".h5");
        manifest.files.push_back(more);
        manifest.sort();
        test::write_all(folder_ / step_name(20) / kManifestName, manifest_text(manifest));
        expect_found(10, {step_name(20)}, "manifest names a missing file");
        counts["manifest names a missing file: detected"]++;
        break;
      }
      case 5: {  // things that nobody asked for
        test::write_all(folder_ / step_name(20) / str("extra", trial), "x");
        fs::create_directory(folder_ / step_name(20) / "folder");
        test::write_all(folder_ / step_name(newer), "a file with the name of a checkpoint");
        put(folder_ / "step-21", own20_);
        put(folder_ / "best", own20_);
        put(folder_ / (step_name(newer) + ".bad-3"), own20_);
        expect_found(20, {}, "extra files");
        counts["extra files and names: no harm"]++;
        break;
      }
      case 6:  // another run's newer checkpoint
        fs::remove_all(other_.path());
        save_steps(other_.path(), kOther, 2, 2, {newer});
        put(folder_ / step_name(newer), files_of(other_ / step_name(newer)));
        expect_found(20, {step_name(newer)}, "newer checkpoint of another run");
        counts["newer one of another run: detected"]++;
        break;
      default:  // a link to an older one, or into nothing
        expect_link_harmless(newer, trial % 16 < 8);
        counts["links: detected, or no harm"]++;
    }
  }
  if (!HasFailure())
    for (const auto& [kind, count] : counts) std::printf("seed 14: %3d stale, %s\n", count, kind.c_str());
}

TEST_F(CheckpointSwap, WhenAllAreDamagedTheStartIsRefusedWithEveryReasonAndNothingIsDeleted) {
  const RandomStream random(15, "all bad");
  uint64_t draw = 0;
  for (int trial = 0; trial < 20; trial++) {
    restore();
    std::vector<std::string> names;
    for (const auto& [step, files] : {std::pair(10, &own10_), std::pair(20, &own20_)}) {
      auto it = files->begin();
      std::advance(it, static_cast<ptrdiff_t>(random.below(draw++, files->size())));
      std::string bytes = it->second;
      bytes[random.below(draw++, bytes.size())] ^= 16;
      test::write_all(folder_ / step_name(step) / it->first, bytes);
      names.push_back(it->first);
    }
    const auto group = make_single_communicator();
    for (int start = 0; start < 2; start++) {
      CheckpointStore store({folder_.path(), 1, 0, kRun}, *group);
      const std::string error = error_of([&] { store.find(); });
      EXPECT_NE(error.find("step-000000010"), std::string::npos) << error;
      EXPECT_NE(error.find("step-000000020"), std::string::npos) << error;
      EXPECT_NE(error.find("or move them away to begin at step 0"), std::string::npos) << error;
      for (const std::string& name : names)
        if (start == 0) {
          EXPECT_NE(error.find(name), std::string::npos) << error;
        }
    }
    EXPECT_EQ(files_of(folder_ / "step-000000010.bad-1").size(), 5U);
    EXPECT_EQ(files_of(folder_ / "step-000000020.bad-1").size(), 5U);
  }
  std::printf("seed 15: 20 folders with nothing but damage: 20 refused twice, nothing deleted\n");
}

TEST_F(CheckpointSwap, OnlyCheckpointsOfAnotherRunAreRefusedUnlessTheRunIsUnknown) {
  const auto group = make_single_communicator();
  {
    CheckpointStore unknown({other_.path(), 3, 0, ""}, *group);
    EXPECT_EQ(unknown.find()->run_id, kOther);
  }
  CheckpointStore store({other_.path(), 3, 0, kRun}, *group);
  const std::string error = error_of([&] { store.find(); });
  EXPECT_NE(error.find("none of 2 verifies: step-000000020: MANIFEST.json: it belongs to run " + kOther +
                       ", this folder to run " + kRun + "; to go on from it, remove the file run-id"),
            std::string::npos)
      << error;
}

TEST_F(CheckpointSwap, ForeignCheckpointInTheWayOfASaveIsSetAside) {
  put(folder_ / step_name(20), other20_);
  const auto group = make_single_communicator();
  CheckpointStore store({folder_.path(), 3, 0, kRun}, *group);
  EXPECT_EQ(save_one(store, *group, 20, 1), "");
  EXPECT_TRUE(fs::exists(folder_ / "step-000000020.bad-1"));
  expect_found(20, {}, "saved over a foreign one");
}

TEST_F(CheckpointSwap, RemovingALinkedCheckpointLeavesWhatTheLinkPointsTo) {
  const TempFolder archive;
  fs::rename(folder_ / step_name(10), archive / step_name(10));
  fs::create_directory_symlink(archive / step_name(10), folder_ / step_name(10));
  const auto group = make_single_communicator();
  CheckpointStore store({folder_.path(), 1, 0, kRun}, *group);
  EXPECT_EQ(save_one(store, *group, 30, 1), "");
  EXPECT_EQ(test::names_in(folder_.path()), (std::set<std::string>{step_name(30)}));
  EXPECT_EQ(files_of(archive / step_name(10)), own10_);
  fs::create_directory_symlink(archive / step_name(10), folder_ / (step_name(40) + ".tmp-77"));
  CheckpointStore again({folder_.path(), 1, 0, kRun}, *group);
  EXPECT_EQ(files_of(archive / step_name(10)), own10_);
  expect_found(30, {}, "after the links are gone");
}

TEST_F(CheckpointSwap, FolderBehindALinkIntoNothingIsNoRunWithoutCheckpoints) {
  const TempFolder run;
  fs::create_directory_symlink(run / "disk that is not mounted", run / "checkpoints");
  const auto group = make_single_communicator();
  const std::string error = error_of([&] {
    CheckpointStore({run / "checkpoints", 1, 0, kRun}, *group).find();
  });
  EXPECT_NE(error.find("checkpoints: cannot follow the symbolic link: No such file"), std::string::npos)
      << error;
}

}  // namespace shoal
