// NcclCommunicator on the stand-in of NCCL, ranks as threads.
#include "parallel/nccl_communicator.h"

#include <mutex>
#include <set>

#include "core/backend/cuda/runtime.h"
#include "core/tensor/host_wait.h"
#include "core/tensor/stream.h"
#include "parallel/device_world.h"
#include "tests/cuda/standin/nccl.h"
#include "tests/cuda/standin/streams.h"
#include "tests/parallel/communicator_suite.h"
#include "tests/support/error_of.h"

namespace shoal {
namespace {

using testing::communicator_cases;
using testing::CommunicatorCase;
using testing::equal_bits;
using testing::error_of;
using testing::rank_values;

using Group = std::shared_ptr<Communicator>;

constexpr Device kCuda{DeviceType::cuda, 0};  // each rank's own

/// `make` is called on each rank; the calls of all ranks must fit together, and
/// nothing of NCCL is left when they have ended.
void on_devices(int num_ranks, const NcclOptions& options,
                const std::function<void(const Group& group)>& fn) {
  standin::clear_nccl_log();
  run_ranks(num_ranks, [&](const Group& world) {
    const StreamScope own_stream(make_stream(kCuda));  // ranks that are processes share none either
    std::string why;
    const Group group = make_nccl_group(world, kCuda, options, &why);
    ASSERT_NE(group, nullptr) << why;
    fn(group);
    device_runtime(kCuda.type).synchronize();
    world->barrier();  // before the end of NCCL
  });
  EXPECT_EQ(standin::nccl_log_problem(), "");
  EXPECT_EQ(standin::num_nccl_communicators(), 0);
}

constexpr NcclOptions kOrdered{.ordered_sums = true, .limit_s = 60};
constexpr NcclOptions kInPieces{.ordered_sums = true, .limit_s = 60, .small_reduce_bytes = 0};
constexpr NcclOptions kLibrary{.ordered_sums = false, .limit_s = 60};

TEST(NcclOptions, TheEnvironmentChoosesWhoSums) {
  EXPECT_TRUE(ordered_sums_named(nullptr));
  EXPECT_TRUE(ordered_sums_named(""));
  EXPECT_TRUE(ordered_sums_named("ordered"));
  EXPECT_FALSE(ordered_sums_named("nccl"));
  EXPECT_NE(error_of([] {
              ordered_sums_named("fast");
            }).find("SHOAL_NCCL_SUMS: expected ordered or nccl, got 'fast'"),
            std::string::npos);
  EXPECT_TRUE(NcclOptions{}.ordered_sums);
  setenv("SHOAL_NCCL_SUMS", "nccl", 1);
  EXPECT_FALSE(NcclOptions{}.ordered_sums);
  unsetenv("SHOAL_NCCL_SUMS");
}

class Nccl : public ::testing::TestWithParam<CommunicatorCase> {};

TEST_P(Nccl, CarriesTensorsOfDevices) {
  for (const auto& [num_ranks, options] :
       {std::pair{2, kOrdered}, {2, kInPieces}, {3, kInPieces}, {5, kOrdered}}) {
    standin::clear_nccl_log();
    on_devices(num_ranks, options,
               [&](const Group& group) { testing::run_case_on(kCuda, GetParam(), group); });
    const std::set<std::string> of_the_host = {"Conveniences", "WrongArgumentsAreRefusedBeforeSending"};
    EXPECT_EQ(standin::nccl_log_size() > 0, !of_the_host.contains(GetParam().name));
  }
}

TEST_P(Nccl, LetsTensorsOfTheHostPass) {
  on_devices(3, kOrdered, [&](const Group& group) { GetParam().run(group); });
  EXPECT_EQ(standin::nccl_log_size(), 0U);
}

class StreamPolicy {
 public:
  explicit StreamPolicy(const standin::Options& options) { standin::set_options(options); }
  ~StreamPolicy() { standin::set_options({}); }
  StreamPolicy(const StreamPolicy&) = delete;
  StreamPolicy& operator=(const StreamPolicy&) = delete;
};
constexpr standin::Options kPolicies[] = {{.policy = standin::Policy::lazy},
                                          {.policy = standin::Policy::favour, .favoured = 2},
                                          {.policy = standin::Policy::random, .seed = 3}};

TEST_P(Nccl, KeepsTheOrderOfWorkWheneverStreamsRun) {
  for (const standin::Options& policy : kPolicies) {
    const StreamPolicy scope(policy);
    on_devices(3, kInPieces, [&](const Group& group) { testing::run_case_on(kCuda, GetParam(), group); });
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, Nccl, ::testing::ValuesIn(communicator_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(NcclCommunicator, WithoutOrderedSumsTheLibrarySums) {
  on_devices(4, kLibrary, [](const Group& group) {
    const int n = group->size();
    const int64_t count = 1000;
    // Integers have the same bits in any order.
    const Tensor whole = Tensor::from(rank_values<int64_t>(group->rank(), count), {count});
    const Tensor exact = whole.to(kCuda);
    group->all_reduce(whole, ReduceOp::sum).wait();
    group->all_reduce(exact, ReduceOp::sum).wait();
    EXPECT_TRUE(equal_bits(exact, whole));
    // Floats do not, and the stand-in takes another one than rank order.
    const Tensor ordered = Tensor::from(rank_values<float>(group->rank(), n * count), {n * count});
    const Tensor sums = ordered.to(kCuda), part = Tensor::empty({count}, DType::f32, sums.device());
    group->reduce_scatter(sums, part, ReduceOp::sum).wait();
    group->all_reduce(ordered, ReduceOp::sum).wait();
    group->all_reduce(sums, ReduceOp::sum).wait();
    EXPECT_FALSE(equal_bits(sums, ordered));
    EXPECT_TRUE(equal_bits(part, sums.flat(group->rank() * count, count)));
    const auto got = sums.to_vector<float>(), want = ordered.to_vector<float>();
    for (size_t i = 0; i < got.size(); i++) EXPECT_NEAR(got[i], want[i], 1e-5);
  });
}

TEST(NcclCommunicator, OnlyTensorsOfItsOwnDeviceAreCarried) {
  on_devices(2, kOrdered, [](const Group& group) {
    constexpr Device kOther{DeviceType::cuda, 1};
    EXPECT_TRUE(group->carries(kCuda) && group->carries(Device{}) && !group->carries(kOther));
    const std::string error =
        error_of([&] { group->broadcast(Tensor::zeros({3}, DType::f32, kOther), 0).wait(); });
    EXPECT_NE(error.find("inout is on cuda:1"), std::string::npos) << error;
  });
}

// The stream in which they were given does not wait for the call here.
TEST(NcclCommunicator, TensorsOfACallStayUntilItsEndWhereverItIsWaitedFor) {
  const StreamPolicy lazy({.policy = standin::Policy::lazy});
  cuda::memory_options() = {true, int64_t{1} << 20};
  on_devices(2, kOrdered, [](const Group& group) {
    constexpr int64_t kCount = 100;
    const Stream other = make_stream(kCuda), own = current_stream(kCuda);
    const Tensor all = Tensor::empty({group->size() * kCount}, DType::f32, kCuda);
    const void* place = nullptr;
    {
      const Tensor mine = Tensor::from(std::vector<float>(kCount, 5), {kCount}, kCuda);
      place = mine.bytes();
      Work work = group->all_gather(mine, all);
      const StreamScope elsewhere(other);
      work.wait();
    }
    const Tensor next = Tensor::zeros({kCount}, DType::f32, kCuda);
    EXPECT_NE(next.bytes(), place);
    Event zeroed;
    zeroed.record(own);
    zeroed.host_wait();
    const StreamScope elsewhere(other);
    EXPECT_EQ(all.to_vector<float>(), std::vector<float>(static_cast<size_t>(all.numel()), 5));
  });
  cuda::memory_options() = {false, int64_t{1} << 20};
}

// Whoever waits for it only then lets it overlap with what the stream is given meanwhile.
TEST(NcclCommunicator, ACallIsDoneWhenTheDeviceIsBehindIt) {
  const StreamPolicy lazy({.policy = standin::Policy::lazy});
  on_devices(2, kOrdered, [](const Group& group) {
    const Tensor x = Tensor::from(std::vector<float>(100, 1), {100}, kCuda);
    Work work = group->all_reduce(x, ReduceOp::sum);
    EXPECT_FALSE(work.test());
    device_runtime(kCuda.type).synchronize();
    EXPECT_TRUE(work.test());
    work.wait();
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>(100, 2));
  });
}

TEST(NcclCommunicator, RanksThatShareADeviceAreStagedAndToldWhy) {
  standin::share_one_device(true);
  run_ranks(3, [](const Group& world) {
    std::string why;
    EXPECT_EQ(make_nccl_group(world, kCuda, kOrdered, &why), nullptr);
    EXPECT_NE(why.find("ranks 0 and 1 share the device at 0000:00:00.0 of "), std::string::npos) << why;
    const Group group = device_world(world, kCuda);
    const Tensor x = Tensor::from(std::vector<double>{1}, {1}, kCuda);
    group->all_reduce(x, ReduceOp::sum).wait();
    EXPECT_EQ(x.item(), 3);
  });
  standin::share_one_device(false);
  EXPECT_EQ(standin::num_nccl_communicators(), 0);
}

TEST(NcclCommunicator, IsWhatDeviceWorldGivesRanksWithADeviceEach) {
  standin::clear_nccl_log();
  run_ranks(4, [](const Group& world) {
    const StreamScope own_stream(make_stream(kCuda));
    const Group all = device_world(world, kCuda), pair = all->split(world->rank() / 2, 0, "pair");
    for (const Group& group : {all, pair}) {
      const Tensor x = Tensor::from(std::vector<float>{1}, {1}, kCuda);
      group->all_reduce(x, ReduceOp::sum).wait();
      EXPECT_EQ(x.item(), group->size());
    }
    world->barrier();
  });
  EXPECT_EQ(standin::nccl_log_size(), 8U);
  EXPECT_EQ(standin::nccl_log_problem(), "");
}

TEST(NcclCommunicator, CountsThatDoNotFitAreNamed) {
  std::mutex mutex;
  std::string errors;  // one rank finds it; the other one is told that its peer has aborted
  run_ranks(2, [&](const Group& world) {
    const StreamScope own_stream(make_stream(kCuda));
    const std::string error = error_of([&] {
      std::string why;
      const Group group = make_nccl_group(world, kCuda, kOrdered, &why);
      const int64_t wrong = group->rank();
      const std::vector<int64_t> send = {1, 1}, recv = {1 + wrong, 1};
      const Tensor in = Tensor::zeros({2, 3}, DType::f32, kCuda),
                   out = Tensor::zeros({2 + wrong, 3}, DType::f32, kCuda);
      group->all_to_all(in, out, send, recv).wait();
      device_runtime(DeviceType::cuda).synchronize();
    });
    const std::lock_guard lock(mutex);
    errors += error + "; ";
  });
  standin::clear_nccl_log();
  EXPECT_NE(errors.find("rank 0 sends 12 elements to rank 1, which expects 24"), std::string::npos) << errors;
}

constexpr NcclOptions kShort{.ordered_sums = false, .limit_s = 0.2};

/// What rank 0 says when `fn` is run on two ranks.
std::string first_rank_error(const std::function<void(const Group& world)>& fn) {
  std::string error;
  run_ranks(2, [&](const Group& world) {
    const StreamScope own_stream(make_stream(kCuda));
    const std::string mine = error_of([&] { fn(world); });
    if (world->rank() == 0) error = mine;
    world->barrier();
  });
  EXPECT_EQ(standin::num_nccl_communicators(), 0);
  standin::clear_nccl_log();
  return error;
}
Group group_of(const Group& world, const NcclOptions& options) {
  std::string why;
  return make_nccl_group(world, kCuda, options, &why);
}
Tensor four_zeros() {
  return Tensor::zeros({4}, DType::f32, kCuda);
}
void wait_for_device() {
  device_runtime(DeviceType::cuda).synchronize();
}

void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

TEST(NcclCommunicator, ARankThatNeverComesEndsTheWaitAtTheLimit) {
  const int aborts = standin::num_nccl_aborts();
  const std::string error = first_rank_error([](const Group& world) {
    const Group group = group_of(world, kShort);
    const Tensor x = four_zeros();
    group->all_reduce(x, ReduceOp::sum).wait();
    wait_for_device();
    if (world->rank() == 1) return;
    Work work = group->broadcast(x, 1);
    work.wait();
    wait_for_device();
  });
  expect_parts(error, {"waited 0.2 s in broadcast(f32, 4 elements, root 1) [world, rank 0 of 2], call 1",
                       "SHOAL_COLLECTIVE_TIMEOUT"});
  EXPECT_GT(standin::num_nccl_aborts(), aborts);
}

TEST(NcclCommunicator, ARankThatNeverComesEndsTheStartAtTheLimit) {
  const std::string error = first_rank_error([](const Group& world) {
    if (world->rank() == 0) {
      group_of(world, kShort);
    } else {  // what a rank does that dies before it reaches NCCL
      world->gather_strings("another device");
      world->broadcast_string("", 0);
      world->broadcast_string("", 0);
    }
  });
  expect_parts(error, {"waited 0.2 s in the start of NCCL [world, rank 0 of 2] for other ranks"});
}

TEST(NcclCommunicator, ErrorsThatTheLibraryReportsEndAWait) {
  constexpr NcclOptions kPatient{.ordered_sums = false, .limit_s = 0};  // no limit: nothing else ends it
  const std::string error = first_rank_error([&](const Group& world) {
    const Group group = group_of(world, kPatient);
    world->barrier();
    if (world->rank() == 1) return;
    standin::set_nccl_error(0, ncclSystemError);
    group->all_to_all(four_zeros(), four_zeros(), std::vector<int64_t>{1, 3}, std::vector<int64_t>{1, 3})
        .wait();
    wait_for_device();
  });
  standin::set_nccl_error(0, ncclSuccess);
  expect_parts(
      error, {"all_to_all(f32, rows of 1 elements) [world, rank 0 of 2], call 0", "unhandled system error"});
}

TEST(NcclCommunicator, ARankThatFailsWakesTheOthersAndAbortsAllTheirGroups) {
  const int aborts = standin::num_nccl_aborts();
  const std::string error = first_rank_error([](const Group& world) {
    const Group group = group_of(world, kOrdered), other = group->split(0, 0, "other");
    world->barrier();
    if (world->rank() == 1) throw Error("this rank ends");
    const Tensor x = four_zeros();
    EXPECT_NE(error_of([&] {
                group->all_gather(x.flat(0, 2), x).wait();
                wait_for_device();
              }),
              "");
    other->all_reduce(x, ReduceOp::sum).wait();
  });
  expect_parts(
      error, {"all_reduce(sum, f32, 4 elements) [other, rank 0 of 2], call 0: NCCL was aborted: ",
              "all_gather(f32, 2 elements per rank) [world, rank 0 of 2], call 0", "remote process exited"});
  EXPECT_EQ(standin::num_nccl_aborts(), aborts + 4);
}

TEST(NcclCommunicator, CallsOfTwoGroupsInAnotherOrderAreFoundInTheLog) {
  std::string problem;
  const std::string error = first_rank_error([&](const Group& world) {
    const Group a = group_of(world, kShort), b = a->split(0, 0, "b");
    const Tensor x = four_zeros(), y = four_zeros();
    error_of([&] {
      Work first = (world->rank() == 0 ? a : b)->all_reduce(x, ReduceOp::sum);
      Work second = (world->rank() == 0 ? b : a)->all_reduce(y, ReduceOp::sum);
      first.wait();
      second.wait();
      wait_for_device();
    });
    world->barrier();
    if (world->rank() == 0) problem = standin::nccl_log_problem();
    world->barrier();
  });
  EXPECT_EQ(error, "");
  expect_parts(problem, {"call 0: thread ", " calls all_reduce(4 of type 7, rank -1) in group "});
}

}  // namespace
}  // namespace shoal
