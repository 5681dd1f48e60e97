// Which old checkpoints are removed, and when.
#include <gtest/gtest.h>

#include "launch/checkpoint_format.h"
#include "tests/launch/checkpoint_support.h"

namespace shoal {

using test::TempFolder;

namespace {

const std::vector<test::Logical> kModel = {{"model/w", DType::f32, {9}}};

std::string save(const TempFolder& folder, int64_t step, int64_t keep_last, int64_t keep_every = 0) {
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path(), keep_last, keep_every}, *group);
  return store.save(step, test::make_state(kModel, 0, 1, true), "{}", "");
}

std::vector<int64_t> steps(const TempFolder& folder) {
  std::vector<int64_t> list;
  for (const auto& info : list_checkpoints(folder.path(), true)) {
    EXPECT_EQ(info.problem, "");
    list.push_back(info.step);
  }
  return list;
}

}  // namespace

TEST(CheckpointRetention, TheNewestOnesStayInNumericOrder) {
  const TempFolder folder;
  for (const int64_t step : {9, 10, 100, 1000000000}) EXPECT_EQ(save(folder, step, 3), "");
  EXPECT_EQ(steps(folder), (std::vector<int64_t>{1000000000, 100, 10}));
}

TEST(CheckpointRetention, ZeroKeepsEverything) {
  const TempFolder folder;
  for (int64_t step = 1; step <= 6; step++) EXPECT_EQ(save(folder, step, 0), "");
  EXPECT_EQ(steps(folder).size(), 6U);
}

TEST(CheckpointRetention, MultiplesOfKeepEveryAreNeverPruned) {
  const TempFolder folder;
  for (int64_t step = 1; step <= 11; step++) EXPECT_EQ(save(folder, step, 2, 4), "");
  EXPECT_EQ(steps(folder), (std::vector<int64_t>{11, 10, 8, 4}));
}

TEST(CheckpointRetention, CK_03_TheLastGoodOneSurvivesAFailedSave) {
  const TempFolder folder;
  EXPECT_EQ(save(folder, 1, 1), "");
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path(), 1}, *group);
  store.set_failpoint([](const std::string& point) {
    if (point == "before-rename") throw Error("stopped");
  });
  EXPECT_NE(store.save(2, test::make_state(kModel, 0, 1, true), "{}", ""), "");
  EXPECT_EQ(steps(folder), std::vector<int64_t>{1});
  EXPECT_EQ(save(folder, 2, 1), "");
  EXPECT_EQ(steps(folder), std::vector<int64_t>{2});
}

TEST(CheckpointRetention, TheOneJustSavedStaysBesideNewerOnes) {
  // Training went on from step 10 although 20 and 30 exist.
  const TempFolder folder;
  for (const int64_t step : {10, 20, 30}) EXPECT_EQ(save(folder, step, 0), "");
  EXPECT_EQ(save(folder, 15, 1), "");
  EXPECT_EQ(steps(folder), (std::vector<int64_t>{30, 15}));
}

TEST(CheckpointRetention, DamagedOnesDoNotCountAgainstGoodOnes) {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3}) EXPECT_EQ(save(folder, step, 0), "");
  test::fs::remove(folder / "step-000000003" / "MANIFEST.json");
  test::fs::resize_file(folder / "step-000000002" / "w0000.h5", 10);
  EXPECT_EQ(save(folder, 4, 2), "");
  EXPECT_EQ(test::names_in(folder.path()),
            (std::set<std::string>{"step-000000001", "step-000000002", "step-000000003", "step-000000004"}));
}

TEST(CheckpointRetention, CK_03_DirectoriesRenamedOrDeletedByHandAreTolerated) {
  const TempFolder folder;
  for (const int64_t step : {1, 2, 3}) EXPECT_EQ(save(folder, step, 0), "");
  test::fs::rename(folder / "step-000000002", folder / "best");
  test::fs::remove_all(folder / "step-000000001");
  EXPECT_EQ(save(folder, 4, 1), "");
  EXPECT_EQ(test::names_in(folder.path()), (std::set<std::string>{"best", "step-000000004"}));
  // A directory under the number of another step is not taken for it.
  test::fs::rename(folder / "best", folder / "step-000000099");
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  const auto found = store.find();
  EXPECT_EQ(found->step, 4);
  ASSERT_EQ(found->rejected.size(), 1U);
  EXPECT_EQ(found->rejected[0],
            "step-000000099: MANIFEST.json: it belongs to step 2 (set aside as step-000000099.bad-1)");
}

}  // namespace shoal
