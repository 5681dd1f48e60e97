// Checkpoints with ranks that are processes: the same files, the same agreement.
#include "launch/checkpoint_format.h"
#include "tests/launch/checkpoint_support.h"
#include "tests/mpi/mpi_world.h"

namespace shoal::testing {

namespace {

/// A folder that all ranks use, removed by rank 0 after all are done.
class SharedFolder {
 public:
  SharedFolder() {
    if (mpi_world()->rank() == 0) folder_ = std::make_unique<test::TempFolder>();
    log::set_quiet(true);
    path_ = mpi_world()->broadcast_string(folder_ ? folder_->path().string() : "", 0);
  }
  ~SharedFolder() { mpi_world()->barrier(); }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  const test::fs::path& path() const { return path_; }

 private:
  std::unique_ptr<test::TempFolder> folder_;
  test::fs::path path_;
};

}  // namespace

TEST(CheckpointMpi, ProcessesSaveAndLoadEveryDtypeAndShape) {
  const SharedFolder folder;
  Communicator& world = *mpi_world();
  CheckpointStore store({folder.path()}, world);
  const auto model = test::mixed_model();
  EXPECT_EQ(store.save(3, test::make_state(model, world.rank(), world.size(), true), "{}", "seed: 1\n"), "");
  const auto found = store.find();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->step, 3);
  const auto state = test::make_state(model, world.rank(), world.size(), false);
  store.load(*found, state);
  test::expect_state(model, state);
  // Another split: the last rank holds everything, the others nothing of the sharded tensors.
  std::vector<StateTensor> other;
  for (const test::Logical& tensor : model) {
    const bool last = world.rank() == world.size() - 1;
    const int64_t rows = tensor.shard_dim < 0 ? 0 : tensor.shape[tensor.shard_dim];
    other.push_back(test::make_shard(tensor, {last ? 0 : rows, rows}, false, 1));
  }
  store.load(*found, other);
  test::expect_state(model, other);
}

TEST(CheckpointMpi, AFailureOfTheLastRankIsTheSameMessageOnAll) {
  const SharedFolder folder;
  Communicator& world = *mpi_world();
  CheckpointStore store({folder.path()}, world);
  const auto state = test::make_state(test::mixed_model(), world.rank(), world.size(), true);
  EXPECT_EQ(store.save(1, state, "{}", ""), "");
  store.set_failpoint([&](const std::string& point) {
    if (world.rank() == world.size() - 1 && point == "mid-write") throw Error("no space");
  });
  const std::string message = store.save(2, state, "{}", "");
  EXPECT_NE(message.find(str("rank ", world.size() - 1, ": no space")), std::string::npos) << message;
  EXPECT_EQ(message, world.broadcast_string(message, 0));
  world.barrier();
  EXPECT_EQ(test::names_in(folder.path()), std::set<std::string>{step_name(1)});
  world.barrier();
}

}  // namespace shoal::testing
