// Run folders that were damaged, moved, or lie on a full disk: training goes on with the right state, or says
// why not.
#include "launch/run_folder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "launch/checkpoint_folder.h"
#include "launch/command_support.h"
#include "launch/report_data.h"
#include "tests/support/error_of.h"
#include "tests/support/hostile.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

namespace fs = std::filesystem;

std::string bytes_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void put(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string id_in(const fs::path& checkpoint) {
  return read_manifest(checkpoint).manifest.run;
}

TEST(RunFolder, RunKeepsItsIdAndRefusesTheCheckpointOfAnotherRun) {
  TinyRun run;
  const RunOutcome whole = run.train(2);
  run.train(2, {"run.name=whole", "run.steps=1"});
  run.forget(9);
  const fs::path folder = run.folder / "tiny";
  const std::string id = read_run_id(folder);
  ASSERT_EQ(id.size(), 32U);
  EXPECT_EQ(id_in(run.checkpoint(3)), id);
  EXPECT_EQ(id_in(run.checkpoint(6)), id);
  EXPECT_NE(read_run_id(run.folder / "whole"), id);
  // The same shapes, another seed, a newer step: nothing but the id tells them apart.
  run.train(2, {"run.name=seeded", "run.seed=77", "run.steps=9"});
  fs::copy(run.folder / "seeded" / "checkpoints" / "step-000000009", run.checkpoint(9),
           fs::copy_options::recursive);
  const RunOutcome resumed = run.train(2);
  EXPECT_TRUE(fs::exists(folder / "checkpoints" / "step-000000009.bad-1"));
  EXPECT_EQ(resumed.state, whole.state);
  EXPECT_EQ(resumed.rows, whole.rows);
  EXPECT_EQ(read_run_id(folder), id);
  EXPECT_EQ(id_in(run.checkpoint(9)), id);
}

TEST(RunFolder, LostOrBrokenIdIsTakenFromTheCheckpoints) {
  TinyRun run;
  const fs::path file = run.folder / "tiny" / "run-id";
  run.train(1, {"run.steps=3"});
  const std::string id = bytes_of(file);
  fs::remove(file);
  run.train(1, {"run.steps=4"});
  EXPECT_EQ(bytes_of(file), id);
  for (const std::string broken : {"", "not an id\n", "0123456789abcdef0123456789abcdeg\n"}) {
    put(file, broken);
    EXPECT_EQ(read_run_id(file.parent_path()), "");
    run.train(1, {"run.steps=5"});
    run.forget(5);
  }
  EXPECT_EQ(bytes_of(file), id);
  fs::remove(file);
  fs::create_directory(file);
  expect_contains(error_of([&] { run.train(1, {"run.steps=5"}); }), "run-id");
}

TEST(RunFolder, DamagedMetricsAreCleanedAndTheRunGoesOnBitEqual) {
  TinyRun run;
  const RunOutcome whole = run.train(1);
  const fs::path file = run.folder / "tiny" / "metrics.jsonl";
  const std::string good = bytes_of(file);
  std::string garbage;
  const RandomStream random(51, "garbage");
  for (uint64_t i = 0; i < 5000; i++) garbage += static_cast<char>(random.below(i, 256));
  const std::string deep = std::string(200000, '[') + "\n";
  const std::string strange =
      "{\"kind\":\"step\",\"step\":1e300}\n{\"kind\":\"step\",\"step\":18446744073709551615}\n{\"kind\":7}\n";
  struct Damage {
    std::string bytes;
    bool rows_kept;
  };
  const std::vector<Damage> damages = {{good.substr(0, good.size() - 1), true},  // torn last row
                                       {good + "{\"kind\":\"step\",\"ste", true},
                                       {garbage + "\n" + good, true},
                                       {good + deep + strange + garbage, true},
                                       {garbage, false},
                                       {"", false}};
  const auto start_again = [&] {
    run.forget(9);
    return run.train(1);
  };
  for (size_t i = 0; i < damages.size(); i++) {
    put(file, damages[i].bytes);
    EXPECT_NO_THROW(read_run(file.parent_path())) << i;  // the report
    const RunOutcome resumed = start_again();
    EXPECT_EQ(resumed.state, whole.state) << i;
    for (const auto& row : resumed.rows)
      EXPECT_TRUE(row["step"].is_number_integer() && row["step"] <= 9) << i;
    const size_t lost = whole.rows.size() - resumed.rows.size();
    EXPECT_LE(lost, damages[i].rows_kept ? 0U : 6U) << i;
    EXPECT_EQ(resumed.rows.back(), whole.rows.back()) << i;
  }
  fs::remove(file);
  EXPECT_EQ(start_again().rows.back(), whole.rows.back());
  fs::remove(file);
  fs::create_directory(file);
  expect_contains(error_of(start_again), "metrics.jsonl");
  std::printf("seed 51: %zu damaged metrics files: training bit-equal after each\n", damages.size() + 1);
}

TEST(RunFolder, TrainingWithoutItsCheckpointsSaysSoAndKeepsTheOldRows) {
  TinyRun run;
  run.train(1, {"run.steps=6"});
  const fs::path folder = run.folder / "tiny";
  const std::string rows = bytes_of(folder / "metrics.jsonl");
  fs::remove_all(folder / "checkpoints");
  expect_contains(error_of([&] { run.train(1, {"run.resume=required"}); }), "holds no checkpoint");
  EXPECT_EQ(run.train(1).rows.size(), 10U);
  EXPECT_EQ(bytes_of(folder / "metrics.jsonl.old"), rows);
}

TEST(RunFolder, MissingConfigIsReadFromTheNewestCheckpointThatHasIt) {
  TinyRun run;
  run.train(1, {"run.steps=6"});
  const fs::path folder = run.folder / "tiny";
  const auto open = [&] { return open_run(folder.string(), {}, 1, RunUse{"eval", {}}); };
  const std::string wanted = to_yaml(open().loaded.config);
  fs::remove(folder / "config.yaml");
  EXPECT_EQ(to_yaml(open().loaded.config), wanted);
  EXPECT_EQ(stored_config(folder)->file, run.checkpoint(6) / "config.yaml");
  put(run.checkpoint(6) / "config.yaml", "run: {name: wrong}\n");
  EXPECT_EQ(stored_config(folder)->file, run.checkpoint(3) / "config.yaml");
  EXPECT_EQ(to_yaml(open().loaded.config), wanted);
  fs::remove(run.checkpoint(3) / "config.yaml");
  expect_contains(error_of(open), "there is no config.yaml in it, nor a checkpoint that holds one");
  put(folder / "config.yaml", std::string("run: {name: x\0y", 15));
  expect_contains(error_of(open), "config.yaml");
}

// Evaluation and generation neither update weights nor need the layout of the training.
TEST(RunFolder, ARunOfAnyLayoutOpensOnAnyNumberOfRanks) {
  TinyRun run;
  run.train(2, {"run.steps=1", "model.layers=2", "parallel.pp=2", "parallel.ep=1",
                "parallel.ranks_per_node=2", "parallel.pipeline.layout=[1,1]", "optim.optimizer=muon"});
  const auto layout = [&](int world, const std::vector<std::string>& settings) {
    const RunUse use{"eval", {"parallel.pp", "parallel.tp", "parallel.ranks_per_node"}};
    const TrainedRun opened = open_run((run.folder / "tiny").string(), settings, world, use);
    return layout_of(opened.loaded.config, world);
  };
  EXPECT_EQ(layout(2, {}).pp, 2);
  EXPECT_EQ(layout(1, {}).pp, 1);
  EXPECT_EQ(layout(3, {}).dp, 3);
  EXPECT_EQ(layout(2, {"parallel.pp=1"}).dp, 2);
  EXPECT_EQ(layout(2, {"parallel.pp=1", "parallel.tp=2"}).tp, 2);
  EXPECT_EQ(layout(4, {"parallel.ranks_per_node=4"}).ranks_per_node, 4);
}

TEST(RunFolder, FullDiskDoesNotEndTrainingAndTheNextSaveWorks) {
  TinyRun run;
  const SmallDisk disk(run.folder / "disk", int64_t{4} << 20);
  if (!disk.mounted())
    GTEST_SKIP() << "SKIPPED: cannot mount a tmpfs here; the file size limit is tested instead";
  const auto there = [&](std::vector<std::string> settings) {
    settings.push_back("run.folder=" + (run.folder / "disk").string());
    return settings;
  };
  const fs::path folder = run.folder / "disk" / "tiny", filler = run.folder / "disk" / "filler";
  const RunOutcome whole = run.train(2, there({}));
  for (const int64_t step : {6, 9}) fs::remove_all(folder / "checkpoints" / step_name(step));
  TinyRun::Hooks fill;
  fill.before_run = [&] { put(filler, std::string(4 << 20, 'x')); };
  // The rows of the log, the config and the tokenizer have no space either, so there is nothing to begin
  // with.
  expect_contains(error_of([&] { run.train(2, there({}), fill); }), "No space left on device");
  fs::remove(filler);
  EXPECT_EQ(committed_steps(folder / "checkpoints"), std::vector<int64_t>{3});
  // Full from just before the save of step 6 until the one of step 9.
  TinyRun::Hooks hooks;
  hooks.with_trainer = [&](Trainer& trainer) {
    trainer.checkpoints().set_failpoint([&, saves = 0](const std::string& point) mutable {
      if (point != "before-directory") return;
      EXPECT_EQ(committed_steps(folder / "checkpoints"), std::vector<int64_t>{3});
      saves++ == 0 ? put(filler, std::string(4 << 20, 'x')) : static_cast<void>(fs::remove(filler));
    });
  };
  const RunOutcome resumed = run.train(2, there({}), hooks);
  EXPECT_EQ(resumed.end, TrainEnd::done);
  EXPECT_EQ(committed_steps(folder / "checkpoints"), (std::vector<int64_t>{9, 3}));
  EXPECT_EQ(resumed.state, whole.state);
  // Rows that found no space are left out with a warning.
  EXPECT_EQ(resumed.rows.front(), whole.rows.front());
  for (const auto& row : resumed.rows)
    EXPECT_EQ(std::ranges::count(whole.rows, row), 1) << row << " is no row of the run with space";
}

TEST(RunFolder, FileSizeLimitDuringASaveActsLikeAFullDisk) {
  TinyRun run;
  const RunOutcome whole = run.train(1, {"run.name=whole"});
  TinyRun::Hooks hooks;
  std::unique_ptr<FileSizeLimit> limit;
  hooks.with_trainer = [&](Trainer& trainer) {
    trainer.checkpoints().set_failpoint([&, saves = 0](const std::string& point) mutable {
      if (point == "before-directory") limit = saves++ == 0 ? std::make_unique<FileSizeLimit>(4000) : nullptr;
    });
  };
  const RunOutcome outcome = run.train(1, {}, hooks);
  EXPECT_EQ(outcome.end, TrainEnd::done);
  EXPECT_EQ(committed_steps(run.folder / "tiny" / "checkpoints"), (std::vector<int64_t>{9, 6}));
  EXPECT_EQ(outcome.state, whole.state);
}

TEST(RunFolder, UnwritableRunFolderIsNamed) {
  TinyRun run;
  fs::permissions(run.folder.path(), fs::perms::all);
  run.train(1, {"run.steps=1", "run.name=first"});  // prepares the data
  fs::create_directory(run.folder / "closed");
  fs::permissions(run.folder / "closed",
                  fs::perms::owner_all | fs::perms::others_read | fs::perms::others_exec);
  const auto message = [&](const std::string& where) {
    return message_as_nobody([&] { run.train(1, {"run.folder=" + (run.folder / where).string()}); });
  };
  expect_contains(message("closed"), "closed/tiny: cannot be created: Permission denied; set run.folder");
  put(run.folder / "a file", "x");
  expect_contains(message("a file"), "a file/tiny: cannot be created: Not a directory");
  fs::create_directory(run.folder / "closed" / "tiny");
  expect_contains(message("closed"), "tiny/.lock: cannot create the lock file: Permission denied");
}

}  // namespace
}  // namespace shoal::testing
