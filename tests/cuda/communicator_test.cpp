// Every communicator that carries tensors of a device: the suite of all communicators, and what is its own.
#include "parallel/communicator.h"

#include "core/tensor/stream.h"
#include "parallel/device_world.h"
#include "parallel/shared_communicator.h"
#include "parallel/staged_communicator.h"
#include "tests/parallel/communicator_suite.inc"
#include "tests/support/error_of.h"

namespace shoal {
namespace {

using testing::communicator_cases;
using testing::CommunicatorCase;
using testing::error_of;
using testing::run_case_on;
constexpr Device kCuda{DeviceType::cuda, 0};

class Staged : public ::testing::TestWithParam<CommunicatorCase> {};

TEST_P(Staged, CarriesTensorsOfADevice) {
  for (const int n : {1, 2, 3, 5}) {
    run_ranks(n, [&](const auto& world) { run_case_on(kCuda, GetParam(), stage_device_tensors(world)); });
  }
}

TEST_P(Staged, CarriesTensorsOfADeviceOverSharedMemory) {
  run_ranks(3, [&](const auto& world) {
    run_case_on(kCuda, GetParam(), stage_device_tensors(share_memory(world)));
  });
}

TEST_P(Staged, LetsTensorsOfTheHostPass) {
  run_ranks(3, [&](const auto& world) { GetParam().run(stage_device_tensors(world)); });
}

INSTANTIATE_TEST_SUITE_P(Threads, Staged, ::testing::ValuesIn(communicator_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(StagedCommunicator, ResultsArriveWhenTheCallIsWaitedFor) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto staged = stage_device_tensors(world);
    const Tensor x = Tensor::from(std::vector<float>{1.0F + static_cast<float>(world->rank())}, {1}, kCuda);
    Work work = staged->all_reduce(x, ReduceOp::sum);
    x.set_zero();  // has been read
    world->barrier();
    work.wait();
    EXPECT_EQ(x.item(), 3);
  });
}

TEST(StagedCommunicator, RefusesACallOnTwoDevices) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto staged = stage_device_tensors(world);
    const Tensor x = Tensor::zeros({2}, DType::f32), y = Tensor::zeros({4}, DType::f32, kCuda);
    const std::string error = error_of([&] { staged->all_gather(x, y).wait(); });
    EXPECT_NE(error.find("in is on cpu and out is on cuda:0; expected both on the same device"),
              std::string::npos)
        << error;
  });
}

TEST(DeviceTensors, AreRefusedByACommunicatorOfTheHost) {
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const Tensor x = Tensor::zeros({2}, DType::f32, kCuda);
    for (const auto& group : {world, share_memory(world)}) {
      EXPECT_FALSE(group->carries(kCuda));
      const std::string error = error_of([&] { group->all_reduce(x, ReduceOp::sum).wait(); });
      EXPECT_NE(
          error.find(
              "inout is on cuda:0; this communicator moves cpu memory; make groups from device_world()"),
          std::string::npos)
          << error;
    }
  });
}

TEST(DeviceWorld, IsTheHostsForTheCpuAndForOneRank) {
  const auto single = make_single_communicator();
  EXPECT_EQ(device_world(single, kCuda), single);
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    EXPECT_EQ(device_world(world, Device{}), world);
    EXPECT_NE(device_world(world, kCuda), world);
  });
}

TEST(DeviceWorld, CarriesBothKindsOfTensorsInEveryGroup) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    const StreamScope own_stream(make_stream(kCuda));  // ranks that are processes share none either
    const auto all = device_world(world, kCuda), pair = all->split(world->rank() / 2, 0, "pair");
    for (const auto& group : {all, pair}) {
      for (const Device device : {Device{}, kCuda}) {
        const Tensor x = Tensor::from(std::vector<int64_t>{1}, {1}, device);
        group->all_reduce(x, ReduceOp::sum).wait();
        EXPECT_EQ(x.item(), group->size());
      }
    }
  });
}

}  // namespace
}  // namespace shoal
