// Each call of the CUDA run time and of cublasLt fails once: a training either ends with an Error that names
// the call, or gives what it gives without the failure; nothing crashes, hangs or keeps memory.
#include <cuda_runtime_api.h>

#include <map>
#include <set>

#include "core/base/log.h"
#include "tests/cuda/short_training.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::testing {
namespace {

const ParityCase kCase{.dispatcher = "local", .balance = "bias", .dtype = DType::f32, .model = "layers: 2"};

struct Ending {
  double loss = 0;
  std::string error, failed;  // failed: the function
  uint64_t calls = 0;
};

/// A training in a thread of its own, as a rank's, whose call `number` fails.
Ending training_with(uint64_t number, int error, bool stays) {
  Ending ending;
  run_ranks(1, [&](const std::shared_ptr<Communicator>& world) {
    const NarrowLaunches narrow(32, 2);  // fewer threads to emulate
    standin::fail_call(number, error, stays);
    ending.error = error_of([&] { ending.loss = short_training(world, kCase); });
    ending.failed = standin::failed_function() == nullptr ? "" : standin::failed_function();
    ending.calls = standin::num_library_calls();
    standin::fail_nothing();
  });
  device_runtime(DeviceType::cuda).synchronize();  // what the thread has left is given back
  return ending;
}

bool names(const Ending& ending) {
  const std::string what = ending.failed == "cudaLaunchKernelExC" ? "cannot be launched" : ending.failed;
  return ending.error.find(what) != std::string::npos;
}

class CudaFailures : public ::testing::Test {
 protected:
  CudaFailures() {
    log::set_quiet(true);
    standin::set_options({standin::Policy::lazy, 0, 1});
    whole_ = training_with(UINT64_MAX, 0, false);
    EXPECT_EQ(whole_.error, "");
    cuda::release_idle_memory();
  }
  ~CudaFailures() override {
    standin::set_options({});
    log::set_quiet(false);
  }
  /// Calls spread over all of a training: the first ones, and then about `count`.
  static std::vector<uint64_t> some_calls(uint64_t of, uint64_t count) {
    std::vector<uint64_t> calls;
    for (uint64_t i = 0; i < 8; i++) calls.push_back(i);
    const uint64_t step = of / count | 1;
    for (uint64_t i = 8; i < of; i += step) calls.push_back(i);
    return calls;
  }
  Ending whole_;
};

TEST_F(CudaFailures, OneCallThatFailsIsNamedOrMadeUpFor) {
  std::map<std::string, int> met;
  const int64_t tensors = device_runtime(DeviceType::cuda).stats().current_bytes;
  for (const uint64_t number : some_calls(whole_.calls, 40)) {
    const int64_t before = standin::device_bytes();
    const Ending ending = training_with(number, cudaErrorIllegalAddress, false);
    met[ending.failed]++;
    if (ending.error.empty()) {
      EXPECT_EQ(ending.loss, whole_.loss) << ending.failed << " failed, call " << number;
    } else {
      EXPECT_TRUE(names(ending)) << ending.failed << " failed, call " << number << ": " << ending.error;
    }
    EXPECT_EQ(device_runtime(DeviceType::cuda).stats().current_bytes, tensors)
        << ending.failed << ", call " << number;
    // Memory of which nobody can say any more when other streams are done with it stays.
    const std::set<std::string> marks = {"cudaEventRecord", "cudaStreamWaitEvent",
                                         "cudaEventCreateWithFlags"};
    if (!marks.contains(ending.failed)) {
      EXPECT_EQ(standin::device_bytes(), before) << ending.failed << ", call " << number;
    }
  }
  for (const char* function : {"cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMallocAsync", "cudaEventRecord",
                               "cudaStreamWaitEvent", "cudaMemsetAsync", "cublasLtMatmul"})
    EXPECT_GT(met[function], 0) << function;
}

TEST_F(CudaFailures, ADeviceThatFailsForGoodEndsTheTraining) {
  for (const bool cache : {false, true}) {
    cuda::memory_options().cache = cache;
    const uint64_t calls = training_with(UINT64_MAX, 0, false).calls;
    for (const uint64_t number : some_calls(calls, 8)) {
      const Ending ending = training_with(number, cudaErrorIllegalAddress, true);
      if (ending.failed == "cudaFreeAsync" && ending.loss == whole_.loss) continue;  // after the end
      EXPECT_TRUE(ending.error.starts_with("cu"))
          << ending.failed << " failed, call " << number << ": " << ending.error;
    }
    cuda::memory_options().cache = false;
    cuda::release_idle_memory();
  }
}

TEST_F(CudaFailures, MemoryThatIsUsedUpAnywhereIsAnErrorThatSaysSo) {
  constexpr int64_t kLeast = 100, kMore = int64_t{192} << 10;
  for (const bool cache : {false, true}) {
    cuda::memory_options() = {cache, int64_t{1} << 16};
    training_with(UINT64_MAX, 0, false);
    int refused = 0, done = 0;
    for (int64_t spare = kLeast; done == 0; spare += kMore) {
      cuda::release_idle_memory();
      standin::device_capacity() = standin::device_bytes() + spare;
      Ending ending;
      error_of([&] { ending = training_with(UINT64_MAX, 0, false); });
      standin::device_capacity() = int64_t{1} << 30;
      if (ending.error.empty()) {
        EXPECT_EQ(ending.loss, whole_.loss);
        done++;
      } else {
        EXPECT_NE(ending.error.find("cuda memory: cannot allocate"), std::string::npos) << ending.error;
        refused++;
      }
      ASSERT_LT(refused, 200);
    }
    EXPECT_GT(refused, 2);
  }
  cuda::memory_options() = {false, int64_t{1} << 20};
}

}  // namespace
}  // namespace shoal::testing
