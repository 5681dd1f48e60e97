// Saving, finding and loading without faults: dtypes, layouts, arguments, retention.
#include <gtest/gtest.h>

#include "core/base/text.h"
#include "launch/checkpoint_box.h"
#include "launch/checkpoint_format.h"
#include "tests/launch/checkpoint_support.h"
#include "tests/support/error_of.h"

namespace shoal {

using test::Logical;
using test::make_state;
using test::TempFolder;
using testing::error_of;

namespace {

void save_with(int world, const test::fs::path& folder, int64_t step, const std::vector<Logical>& model,
               uint64_t seed = 1) {
  run_ranks(world, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder}, *group);
    EXPECT_EQ(store.save(step, make_state(model, group->rank(), world, true, seed),
                         str("{\"step\":", step, "}"), "model: {layers: 2}\n"),
              "");
  });
}

void load_with(int world, const test::fs::path& folder, int64_t step, const std::vector<Logical>& model,
               uint64_t seed = 1) {
  run_ranks(world, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder}, *group);
    const auto found = store.find();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->step, step);
    EXPECT_EQ(found->state_json, str("{\"step\":", step, "}"));
    EXPECT_EQ(found->config_yaml, "model: {layers: 2}\n");
    EXPECT_EQ(found->path, folder / step_name(step));
    EXPECT_TRUE(found->rejected.empty());
    auto state = make_state(model, group->rank(), world, false, seed);
    store.load(*found, state);
    test::expect_state(model, state, seed);
  });
}

}  // namespace

TEST(CheckpointStore, EveryDtypeAndShapeSavedByTwoRanksLoadsOnAnyNumber) {
  for (const int writers : {1, 2, 3, 4}) {
    const TempFolder folder;
    save_with(writers, folder.path(), 7, test::mixed_model());
    for (const int readers : {1, 2, 3, 4}) load_with(readers, folder.path(), 7, test::mixed_model());
  }
}

TEST(CheckpointStore, RE_01_ExpertWeightsAndMomentsSurviveAChangeOfExpertParallelismAndBack) {
  std::vector<Logical> model;
  for (const char* prefix : {"model/", "optim/m/", "optim/v/"})
    model.push_back({str(prefix, "layers.0.experts.up"), DType::f32, {4, 6, 3}, 0});
  const TempFolder one, two, four;
  save_with(1, one.path(), 1, model);
  const auto convert = [&](const TempFolder& from, const TempFolder& to, int world, int64_t step) {
    run_ranks(world, [&](const std::shared_ptr<Communicator>& group) {
      auto state = make_state(model, group->rank(), world, false);
      CheckpointStore source({from.path()}, *group);
      source.load(*source.find(), state);
      CheckpointStore target({to.path()}, *group);
      EXPECT_EQ(target.save(step, state, str("{\"step\":", step, "}"), "model: {layers: 2}\n"), "");
    });
  };
  convert(one, two, 2, 2);
  convert(two, four, 4, 3);
  convert(four, one, 1, 4);
  load_with(1, one.path(), 4, model);
  load_with(2, four.path(), 3, model);
}

TEST(CheckpointStore, RE_03_GateAndUpHalvesAreCutSeparatelyAndReassemble) {
  // [2, F, D]: half 0 is the gate, filled with 1, half 1 is up, filled with 2; sharded over F.
  const int64_t F = 8, D = 3;
  const TempFolder folder;
  const auto shard = [&](int rank, int world) {
    StateTensor t;
    t.name = "model/gate_up";
    t.global_shape = {2, F, D};
    const int64_t begin = F * rank / world, end = F * (rank + 1) / world;
    t.box = {{0, begin, 0}, {2, end - begin, D}};
    t.value = Tensor::zeros(t.box.extent, DType::f32);
    return t;
  };
  run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
    StateTensor t = shard(group->rank(), 2);
    for (int64_t i = 0; i < t.value.numel(); i++)
      t.value.data<float>()[i] = i < t.value.numel() / 2 ? 1.F : 2.F;
    CheckpointStore store({folder.path()}, *group);
    EXPECT_EQ(store.save(1, {t}, "{}", ""), "");
  });
  for (const int world : {1, 4})
    run_ranks(world, [&](const std::shared_ptr<Communicator>& group) {
      StateTensor t = shard(group->rank(), world);
      CheckpointStore store({folder.path()}, *group);
      store.load(*store.find(), {t});
      const auto values = t.value.to_vector<float>();
      for (size_t i = 0; i < values.size(); i++) EXPECT_EQ(values[i], i < values.size() / 2 ? 1.F : 2.F);
    });
}

TEST(CheckpointStore, H5_01_RanksThatOwnNothingTakePart) {
  // 4 ranks, 2 experts: ranks 2 and 3 hold no row of anything.
  const std::vector<Logical> model = {{"model/experts", DType::f32, {2, 5}, 0}};
  const TempFolder folder;
  const auto range = [](int rank) { return ShardRange{std::min(rank, 2), std::min(rank + 1, 2)}; };
  run_ranks(4, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder.path()}, *group);
    EXPECT_EQ(store.save(1, {test::make_shard(model[0], range(group->rank()), true, 1)}, "{}", ""), "");
    const std::vector<StateTensor> state = {test::make_shard(model[0], range(group->rank()), false, 1)};
    store.load(*store.find(), state);
    test::expect_state(model, state);
  });
  EXPECT_EQ(test::names_in(folder / "step-000000001"),
            (std::set<std::string>{"MANIFEST.json", "config.yaml", "state.json", "w0000.h5", "w0001.h5"}));
}

TEST(CheckpointStore, H5_05_UnevenShardsWithEmptyRanksKeepTheirOrder) {
  const std::vector<int64_t> sizes = {3, 0, 5, 0};
  const std::vector<Logical> model = {{"model/rows", DType::i32, {8, 2}, 0}};
  const TempFolder folder;
  run_ranks(4, [&](const std::shared_ptr<Communicator>& group) {
    int64_t begin = 0;
    for (int r = 0; r < group->rank(); r++) begin += sizes[static_cast<size_t>(r)];
    const ShardRange range{begin, begin + sizes[static_cast<size_t>(group->rank())]};
    CheckpointStore store({folder.path()}, *group);
    EXPECT_EQ(
        store.save(3, {test::make_shard(model[0], range, true, 1)}, "{\"step\":3}", "model: {layers: 2}\n"),
        "");
  });
  for (const int world : {1, 3}) load_with(world, folder.path(), 3, model);
}

TEST(CheckpointStore, EqualCopiesAreWrittenOnceAndInTurns) {
  std::vector<Logical> model;
  for (int i = 0; i < 6; i++) model.push_back({str("model/w", i), DType::f32, {100}});
  const TempFolder folder;
  save_with(3, folder.path(), 1, model);
  for (const StoredTensor& tensor : list_tensors(folder / "step-000000001")) EXPECT_EQ(tensor.num_pieces, 1);
  for (const char* name : {"w0000.h5", "w0001.h5", "w0002.h5"})
    EXPECT_TRUE(test::fs::exists(folder.path() / "step-000000001" / name)) << name;
  load_with(2, folder.path(), 1, model);
}

TEST(CheckpointStore, RS_13_SavingWhatWasLoadedGivesTheSameBytes) {
  const TempFolder first, second;
  save_with(3, first.path(), 5, test::mixed_model());
  run_ranks(3, [&](const std::shared_ptr<Communicator>& group) {
    auto state = make_state(test::mixed_model(), group->rank(), 3, false);
    CheckpointStore from({first.path()}, *group), to({second.path()}, *group);
    const auto found = from.find();
    from.load(*found, state);
    EXPECT_EQ(to.save(found->step, state, found->state_json, found->config_yaml), "");
  });
  const auto names = test::names_in(first / "step-000000005");
  EXPECT_EQ(names, test::names_in(second / "step-000000005"));
  EXPECT_EQ(names.size(), 6U);
  for (const std::string& name : names)
    EXPECT_EQ(test::read_all(first / "step-000000005" / name),
              test::read_all(second / "step-000000005" / name))
        << name;
}

TEST(CheckpointStore, LargeTensorsCrossBlockAndBufferBorders) {
  // 70 MiB in one dataset, sharded over its inner dimension when read.
  const Logical large{"model/large", DType::u8, {7, 10, 1024 * 1024}, 1};
  const TempFolder folder;
  save_with(1, folder.path(), 1, {large});
  load_with(3, folder.path(), 1, {large});
  const Logical narrow{"model/narrow", DType::u8, {70000, 16}, 1};
  save_with(2, folder.path(), 2, {narrow});
  load_with(3, folder.path(), 2, {narrow});
}

TEST(CheckpointStore, RS_07_AnUnmetRequestIsAnErrorAndAnEmptyFolderIsNot) {
  const TempFolder folder;
  const auto group = make_single_communicator();
  for (const auto& path : {folder.path(), folder / "missing"}) {
    CheckpointStore store({path}, *group);
    EXPECT_EQ(store.find(), std::nullopt);
    EXPECT_EQ(error_of([&] { store.find(20); }),
              str("checkpoint of step 20 in ", path.string(), ": not found; it holds no checkpoint"));
    EXPECT_FALSE(test::fs::exists(folder / "missing"));
  }
  save_with(1, folder.path(), 10, test::mixed_model());
  CheckpointStore store({folder.path()}, *group);
  EXPECT_EQ(store.find(10)->step, 10);
  EXPECT_EQ(error_of([&] { store.find(20); }),
            str("checkpoint of step 20 in ", folder.path().string(), ": not found; it holds steps 10"));
}

TEST(CheckpointStore, CK_09_EveryMismatchIsNamedInOneErrorOnAllRanks) {
  const TempFolder folder;
  save_with(2, folder.path(), 1,
            {{"model/w", DType::f32, {8, 2}},
             {"optim/m/w", DType::f32, {8, 2}},
             {"optim/v/w", DType::f32, {8, 2}}});
  const std::vector<Logical> other = {{"model/w", DType::bf16, {8, 2}},
                                      {"optim/m/w", DType::f32, {4, 2}},
                                      {"optim/v/ww", DType::f32, {8, 2}}};
  run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
    CheckpointStore store({folder.path()}, *group);
    const auto state = make_state(other, group->rank(), 2, false);
    const std::string text = error_of([&] { store.load(*store.find(), state); });
    for (const char* part : {"model/w: expected dtype bf16, the checkpoint has f32",
                             "optim/m/w: expected shape [4, 2], the checkpoint has [8, 2]",
                             "optim/v/ww: not in the checkpoint, did you mean 'optim/v/w'?",
                             "optim/v/w: in the checkpoint, but nothing asks for it"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
    for (const StateTensor& tensor : state)  // nothing was written
      EXPECT_EQ(std::to_integer<int>(tensor.value.bytes()[0]), 0xEE);
  });
}

TEST(CheckpointStore, AnotherPrecisionIsOneLineAndNotOnePerTensor) {
  const TempFolder folder;
  save_with(1, folder.path(), 1,
            {{"model/a", DType::f32, {4}}, {"model/b", DType::f32, {4}}, {"model/c", DType::f32, {4}}});
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  const auto state =
      make_state({{"model/a", DType::f64, {4}}, {"model/b", DType::f64, {4}}, {"model/c", DType::f64, {4}}},
                 0, 1, false);
  const std::string text = error_of([&] { store.load(*store.find(), state); });
  EXPECT_NE(text.find("model/a and 2 more: expected dtype f64, the checkpoint has f32"), std::string::npos)
      << text;
  EXPECT_EQ(text.find("model/b"), std::string::npos) << text;
}

TEST(CheckpointStore, ExtraTensorsAreRefusedUnlessAllowed) {
  const TempFolder folder;
  save_with(1, folder.path(), 1, test::mixed_model());
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  const std::vector<Logical> part = {test::mixed_model()[0]};
  const auto state = make_state(part, 0, 1, false);
  const auto found = store.find();
  EXPECT_NE(error_of([&] { store.load(*found, state); }).find("nothing asks for it"), std::string::npos);
  store.load(*found, state, true);
  test::expect_state(part, state);
}

TEST(CheckpointStore, WrongArgumentsAreErrorsOnAllRanksAndWriteNothing) {
  const TempFolder folder;
  const Logical w{"model/w", DType::f32, {4, 2}, 0};
  const auto refuse = [&](const std::string& expected,
                          const std::function<std::vector<StateTensor>(int rank)>& state_of) {
    run_ranks(2, [&](const std::shared_ptr<Communicator>& group) {
      CheckpointStore store({folder / "checkpoints"}, *group);
      const std::string text = error_of([&] { store.save(1, state_of(group->rank()), "{}", ""); });
      EXPECT_NE(text.find(expected), std::string::npos) << text;
    });
    EXPECT_FALSE(test::fs::exists(folder / "checkpoints"));
  };
  const auto rows = [&](int64_t begin, int64_t end) { return test::make_shard(w, {begin, end}, true, 1); };
  refuse("rows [1, 2) of dimension 0 are missing",
         [&](int rank) { return std::vector{rank == 0 ? rows(0, 1) : rows(2, 4)}; });
  refuse("are stored twice", [&](int rank) { return std::vector{rank == 0 ? rows(0, 3) : rows(2, 4)}; });
  refuse("different tensor names", [&](int rank) {
    auto state = std::vector{rows(rank * 2, rank * 2 + 2)};
    if (rank == 1) state[0].name = "model/x";
    return state;
  });
  const auto with = [&](const std::function<void(StateTensor&)>& change) {
    return [&rows, change](int rank) {
      auto state = std::vector{rows(rank * 2, rank * 2 + 2)};
      if (rank == 1) change(state[0]);
      return state;
    };
  };
  refuse("rank 1: tensor 'model/../w': expected a name", with([](auto& t) { t.name = "model/../w"; }));
  refuse("rank 1: tensor 'meta/w': the group 'meta' is reserved", with([](auto& t) { t.name = "meta/w"; }));
  refuse("expected a box of 2 dimensions, got [0] + [2]", with([](auto& t) { t.box = {{0}, {2}}; }));
  refuse("box [2, 0] + [3, 2] is no part of [4, 2]", with([](auto& t) { t.box.extent.set(0, 3); }));
  refuse("expected a value of shape [1, 2], got [2, 2]", with([](auto& t) { t.box.extent.set(0, 1); }));
  refuse("replica 1 of 1", with([](auto& t) { t.replica_index = 1; }));
  refuse("the value is undefined", with([](auto& t) { t.value = Tensor(); }));
  refuse("the name is used twice", [&](int rank) {
    return std::vector{rows(rank * 2, rank * 2 + 2), rows(rank * 2, rank * 2 + 2)};
  });
  refuse("'model/w' is a tensor, not a group", [&](int rank) {
    auto state = std::vector{rows(rank * 2, rank * 2 + 2), rows(rank * 2, rank * 2 + 2)};
    state[1].name = "model/w/x";
    return state;
  });
}

TEST(CheckpointStore, AnExistingStepIsLeftAsItIsUnlessItIsDamaged) {
  const TempFolder folder;
  const std::vector<Logical> model = {{"model/w", DType::f32, {9}}};
  save_with(1, folder.path(), 4, model, 1);
  const std::string before = test::read_all(folder / "step-000000004" / "w0000.h5");
  save_with(1, folder.path(), 4, model, 2);
  EXPECT_EQ(test::read_all(folder / "step-000000004" / "w0000.h5"), before);
  test::fs::remove(folder / "step-000000004" / "w0000.h5");
  save_with(1, folder.path(), 4, model, 2);
  load_with(1, folder.path(), 4, model, 2);
  EXPECT_EQ(test::names_in(folder.path()), (std::set<std::string>{"step-000000004", "step-000000004.bad-1"}));
}

TEST(CheckpointStore, OpeningTheStoreRemovesOnlyItsOwnTemporaries) {
  const TempFolder folder;
  for (const char* name : {"step-000000005.tmp-0123", "step-000000005.tmp-removed-77", "step-000000005.bad-1",
                           "step-5.tmp-1", "notes.tmp-1", "best"}) {
    test::fs::create_directories(folder / name);
    test::write_all(folder / name / "w0000.h5", "x");
  }
  test::write_all(folder / "step-000000006.tmp-file", "a file");
  const auto group = make_single_communicator();
  CheckpointStore store({folder.path()}, *group);
  EXPECT_EQ(test::names_in(folder.path()),
            (std::set<std::string>{"step-000000005.bad-1", "step-5.tmp-1", "notes.tmp-1", "best",
                                   "step-000000006.tmp-file"}));
}

TEST(CheckpointStore, ListingShowsStepsSizesAndTensors) {
  const TempFolder folder;
  save_with(2, folder.path(), 9, test::mixed_model());
  save_with(2, folder.path(), 10, test::mixed_model());
  const auto list = list_checkpoints(folder.path(), true);
  ASSERT_EQ(list.size(), 2U);
  EXPECT_EQ(list[0].step, 10);
  EXPECT_EQ(list[1].step, 9);
  EXPECT_EQ(list[0].num_tensors, static_cast<int64_t>(test::mixed_model().size()));
  int64_t bytes = 0;
  for (const auto& name : test::names_in(folder / "step-000000010"))
    if (name != "MANIFEST.json")
      bytes += static_cast<int64_t>(test::fs::file_size(folder / "step-000000010" / name));
  EXPECT_EQ(list[0].total_bytes, bytes);
  EXPECT_EQ(list[0].problem, "");
  const auto tensors = list_tensors(list[0].path);
  ASSERT_EQ(tensors.size(), test::mixed_model().size());
  EXPECT_EQ(tensors[0].name, "data/empty");
  EXPECT_EQ(tensors[4].name, "model/layers.0.experts.up");
  EXPECT_EQ(tensors[4].dtype, "bf16");
  EXPECT_EQ(tensors[4].shape, (Shape{7, 3, 5}));
  EXPECT_EQ(tensors[4].bytes, 210);
  EXPECT_EQ(tensors[4].num_pieces, 2);
  test::fs::resize_file(folder / "step-000000010" / "w0001.h5", 1000);
  EXPECT_NE(list_checkpoints(folder.path(), false)[0].problem.find("w0001.h5: expected"), std::string::npos);
  EXPECT_TRUE(list_checkpoints(folder / "missing", true).empty());
}

}  // namespace shoal
