// Memory, copies and errors of the CUDA backend's host code, on the stand-in of CUDA's run time.
#include <cuda_runtime_api.h>

#include <atomic>
#include <numeric>

#include "core/backend/cuda/memory_pool.h"
#include "core/tensor/stream.h"
#include "tests/cuda/standin/cudart.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/streams.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

DeviceRuntime& runtime() {
  return device_runtime(DeviceType::cuda);
}

Tensor bytes_on_device(int64_t count) {
  return Tensor::empty({count}, DType::u8, kCuda);
}

class CudaRuntime : public ::testing::Test {
 protected:
  CudaRuntime() { runtime().synchronize(); }  // makes the record of faults, which stays
  void TearDown() override {
    standin::set_options({});
    standin::num_devices() = 1;
    standin::device_capacity() = int64_t{1} << 30;
  }
  CachedMemory cached_;
};

TEST_F(CudaRuntime, MemoryOfATensorThatIsGoneIsUsedAtOnceByItsStream) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const StreamScope scope(make_stream(kCuda));
  Tensor x = bytes_on_device(1000);
  const void* place = x.bytes();
  x = {};
  const int64_t allocations = runtime().stats().num_system_allocations;
  EXPECT_EQ(bytes_on_device(900).bytes(), place);
  EXPECT_EQ(runtime().stats().num_system_allocations, allocations);
}

TEST_F(CudaRuntime, AnotherStreamGetsMemoryOnlyWhenTheWorkBeforeIsDone) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const Stream one = make_stream(kCuda), other = make_stream(kCuda);
  const auto segment = [](const Stream& stream) {
    const StreamScope scope(stream);
    const Tensor x = bytes_on_device(3 * kMiB);
    x.set_zero();
    return static_cast<const void*>(x.bytes());
  };
  const void* place = segment(one);
  const void* mine = segment(other);  // the first stream is marked, but not there yet
  EXPECT_NE(mine, place);
  runtime().synchronize();
  const StreamScope scope(other);
  const Tensor first = bytes_on_device(3 * kMiB), second = bytes_on_device(3 * kMiB);
  EXPECT_EQ(first.bytes(), mine);
  EXPECT_EQ(second.bytes(), place);
}

TEST_F(CudaRuntime, MemoryThatAnotherStreamUsesStaysUntilThatIsDone) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const Stream one = make_stream(kCuda), other = make_stream(kCuda);
  const StreamScope scope(one);
  Tensor x = bytes_on_device(1000);
  const void* place = x.bytes();
  std::atomic<bool> ran{false};
  standin::enqueue(reinterpret_cast<cudaStream_t>(other.handle), "note", [&ran] { ran = true; });
  x.used_on(one);  // nothing new
  x.used_on(other);
  x = {};
  Event made;
  made.record(one);
  made.host_wait();  // for the stream that it was made for; the other one has done nothing
  EXPECT_NE(bytes_on_device(1000).bytes(), place);
  EXPECT_FALSE(ran.load());
  runtime().synchronize();
  EXPECT_TRUE(ran.load());
  const Tensor a = bytes_on_device(1000), b = bytes_on_device(1000);
  EXPECT_TRUE(a.bytes() == place || b.bytes() == place);
}

TEST_F(CudaRuntime, NeighboursAreMerged) {
  cuda::MemoryPool pool;
  std::vector<char> memory(4096);
  pool.add({memory.data(), 2048, 0, 0});
  pool.add({memory.data() + 2048, 2048, 0, 0});  // another segment: never merged with the first
  char* a = pool.take(512);
  char* b = pool.take(512);
  char* c = pool.take(1024);
  EXPECT_EQ(a + 512, b);
  EXPECT_EQ(b + 512, c);
  EXPECT_EQ(pool.take(4096), nullptr);
  pool.give_back(a, 512);
  pool.give_back(c, 1024);
  pool.give_back(b, 512);
  EXPECT_EQ(pool.take(2048), memory.data());
  EXPECT_EQ(pool.take(2048), memory.data() + 2048);
  EXPECT_EQ(pool.take(1), nullptr);
  pool.give_back(memory.data(), 2048);
  EXPECT_TRUE(pool.take_unused(0).empty()) << "given back after the mark";
  EXPECT_EQ(pool.take_unused(pool.num_releases()).size(), 1U);
  EXPECT_FALSE(pool.has_unused());
}

TEST_F(CudaRuntime, WhenMemoryIsShortWhatIsKeptIsGivenBackAndThenTheErrorSaysWhatIsUsed) {
  runtime().synchronize();
  standin::device_capacity() = standin::device_bytes() + 16 * kMiB;
  const StreamScope scope(make_stream(kCuda));
  Tensor small = bytes_on_device(6 * kMiB), other = bytes_on_device(6 * kMiB);
  small = other = {};
  bytes_on_device(15 * kMiB);  // fits only when the two are given back
  const Tensor used = bytes_on_device(10 * kMiB);
  const std::string text = error_of([] { bytes_on_device(20 * kMiB); });
  for (const char* part : {"cannot allocate 20", "on the device", "in tensors", "data.micro_batch"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

TEST_F(CudaRuntime, CopiesOfAnySizeArriveUnderEveryPolicy) {
  using standin::Policy;
  std::vector<int32_t> values(5 * kMiB / 2 + 3);  // more than the page-locked buffers hold at once per part
  std::iota(values.begin(), values.end(), 5);
  for (const standin::Options& policy :
       {standin::Options{Policy::eager, 0, 1}, {Policy::lazy, 0, 1}, {Policy::random, 0, 3}}) {
    standin::set_options(policy);
    const StreamScope scope(make_stream(kCuda));
    std::vector<int32_t> source = values;
    const auto count = static_cast<int64_t>(values.size());
    const Tensor x = Tensor::from(source, {count}, kCuda);
    std::fill(source.begin(), source.end(), 0);  // the copy has its own
    const Tensor y = x.clone();
    EXPECT_TRUE(y.to_vector<int32_t>() == values);
    EXPECT_TRUE(y.rows(7, 9).to_vector<int32_t>() == std::vector<int32_t>({12, 13}));
    EXPECT_TRUE(y.to(kCpu).to_vector<int32_t>() == values);
  }
}

TEST_F(CudaRuntime, CopiesToTheDeviceDoNotWait) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const StreamScope scope(make_stream(kCuda));
  const uint64_t waits = standin::counts().host_waits;
  std::vector<Tensor> tensors;
  for (float i = 0; i < 6; i++) tensors.push_back(Tensor::from(std::vector<float>{i}, {1}, kCuda));
  EXPECT_EQ(standin::counts().host_waits, waits);
  for (size_t i = 0; i < 6; i++) EXPECT_EQ(tensors[i].item(), static_cast<double>(i));
  EXPECT_EQ(standin::counts().host_waits, waits + 6);
}

TEST_F(CudaRuntime, AnErrorNamesTheKernelsBeforeIt) {
  const Tensor x = Tensor::zeros({8}, DType::f32, kCuda);
  fill(kCuda, x, 1);
  scale_fwd(kCuda, x, 2, x);
  standin::fail_next("cudaEventSynchronize", cudaErrorIllegalAddress);
  const std::string text = error_of([&] { x.to_vector<float>(); });
  EXPECT_NE(text.find("cudaEventSynchronize: an illegal memory access"), std::string::npos) << text;
  EXPECT_NE(text.find("map_kernel"), std::string::npos) << text;
}

TEST_F(CudaRuntime, MemoryThatIsReleasedAfterTheDeviceHasFailedIsNotUsedAgain) {
  for (const bool cache : {true, false}) {
    cuda::memory_options().cache = cache;
    const Stream other = make_stream(kCuda);
    Tensor x = bytes_on_device(1000);
    const void* place = x.bytes();
    x.used_on(other);
    standin::fail_call(0, cudaErrorIllegalAddress, true);
    x = {};  // must not throw
    standin::fail_nothing();
    EXPECT_NE(bytes_on_device(1000).bytes(), place);
  }
}

TEST_F(CudaRuntime, AnErrorGivesPageLockedBuffersBackOnlyWhenTheirCopiesAreMarked) {
  standin::set_options({standin::Policy::lazy, 0, 1});
  const StreamScope scope(make_stream(kCuda));
  const Tensor x = bytes_on_device(8), y = bytes_on_device(8);
  standin::fail_next("cudaEventRecord", cudaErrorIllegalAddress);
  EXPECT_NE(error_of([&] { x.copy_from(Tensor::from(std::vector<uint8_t>(8, 1), {8})); }), "");
  y.copy_from(Tensor::from(std::vector<uint8_t>(8, 2), {8}));  // while the first copy is on its way
  EXPECT_EQ(x.to_vector<uint8_t>(), std::vector<uint8_t>(8, 1));
  EXPECT_EQ(y.to_vector<uint8_t>(), std::vector<uint8_t>(8, 2));
}

TEST_F(CudaRuntime, ADeviceIsChosenByTheLocalRankAndMissedClearly) {
  standin::num_devices() = 3;
  const auto current = [] {
    int device = -1;
    cudaGetDevice(&device);
    return device;
  };
  runtime().select(4);
  EXPECT_EQ(current(), 1);
  runtime().select(0);
  EXPECT_EQ(current(), 0);
  standin::num_devices() = 0;
  try {
    runtime().select(0);
    FAIL() << "no device";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("this machine has no usable GPU"), std::string::npos)
        << error.what();
  }
}

TEST_F(CudaRuntime, TheStandInRefusesWhatWouldBeWrongOnADevice) {
  const Tensor x = Tensor::zeros({8}, DType::f32, kCuda);
  std::vector<float> pageable(8);
  void* to = x.bytes();
  void* locked = runtime().allocate_host(32);
  const auto copy = [](void* target, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return error_of([&] { cudaMemcpyAsync(target, from, bytes, kind, nullptr); });
  };
  EXPECT_NE(copy(to, pageable.data(), 32, cudaMemcpyHostToDevice).find("pageable"), std::string::npos);
  EXPECT_NE(copy(to, locked, 32, cudaMemcpyDeviceToHost).find("another direction"), std::string::npos);
  cuda::memory_options().cache = false;  // whose allocations are the tensors
  const Tensor small = Tensor::zeros({4}, DType::f32, kCuda);
  EXPECT_NE(copy(small.bytes(), locked, 32, cudaMemcpyHostToDevice).find("not within one allocation"),
            std::string::npos);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_NE(error_of([&] { cudaStreamSynchronize(stream); }).find("destroyed stream"), std::string::npos);
  runtime().release_host(locked);
}

TEST_F(CudaRuntime, NewMemoryIsFullOfNan) {
  cuda::memory_options().cache = false;
  for (const float value : Tensor::empty({5}, DType::f32, kCuda).to_vector<float>())
    EXPECT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace shoal::testing
