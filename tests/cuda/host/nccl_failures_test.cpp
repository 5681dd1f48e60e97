// A rank in whose training a call of CUDA, cublasLt or NCCL fails: no other rank waits for it for ever.
#include <cuda_runtime_api.h>
#include <nccl.h>  // before the names of kernels, which it uses for its own

#include <functional>

#include "core/base/log.h"
#include "core/tensor/stream.h"
#include "parallel/nccl_communicator.h"
#include "tests/cuda/short_training.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/nccl.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::testing {
namespace {

struct Endings {
  std::vector<std::string> errors;  // of ranks
  std::string failed;               // the function
  uint64_t calls = 0;               // of the last rank
};

/// Ranks that are threads train; the last one first calls `plan`. limit_s: of one wait.
Endings training_with(int ranks, double limit_s, const std::function<void()>& plan) {
  Endings endings;
  endings.errors.resize(static_cast<size_t>(ranks));
  const auto train = [&](const std::shared_ptr<Communicator>& world) {
    const StreamScope own_stream(make_stream(kCuda));
    const NarrowLaunches narrow(32, 2);  // fewer threads to emulate
    const bool last = world->rank() == ranks - 1;
    standin::fail_nothing();
    if (last) plan();
    std::string error = error_of([&] {
      std::string why;
      const NcclOptions options{.ordered_sums = true, .limit_s = limit_s, .small_reduce_bytes = 1000};
      short_training(make_nccl_group(world, kCuda, options, &why),
                     {.ep = ranks, .balance = "bias", .dtype = DType::f32, .model = "layers: 2"});
    });
    if (last) {
      endings.failed = standin::failed_function() == nullptr ? "" : standin::failed_function();
      endings.calls = standin::num_library_calls();
    }
    standin::fail_nothing();
    endings.errors[static_cast<size_t>(world->rank())] = error;
    if (!error.empty()) throw Error(error);  // wakes those that wait on the host
  };
  error_of([&] { run_ranks(ranks, train); });
  standin::clear_nccl_log();
  EXPECT_EQ(standin::num_nccl_communicators(), 0) << endings.failed;
  return endings;
}

class NcclFailures : public ::testing::Test {
 protected:
  NcclFailures() {
    log::set_quiet(true);
    standin::set_options({standin::Policy::lazy, 0, 1});
  }
  ~NcclFailures() override {
    standin::set_options({});
    log::set_quiet(false);
  }
  /// Every rank has an error, and nobody waited until the limit.
  static void expect_all_end(const Endings& endings) {
    for (const std::string& error : endings.errors) {
      EXPECT_NE(error, "") << endings.failed << " failed, and the training went on";
      EXPECT_EQ(error.find("gave up"), std::string::npos) << endings.failed << " failed: " << error;
    }
  }
};

TEST_F(NcclFailures, ARankWhoseDeviceFailsEndsTheTrainingOfAll) {
  constexpr double kPatient = 60;
  const Endings whole = training_with(2, kPatient, [] {});
  EXPECT_EQ(whole.errors, std::vector<std::string>(2));
  for (const auto& [ranks, trials] : {std::pair{2, 12}, {3, 3}}) {
    for (uint64_t i = 0; i < static_cast<uint64_t>(trials); i++) {
      const uint64_t number = 40 + i * (whole.calls - 60) / static_cast<uint64_t>(trials);
      expect_all_end(
          training_with(ranks, kPatient, [=] { standin::fail_call(number, cudaErrorIllegalAddress, true); }));
    }
  }
}

TEST_F(NcclFailures, EachFunctionOfTheLibraryThatFailsEndsTheTrainingOfAll) {
  for (const char* function : {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd", "ncclAllGather"}) {
    const Endings endings =
        training_with(2, 60, [=] { standin::fail_next(function, cudaErrorIllegalAddress); });
    EXPECT_EQ(endings.failed, function);
    expect_all_end(endings);
    EXPECT_NE(endings.errors.back().find(str(function, " failed: unhandled cuda error")), std::string::npos)
        << endings.errors.back();
  }
}

// A rank that fails while the groups are made leaves others to the limit of time.
TEST_F(NcclFailures, ARankThatFailsAtTheStartEndsTheTrainingOfAll) {
  bool limit_met = false;
  for (uint64_t number = 0; number < 24; number++) {
    const Endings endings =
        training_with(2, 0.3, [=] { standin::fail_call(number, cudaErrorIllegalAddress, true); });
    for (const std::string& error : endings.errors)
      EXPECT_NE(error, "") << endings.failed << " failed, and the training went on";
    limit_met = limit_met || endings.errors[0].starts_with("waited 0.3 s in the start of NCCL [");
  }
  EXPECT_TRUE(limit_met);
}

}  // namespace
}  // namespace shoal::testing
