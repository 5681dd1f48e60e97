// SharedCommunicator over ranks that are threads; over processes in tests/mpi.
#include "parallel/shared_communicator.h"

#include <filesystem>
#include <fstream>

#include "parallel/open_calls.h"
#include "parallel/shared_group.h"
#include "tests/parallel/communicator_suite.h"
#include "tests/support/error_of.h"

namespace shoal {
namespace {

using testing::communicator_cases;
using testing::CommunicatorCase;

/// Limits for one test; groups take them over when they are made.
class LimitsScope {
 public:
  explicit LimitsScope(const SharedLimits& limits) : before_(shared_limits()) { shared_limits() = limits; }
  ~LimitsScope() { shared_limits() = before_; }
  LimitsScope(const LimitsScope&) = delete;
  LimitsScope& operator=(const LimitsScope&) = delete;

 private:
  SharedLimits before_;
};

// Small tensors in many chunks, through a window of two or three.
constexpr SharedLimits kSlotsOnly{
    .slot_bytes = 512, .num_slots = 2, .small_reduce_bytes = 0, .single_copy = false};
constexpr SharedLimits kSingleCopy{
    .slot_bytes = 512, .num_slots = 3, .small_reduce_bytes = 600, .single_copy_bytes = 100};

struct LimitsCase {
  const char* name;
  SharedLimits limits;
};

class SharedThreads : public ::testing::TestWithParam<std::tuple<CommunicatorCase, LimitsCase>> {};

TEST_P(SharedThreads, CarryOutEveryCase) {
  const auto& [one, limits] = GetParam();
  const LimitsScope scope(limits.limits);
  for (const int n : {2, 3, 5}) {
    run_ranks(n, [&, &run = one.run](const std::shared_ptr<Communicator>& world) {
      const auto shared = share_memory(world);
      EXPECT_TRUE(uses_shared_memory(*shared));
      run(shared);
      shared->barrier();
      EXPECT_EQ(num_open_calls(), 0U);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Threads, SharedThreads,
    ::testing::Combine(::testing::ValuesIn(communicator_cases()),
                       ::testing::Values(LimitsCase{"usual", {}}, LimitsCase{"slots_only", kSlotsOnly},
                                         LimitsCase{"single_copy", kSingleCopy})),
    [](const auto& info) { return str(std::get<0>(info.param).name, '_', std::get<1>(info.param).name); });

TEST(SharedCommunicator, DifferingCallsAreNamedWithoutBeingAskedFor) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto shared = share_memory(world);
    const int64_t count = world->rank() == 0 ? 4 : 5;
    const std::string error = testing::error_of(
        [&] { shared->all_reduce(Tensor::zeros({count}, DType::f32), ReduceOp::sum).wait(); });
    EXPECT_NE(error.find("collective calls differ [world, call 0]"), std::string::npos) << error;
    EXPECT_NE(error.find("all_reduce(sum, f32, 4 elements)"), std::string::npos) << error;
    EXPECT_NE(error.find("all_reduce(sum, f32, 5 elements)"), std::string::npos) << error;
  });
}

TEST(SharedCommunicator, CountsThatDoNotFitAreNamed) {
  for (const bool single_copy : {true, false}) {
    const LimitsScope scope({.single_copy = single_copy});
    run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
      const auto shared = share_memory(world);
      const std::vector<int64_t> send = {1, 1}, recv = {world->rank() == 0 ? 1 : 2, 1};
      const Tensor in = Tensor::zeros({2, 3}, DType::f32), out = Tensor::zeros({recv[0] + 1, 3}, DType::f32);
      const std::string error = testing::error_of([&] { shared->all_to_all(in, out, send, recv).wait(); });
      // Rank 0 sees nothing wrong; the mistake is named where it shows.
      const std::string want =
          world->rank() == 0 ? ""
                             : "all_to_all [world, call 0]: rank 0 sends 1 rows to rank 1, which expects 2";
      EXPECT_TRUE(error.starts_with(want) && error.empty() == want.empty()) << error;
    });
  }
}

TEST(SharedCommunicator, DifferingPartsOfASharedTensorAreRefused) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto shared = share_memory(world);
    const Tensor x = shared->shared_zeros({64}, DType::f32, Device{});
    const std::string error =
        testing::error_of([&] { shared->all_reduce(x.flat(world->rank(), 8), ReduceOp::sum).wait(); });
    EXPECT_NE(error.find("passes another part of the shared tensors"), std::string::npos) << error;
  });
}

TEST(SharedCommunicator, SharedTensorsCountAsMemoryInUse) {
  const int64_t before = device_runtime(DeviceType::cpu).stats().current_bytes;
  run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const auto shared = share_memory(world);
    const Tensor x = shared->shared_zeros({1000}, DType::f32, Device{});
    shared->barrier();
    EXPECT_GE(device_runtime(DeviceType::cpu).stats().current_bytes, before + 8000);
    shared->barrier();
  });
  EXPECT_EQ(device_runtime(DeviceType::cpu).stats().current_bytes, before);
}

/// Lines of a file of this process that name shared memory of Shoal.
int num_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:shoal") != std::string::npos;
  return count;
}

int num_open_files() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    count += std::filesystem::read_symlink(entry, ignored).string().find("memfd:shoal") != std::string::npos;
  }
  return count;
}

TEST(SharedCommunicator, ItsMemoryHasNoNameNoOpenFileAndGoesWithIt) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto shared = share_memory(world);
    const Tensor x = shared->shared_zeros({1000}, DType::f32, Device{});
    shared->barrier();
    EXPECT_EQ(num_mappings(), 2);  // threads share each of them
    EXPECT_EQ(num_open_files(), 0);
    shared->barrier();
  });
  EXPECT_EQ(num_mappings(), 0);
}

TEST(SharedCommunicator, WithoutEnoughMemoryTheOtherTransportIsUsedAndSaysSo) {
  const LimitsScope scope({.num_slots = int64_t{1} << 32, .group_bytes = int64_t{1} << 62});
  ::testing::internal::CaptureStderr();
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    const auto shared = share_memory(world);
    EXPECT_FALSE(uses_shared_memory(*shared));
    EXPECT_EQ(shared->sum(int64_t{1}), 3);
    shared->barrier();
    const auto pair = shared->split(world->rank() / 2, 0, "pair");
    EXPECT_EQ(pair->sum(int64_t{1}), world->rank() < 2 ? 2 : 1);
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("collectives over shared memory are off: they need "), std::string::npos) << text;
  EXPECT_EQ(text.find("warning"), text.rfind("warning")) << "said once: " << text;
}

TEST(SharedCommunicator, TheVariableChoosesTheTransport) {
  struct Restore {
    ~Restore() { unsetenv("SHOAL_COLLECTIVES"); }
  } restore;
  unsetenv("SHOAL_COLLECTIVES");
  EXPECT_TRUE(shared_collectives_wanted());
  setenv("SHOAL_COLLECTIVES", "auto", 1);
  EXPECT_TRUE(shared_collectives_wanted());
  setenv("SHOAL_COLLECTIVES", "mpi", 1);
  EXPECT_FALSE(shared_collectives_wanted());
  setenv("SHOAL_COLLECTIVES", "gloo", 1);
  const std::string error = testing::error_of([] { shared_collectives_wanted(); });
  EXPECT_NE(error.find("SHOAL_COLLECTIVES: expected auto"), std::string::npos) << error;
  EXPECT_NE(error.find("'gloo'"), std::string::npos) << error;
}

}  // namespace
}  // namespace shoal
