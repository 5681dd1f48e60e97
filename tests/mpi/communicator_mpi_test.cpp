#include "parallel/mpi_communicator.h"

#include <sys/resource.h>

#include <thread>

#include "parallel/open_calls.h"
#include "parallel/shared_communicator.h"
#include "parallel/shared_group.h"
#include "tests/mpi/mpi_world.h"
#include "tests/parallel/communicator_suite.inc"

namespace shoal {
namespace {

using testing::communicator_cases;
using testing::CommunicatorCase;
using testing::equal_bits;
using testing::mpi_world;
using testing::rank_values;
using testing::transport;

class EveryCommunicator : public ::testing::TestWithParam<std::tuple<CommunicatorCase, const char*>> {
 protected:
  void run(const std::shared_ptr<Communicator>& world) { std::get<0>(GetParam()).run(world); }
  const std::shared_ptr<Communicator>& world() const { return transport(std::get<1>(GetParam())).world; }
};

/// Sets the limits of this process for one test; all ranks run the same test.
template <class Limits>
class LimitsScope {
 public:
  LimitsScope(Limits& place, const Limits& limits) : place_(place), before_(place) { place = limits; }
  ~LimitsScope() { place_ = before_; }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  Limits& place_;
  Limits before_;
};

TEST_P(EveryCommunicator, WorksOverMpi) {
  run(world());
  EXPECT_EQ(num_open_calls(), 0U);
}

TEST_P(EveryCommunicator, WorksOverMpiInManyChunksAndWithoutTheSmallPath) {
  const LimitsScope mpi(mpi_limits(), {.chunk_bytes = 520, .small_reduce_bytes = 0});
  const LimitsScope shared(
      shared_limits(),
      {.slot_bytes = 512, .num_slots = 2, .small_reduce_bytes = 0, .single_copy_bytes = 520});
  run(world()->split(0, world()->rank(), "world"));
}

TEST_P(EveryCommunicator, WorksOverMpiInGroups) {
  const auto part = world()->split(world()->rank() / 2, 0, "world");
  run(part);
}

INSTANTIATE_TEST_SUITE_P(Mpi, EveryCommunicator,
                         ::testing::Combine(::testing::ValuesIn(communicator_cases()),
                                            ::testing::Values("mpi", "shared")),
                         [](const auto& info) {
                           return str(std::get<0>(info.param).name, '_', std::get<1>(info.param));
                         });

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
void expect_thread_bits(Communicator& world) {
  for (const int64_t count : {5, 1000, 100003}) {
    const Tensor x = Tensor::from(rank_values<T>(world.rank(), count), {count});
    world.all_reduce(x, ReduceOp::sum).wait();
    EXPECT_TRUE(equal_bits(x, thread_all_reduce<T>(world.size(), count, ReduceOp::sum))) << count;
  }
}

TEST(MpiCommunicator, AllReduceHasTheBitsOfTheThreadCommunicator) {
  for (const char* name : {"mpi", "shared"}) {
    Communicator& world = *transport(name).world;
    expect_thread_bits<float>(world);
    expect_thread_bits<double>(world);
    expect_thread_bits<BFloat16>(world);
  }
}

bool checks_are_on() {
  const char* checks = std::getenv("SHOAL_CHECK_COLLECTIVES");
  return checks != nullptr && std::string(checks) == "1";
}

TEST(MpiCommunicator, MP_09_ACallFromAnotherThreadIsRefused) {
  for (const char* name : {"mpi", "shared"}) {
    Communicator& world = *transport(name).world;
    std::string message;
    std::thread other([&] {
      try {
        world.sum(int64_t{1});
      } catch (const Error& e) {
        message = e.what();
      }
    });
    other.join();
    EXPECT_NE(message.find("expected the thread that started MPI"), std::string::npos) << name << message;
    EXPECT_EQ(num_open_calls(), 0U);
    EXPECT_EQ(world.sum(int64_t{1}), world.size());
  }
}

/// Tensors larger than a group's shared memory.
void check_large(Communicator& world) {
  const int n = world.size(), me = world.rank();
  const int64_t part = 150001, whole = n * part;
  std::vector<std::vector<float>> inputs;
  for (int r = 0; r < n; r++) inputs.push_back(rank_values<float>(r, whole));
  std::vector<float> sum = inputs[0];
  for (int r = 1; r < n; r++)
    for (size_t i = 0; i < sum.size(); i++) sum[i] += inputs[static_cast<size_t>(r)][i];
  const Tensor want = Tensor::from(sum, {whole}), in = Tensor::from(inputs[static_cast<size_t>(me)], {whole});
  const Tensor scattered = Tensor::empty({part}, DType::f32), gathered = Tensor::empty({whole}, DType::f32);
  // All in flight together, and none finished before the next starts.
  Work scatter = world.reduce_scatter(in, scattered, ReduceOp::sum);
  Work gather = world.all_gather(in.flat(0, part), gathered);
  const std::vector<int64_t> rows(static_cast<size_t>(n), part);
  const Tensor exchanged = Tensor::empty({whole}, DType::f32), summed = in.clone();
  Work exchange = world.all_to_all(in, exchanged, rows, rows);
  Work reduce = world.all_reduce(summed, ReduceOp::sum);
  const Tensor copied = in.clone();
  Work broadcast = world.broadcast(copied, n - 1);
  broadcast.wait();
  for (Work* work : {&reduce, &exchange, &gather, &scatter}) work->wait();
  EXPECT_TRUE(equal_bits(summed, want));
  EXPECT_TRUE(equal_bits(scattered, want.flat(me * part, part)));
  EXPECT_TRUE(equal_bits(copied, Tensor::from(inputs.back(), {whole})));
  for (int r = 0; r < n; r++) {
    const Tensor from = Tensor::from(inputs[static_cast<size_t>(r)], {whole});
    EXPECT_TRUE(equal_bits(gathered.flat(r * part, part), from.flat(0, part))) << r;
    EXPECT_TRUE(equal_bits(exchanged.flat(r * part, part), from.flat(me * part, part))) << r;
  }
}

TEST(MpiCommunicator, TensorsMayBeLargerThanTheSharedMemory) {
  for (const char* name : {"mpi", "shared"}) check_large(*transport(name).world);
  const LimitsScope slots_only(shared_limits(), {.single_copy = false});
  check_large(*transport("shared").world->split(0, mpi_world()->rank(), "slots"));
}

TEST(MpiCommunicator, StartReturnsBeforeOtherRanksArrive) {
  if (checks_are_on()) GTEST_SKIP() << "the checks make every start wait for all ranks";
  for (const char* name : {"mpi", "shared"}) {
    Communicator& world = *transport(name).world;
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
}

void check_mismatches(Communicator& world) {
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

TEST(MpiCommunicator, NamesBothCallsWhenChecksAreOn) {
  if (!checks_are_on()) {
    GTEST_SKIP() << "needs SHOAL_CHECK_COLLECTIVES=1; the ctest mpi_checked runs this";
  }
  for (const char* name : {"mpi", "shared"}) check_mismatches(*transport(name).world);
}

TEST(MpiCommunicator, SteadyCallsOverSharedMemoryMeetNoPageFaults) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "ASan maps memory for its own book-keeping";
#endif
  Communicator& world = *transport("shared").world;
  const int n = world.size();
  const int64_t count = 60000;
  const Tensor bucket = world.shared_zeros({count}, DType::f32, Device{}),
               x = Tensor::zeros({count}, DType::f32), part = Tensor::zeros({count}, DType::f32),
               all = Tensor::zeros({n * count}, DType::f32), all_out = Tensor::zeros({n * count}, DType::f32);
  const std::vector<int64_t> rows(static_cast<size_t>(n), count);
  auto step = [&] {
    Work sum = world.all_reduce(bucket, ReduceOp::sum), copies = world.all_reduce(x, ReduceOp::sum);
    world.reduce_scatter(all, part, ReduceOp::sum).wait();
    world.all_gather(part, all).wait();
    world.all_to_all(all, all_out, rows, rows).wait();
    world.broadcast(x, 0).wait();
    sum.wait();
    copies.wait();
    world.barrier();
  };
  auto faults = [] {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt + usage.ru_majflt;
  };
  for (int i = 0; i < 5; i++) step();
  const auto before = faults();
  for (int i = 0; i < 20; i++) step();
  EXPECT_EQ(faults() - before, 0);
}

TEST(MpiCommunicator, TheWorldOfAJobIsOverTheTransportThatWasAskedFor) {
  const char* asked = std::getenv("SHOAL_COLLECTIVES");
  EXPECT_EQ(uses_shared_memory(*mpi_world()),
            (asked == nullptr || std::string(asked) != "mpi") && mpi_world()->size() > 1);
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
