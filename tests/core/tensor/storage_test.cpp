#include "core/tensor/storage.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "core/tensor/tensor.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kPlainAllocations = true;  // each allocation goes to the system then
#else
constexpr bool kPlainAllocations = false;
#endif

MemoryStats stats() {
  return device_runtime(DeviceType::cpu).stats();
}

TEST(Storage, CurrentAndPeakBytesFollowLiveTensors) {
  const int64_t before = stats().current_bytes;
  {
    const Tensor a = Tensor::empty({1000}, DType::f32);
    EXPECT_EQ(stats().current_bytes, before + 4032);  // rounded up to 64 bytes
    device_runtime(DeviceType::cpu).reset_peak();
    { const Tensor b = Tensor::empty({512}, DType::f64); }
    EXPECT_EQ(stats().peak_bytes, before + 4032 + 4096);
    EXPECT_EQ(stats().current_bytes, before + 4032);
  }
  EXPECT_EQ(stats().current_bytes, before);
}

TEST(Storage, IsAlignedAndNeverOverlaps) {
  std::vector<Tensor> tensors;
  for (int64_t n = 0; n < 200; n++) {
    tensors.push_back(Tensor::empty({n * 7}, DType::u8));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors.back().bytes()) % 64, 0U);
    std::memset(tensors.back().bytes(), static_cast<int>(n), static_cast<size_t>(n * 7));
  }
  for (size_t n = 0; n < 200; n++) {
    for (const uint8_t v : tensors[n].to_vector<uint8_t>()) ASSERT_EQ(v, n);
    if (n % 3 == 0) tensors[n] = Tensor::zeros({static_cast<int64_t>(n) * 11}, DType::u8);
  }
  for (size_t n = 0; n < 200; n++) {
    for (const uint8_t v : tensors[n].to_vector<uint8_t>()) ASSERT_EQ(v, n % 3 == 0 ? 0 : n);
  }
}

TEST(Storage, SteadyReuseAsksTheSystemForNothing) {
  if (kPlainAllocations) GTEST_SKIP() << "sanitizers use plain allocations";
  const auto step = [] {
    std::vector<Tensor> live;
    for (int64_t n = 1; n < 60; n++) {
      live.push_back(Tensor::empty({n * 12345}, DType::f32));
      if (n % 4 == 0) live.erase(live.begin());
    }
  };
  step();
  const MemoryStats before = stats();
  for (int i = 0; i < 20; i++) step();
  EXPECT_EQ(stats().num_system_allocations, before.num_system_allocations);
  EXPECT_EQ(stats().reserved_bytes, before.reserved_bytes);
}

TEST(Storage, FreedNeighboursMergeIntoOneBlock) {
  if (kPlainAllocations) GTEST_SKIP() << "sanitizers use plain allocations";
  constexpr int64_t kPiece = 8 << 20;
  { const Tensor whole = Tensor::empty({4 * kPiece}, DType::u8); }
  const int64_t allocations = stats().num_system_allocations;
  for (const bool forwards : {true, false}) {
    std::vector<Tensor> pieces;
    for (int i = 0; i < 4; i++) pieces.push_back(Tensor::empty({kPiece}, DType::u8));
    while (!pieces.empty()) pieces.erase(forwards ? pieces.begin() : pieces.end() - 1);
    const Tensor whole = Tensor::empty({4 * kPiece}, DType::u8);
    EXPECT_EQ(stats().num_system_allocations, allocations);
  }
}

TEST(Storage, IsSafeFromManyThreads) {
  const int64_t before = stats().current_bytes;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; i++) {
    threads.emplace_back([i] {
      for (int64_t n = 0; n < 300; n++) {
        const Tensor t = Tensor::empty({n * 13 + 1}, DType::i32);
        std::fill_n(t.data<int32_t>(), t.numel(), i);
        const auto values = t.to_vector<int32_t>();
        EXPECT_EQ(std::count(values.begin(), values.end(), i), t.numel());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(stats().current_bytes, before);
}

}  // namespace
}  // namespace shoal
