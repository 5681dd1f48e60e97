// Tensors of a device between processes: over an MPI that knows the device, and staged over one that does
// not. The device is host memory here, so that any MPI can reach it.
#include <cstring>

#include "core/ops/reduce_rows.h"
#include "parallel/device_world.h"
#include "parallel/mpi_communicator.h"
#include "parallel/staged_communicator.h"
#include "tests/mpi/mpi_world.h"
#include "tests/parallel/communicator_suite.h"
#include "tests/support/error_of.h"

namespace shoal {
namespace {

using testing::CommunicatorCase;
using testing::run_case_on;
using testing::transport;

constexpr Device kCuda{DeviceType::cuda, 0};

class HostAsDevice final : public DeviceRuntime {
 public:
  void* allocate(int64_t bytes) override { return ::operator new(static_cast<size_t>(bytes)); }
  void release(void* data, int64_t) noexcept override { ::operator delete(data); }
  void set_zero(void* data, int64_t bytes) override { std::memset(data, 0, static_cast<size_t>(bytes)); }
  void copy(void* to, Device, const void* from, Device, int64_t bytes) override {
    if (bytes > 0) std::memmove(to, from, static_cast<size_t>(bytes));
  }
  void synchronize() override {}
  void count_foreign(int64_t) noexcept override {}
  MemoryStats stats() const override { return {}; }
  void reset_peak() override {}
};

int num_sums = 0;

[[maybe_unused]] const bool added = [] {
  static HostAsDevice device;
  reduce_rows.add(DeviceType::cuda, [](const Tensor& parts, RowReduction op, const Tensor& out) {
    num_sums++;
    reduce_rows(Device{}, parts, op, out);
  });
  return register_device_runtime(DeviceType::cuda, &device);
}();

/// An MPI that says that it knows the device, or that it does not.
class MpiWithDevices {
 public:
  explicit MpiWithDevices(bool knows, MpiLimits limits = {}) : before_(mpi_limits()) {
    limits.device_tensors = knows;
    mpi_limits() = limits;
  }
  ~MpiWithDevices() { mpi_limits() = before_; }
  MpiWithDevices(const MpiWithDevices&) = delete;
  MpiWithDevices& operator=(const MpiWithDevices&) = delete;

 private:
  MpiLimits before_;
};

class DeviceTensors : public ::testing::TestWithParam<CommunicatorCase> {};

TEST_P(DeviceTensors, TravelOverAnMpiThatKnowsTheDevice) {
  const MpiWithDevices mpi(true);
  const auto& world = transport("mpi").world;
  EXPECT_EQ(device_world(world, kCuda), world);
  run_case_on(kCuda, GetParam(), world);
}

TEST_P(DeviceTensors, TravelInManyChunksPastSharedMemory) {
  const MpiWithDevices mpi(true, {.chunk_bytes = 520, .small_reduce_bytes = 0});
  run_case_on(kCuda, GetParam(), transport("shared").world);
}

TEST_P(DeviceTensors, AreStagedOverAnMpiThatDoesNotKnowTheDevice) {
  const MpiWithDevices mpi(false);
  run_case_on(kCuda, GetParam(), stage_device_tensors(transport("shared").world));
}

INSTANTIATE_TEST_SUITE_P(Mpi, DeviceTensors, ::testing::ValuesIn(testing::communicator_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DeviceTensorsOverMpi, AreSummedOnTheDeviceByAnMpiThatKnowsIt) {
  const MpiWithDevices mpi(true);
  const auto& world = testing::mpi_world();
  const int before = num_sums;
  const Tensor x = Tensor::from(std::vector<float>{1, 2}, {2}, kCuda);
  world->all_reduce(x, ReduceOp::sum).wait();
  EXPECT_EQ(num_sums, before + (world->size() > 1 ? 1 : 0));
  EXPECT_EQ(x.to_vector<float>()[1], 2.0F * static_cast<float>(world->size()));
}

TEST(DeviceTensorsOverMpi, AreRefusedByAnMpiThatDoesNotKnowTheDevice) {
  const MpiWithDevices mpi(false);
  const auto& world = testing::mpi_world();
  if (world->size() == 1) GTEST_SKIP() << "a group of one copies";
  const Tensor x = Tensor::zeros({2}, DType::f32, kCuda);
  EXPECT_NE(testing::error_of([&] {
              world->all_reduce(x, ReduceOp::sum).wait();
            }).find("make groups from device_world()"),
            std::string::npos);
  EXPECT_EQ(world->carries(kCuda), false);
}

}  // namespace
}  // namespace shoal
