// Dispatch and combine of rows on a device, by every dispatcher.
#include "parallel/moe/dispatcher.h"

#include "core/tensor/stream.h"
#include "parallel/device_world.h"
#include "parallel/staged_communicator.h"
#include "tests/cuda/standin/nccl.h"
#include "tests/cuda/standin/streams.h"
#include "tests/parallel/communicator_suite.h"
#include "tests/parallel/moe/dispatcher_suite.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"

namespace shoal {
namespace {

using testing::DispatchResult;
using testing::DispatchWay;
using testing::equal_bits;
using testing::error_of;
using testing::routing_cases;
using testing::RoutingCase;
using testing::run_dispatch;
constexpr Device kCuda{DeviceType::cuda, 0};

void expect_same(const DispatchResult& got, const DispatchResult& want) {
  EXPECT_EQ(got.rows_per_expert, want.rows_per_expert);
  EXPECT_TRUE(equal_bits(got.x_RD, want.x_RD)) << "x_RD";
  // The CPU's kernels may fuse products and sums.
  EXPECT_TRUE(testing::close(got.y_TD, want.y_TD, {1e-6, 1e-6})) << "y_TD";
  EXPECT_TRUE(testing::close(got.dx_TD, want.dx_TD, {1e-6, 1e-6})) << "dx_TD";
  EXPECT_TRUE(testing::close(got.dweights_TK, want.dweights_TK, {1e-6, 1e-6})) << "dweights_TK";
}

class CudaDispatchers : public ::testing::TestWithParam<RoutingCase> {};

TEST_P(CudaDispatchers, MoveRowsLikeOnTheCpu) {
  const RoutingCase& c = GetParam();
  const auto single = make_single_communicator();
  expect_same(run_dispatch(*single, "local", c, DType::f32, kCuda),
              run_dispatch(*single, "local", c, DType::f32));
  run_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    const auto staged = stage_device_tensors(world);
    for (const char* kind : {"all_to_all", "all_gather"})
      expect_same(run_dispatch(*staged, kind, c, DType::f32, kCuda),
                  run_dispatch(*world, kind, c, DType::f32));
    const DispatchWay apart{.ranks_per_node = 1};
    expect_same(run_dispatch(*staged, "hierarchical", c, DType::f32, kCuda, apart),
                run_dispatch(*world, "hierarchical", c, DType::f32, {}, apart));
    const DispatchWay way{.chunks = 2, .padded = true};
    expect_same(run_dispatch(*staged, "all_to_all", c, DType::f32, kCuda, way),
                run_dispatch(*world, "all_to_all", c, DType::f32, {}, way));
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaDispatchers, ::testing::ValuesIn(routing_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

#ifndef SHOAL_EMULATOR_TSAN  // minutes, and the host's part is not compiled with TSan here
TEST(CudaDispatcher, PartsHaveTheBitsOfTheWholeWheneverStreamsRun) {
  using standin::Policy;
  std::vector<standin::Options> policies = {{Policy::lazy, 0, 1}};
  for (const int stream : {1, 2}) policies.push_back({Policy::favour, stream, 1});
  for (const uint64_t seed : {1, 2, 3}) policies.push_back({Policy::random, 0, seed});
  for (const RoutingCase& c : routing_cases()) {
    if (c.name != std::string("UnevenTokens") && c.name != std::string("EmptyExperts")) continue;
    for (const standin::Options& policy : policies) {
      standin::set_options(policy);
      run_ranks(3, [&](const std::shared_ptr<Communicator>& host) {
        const StreamScope own_stream(make_stream(kCuda));
        const auto group = device_world(host, kCuda);
        for (const bool padded : {false, true}) {
          const DispatchResult whole =
              run_dispatch(*group, "all_to_all", c, DType::f32, kCuda, {.padded = padded});
          const DispatchResult parts =
              run_dispatch(*group, "all_to_all", c, DType::f32, kCuda, {.chunks = 2, .padded = padded});
          EXPECT_EQ(parts.rows_per_expert, whole.rows_per_expert);
          EXPECT_TRUE(equal_bits(parts.x_RD, whole.x_RD)) << c.name;
          EXPECT_TRUE(equal_bits(parts.y_TD, whole.y_TD)) << c.name;
          EXPECT_TRUE(equal_bits(parts.dx_TD, whole.dx_TD)) << c.name;
          EXPECT_TRUE(equal_bits(parts.dweights_TK, whole.dweights_TK)) << c.name;
        }
        device_runtime(kCuda.type).synchronize();
        host->barrier();  // before the end of NCCL
      });
    }
  }
  standin::set_options({});
}

// The host knows padded counts, and sends them itself.
TEST(CudaDispatcher, CountsTravelBetweenTheDevicesAndAreReadOnce) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  std::array<size_t, 2> calls{};
  std::array<uint64_t, 2> waits{};
  for (const bool padded : {false, true}) {
    run_ranks(3, [&](const std::shared_ptr<Communicator>& host) {
      const StreamScope own_stream(make_stream(kCuda));
      const auto group = device_world(host, kCuda);
      EXPECT_TRUE(group->queues(kCuda));
      EXPECT_FALSE(group->queues({}) || stage_device_tensors(host)->queues(kCuda));
      auto dispatcher =
          DispatcherRegistry::make(Choice{"all_to_all", nullptr}, DispatcherContext{group.get(), 4});
      const Tensor ids = Tensor::from(std::vector<int32_t>{0, 3, 1, 2}, {2, 2}, kCuda);
      const Tensor x = Tensor::zeros({2, 8}, DType::f32, kCuda);
      device_runtime(kCuda.type).synchronize();
      if (host->rank() == 0) standin::clear_nccl_log();
      host->barrier();
      const uint64_t before = standin::counts().host_waits;
      dispatcher->dispatch(x, ids, padded ? 1 : Dispatcher::kAsNeeded).wait();
      if (host->rank() == 0) waits[padded ? 1 : 0] = standin::counts().host_waits - before;
      device_runtime(kCuda.type).synchronize();
      host->barrier();
      if (host->rank() == 0) calls[padded ? 1 : 0] = standin::nccl_log_size();
      host->barrier();
    });
    EXPECT_EQ(standin::nccl_log_problem(), "");
  }
  EXPECT_GT(calls[0], calls[1]);
  EXPECT_EQ(waits[0], 1U);
  EXPECT_EQ(waits[1], 0U);
  standin::set_options({});
}
#endif

TEST(CudaDispatcher, RefusesAnIdThatIsNoExpertWhenTheCountsAreRead) {
  const RoutingCase c{"wrong", 4, 2, [](int) { return 3; },
                      [](int64_t t, int64_t k) { return static_cast<int32_t>(t == 1 && k == 1 ? 4 : 0); }};
  const std::string error =
      error_of([&] { run_dispatch(*make_single_communicator(), "local", c, DType::f32, kCuda); });
  EXPECT_NE(
      error.find("dispatch: an expert id that is neither -1 (dropped) nor one of the experts (position 3)"),
      std::string::npos)
      << error;
}

}  // namespace
}  // namespace shoal
