#include "parallel/mpi_communicator.h"

#include <thread>

#include "tests/mpi/mpi_world.h"
#include "tests/parallel/communicator_suite.inc"

namespace shoal {
namespace {

using testing::communicator_cases;
using testing::CommunicatorCase;
using testing::mpi_world;
using testing::rank_values;
using testing::same_bits;

class EveryCommunicator : public ::testing::TestWithParam<CommunicatorCase> {};

/// Sets the limits of this process for one test; all ranks run the same test.
class LimitsScope {
 public:
  explicit LimitsScope(MpiLimits limits) : before_(mpi_limits()) { mpi_limits() = limits; }
  ~LimitsScope() { mpi_limits() = before_; }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  MpiLimits before_;
};

TEST_P(EveryCommunicator, WorksOverMpi) {
  GetParam().run(mpi_world());
  EXPECT_EQ(num_open_mpi_calls(), 0U);
}

TEST_P(EveryCommunicator, WorksOverMpiInManyChunksAndWithoutTheSmallPath) {
  const LimitsScope limits({.chunk_bytes = 520, .small_reduce_bytes = 0});
  GetParam().run(mpi_world());
}

TEST_P(EveryCommunicator, WorksOverMpiInGroups) {
  const auto part = mpi_world()->split(mpi_world()->rank() / 2, 0, "world");
  GetParam().run(part);
}

INSTANTIATE_TEST_SUITE_P(Mpi, EveryCommunicator, ::testing::ValuesIn(communicator_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

/// What ranks as threads compute from the same values.
template <class T>
Tensor thread_all_reduce(int num_ranks, int64_t count, ReduceOp op) {
  Tensor result;
  run_ranks(num_ranks, [&](const std::shared_ptr<Communicator>& world) {
    const Tensor x = Tensor::from(rank_values<T>(world->rank(), count), {count});
    world->all_reduce(x, op).wait();
    if (world->rank() == 0) result = x;
  });
  return result;
}

template <class T>
void expect_thread_bits() {
  Communicator& world = *mpi_world();
  for (const int64_t count : {5, 1000, 100003}) {
    const Tensor x = Tensor::from(rank_values<T>(world.rank(), count), {count});
    world.all_reduce(x, ReduceOp::sum).wait();
    EXPECT_TRUE(same_bits(x, thread_all_reduce<T>(world.size(), count, ReduceOp::sum))) << count;
  }
}

TEST(MpiCommunicator, AllReduceHasTheBitsOfTheThreadCommunicator) {
  expect_thread_bits<float>();
  expect_thread_bits<double>();
  expect_thread_bits<BFloat16>();
}

bool checks_are_on() {
  const char* checks = std::getenv("SHOAL_CHECK_COLLECTIVES");
  return checks != nullptr && std::string(checks) == "1";
}

TEST(MpiCommunicator, MP_09_ACallFromAnotherThreadIsRefused) {
  std::string message;
  std::thread other([&] {
    try {
      mpi_world()->sum(int64_t{1});
    } catch (const Error& e) {
      message = e.what();
    }
  });
  other.join();
  EXPECT_NE(message.find("expected the thread that started MPI"), std::string::npos) << message;
  EXPECT_EQ(num_open_mpi_calls(), 0U);
  EXPECT_EQ(mpi_world()->sum(int64_t{1}), mpi_world()->size());
}

TEST(MpiCommunicator, StartReturnsBeforeOtherRanksArrive) {
  if (checks_are_on()) GTEST_SKIP() << "the checks make every start wait for all ranks";
  Communicator& world = *mpi_world();
  const Tensor x = Tensor::from(std::vector<float>(100000, 1.0F), {100000});
  const auto order = world.split(0, 0, "order");
  Work work;
  if (world.rank() != 0) work = world.all_reduce(x, ReduceOp::sum);
  // Rank 0 starts the sum only after the others have said that theirs has started.
  order->barrier();
  if (world.rank() == 0) work = world.all_reduce(x, ReduceOp::sum);
  work.wait();
  EXPECT_EQ(x.to_vector<float>()[99999], static_cast<float>(world.size()));
}

TEST(MpiCommunicator, NamesBothCallsWhenChecksAreOn) {
  if (!checks_are_on()) {
    GTEST_SKIP() << "needs SHOAL_CHECK_COLLECTIVES=1; the ctest mpi_checked runs this";
  }
  Communicator& world = *mpi_world();
  auto message = [&](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  const bool first = world.rank() == 0;
  const std::string sizes =
      message([&] { world.all_reduce(Tensor::zeros({first ? 4 : 5}, DType::f32), ReduceOp::sum).wait(); });
  EXPECT_NE(sizes.find("rank 0 called all_reduce(sum, f32, 4 elements), rank 1 called all_reduce(sum, f32, 5 "
                       "elements)"),
            std::string::npos)
      << sizes;
  const std::string kinds = message([&] {
    if (first) {
      world.barrier();
    } else {
      world.broadcast(Tensor::zeros({2}, DType::i64), 1).wait();
    }
  });
  EXPECT_NE(kinds.find("rank 0 called barrier(), rank 1 called broadcast(i64, 2 elements, root 1)"),
            std::string::npos)
      << kinds;
  const auto n = static_cast<size_t>(world.size());
  std::vector<int64_t> send(n, 1), recv(n, 1);
  if (!first) recv[0] = 2;
  int64_t rows = 0;
  for (const int64_t r : recv) rows += r;
  const std::string counts = message([&] {
    world
        .all_to_all(Tensor::zeros({world.size(), 1}, DType::f32), Tensor::zeros({rows, 1}, DType::f32), send,
                    recv)
        .wait();
  });
  EXPECT_NE(counts.find("rank 0 sends 1 rows to rank 1, which expects 2"), std::string::npos) << counts;
}

}  // namespace

int testing::run_probe(const std::string& probe, const std::shared_ptr<Communicator>& world) {
  const int me = world->rank();
  if (probe == "throw_in_step") {
    for (int step = 0; step < 5; step++) {
      SHOAL_CHECK(me != 1 || step < 3, "probe: cannot read shard 7");
      world->sum(int64_t{step});
    }
    world->barrier();
  }
  if (probe == "usage_on_all") throw UsageError("config train.steps: expected >= 1, got 0");
  if (probe == "failure_on_all") throw Error("probe: no space left");
  if (probe == "two_messages") throw Error(me == 1 ? "probe: shard 1 is damaged" : "probe: no space left");
  if (probe == "failure_on_two" && me != 1) throw Error("probe: no space left");
  if (probe == "usage_on_one" && me == 1) throw UsageError("config data.path: no such file");
  if (probe == "usage_in_flight") {
    const Tensor x = Tensor::zeros({100000}, DType::f32);
    Work work = world->all_reduce(x, ReduceOp::sum);
    throw UsageError("config x: all ranks, with a call in flight");
  }
  if (probe == "kill" && me == 1) std::abort();
  if (probe == "code_3") return 3;
  world->barrier();
  world->sum(int64_t{1});
  return 0;
}

}  // namespace shoal
