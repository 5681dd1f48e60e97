// How CUDA kernels are tested: the same body of calls runs on the CPU and on the emulated device.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <vector>

#include "core/backend/cuda/launch.h"
#include "core/backend/cuda/runtime.h"
#include "core/ops/elementwise.h"
#include "tests/cuda/emulator/machine.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal::testing {

inline constexpr Device kCpu{DeviceType::cpu, 0}, kCuda{DeviceType::cuda, 0};

struct Schedule {
  emulator::Order order;
  uint64_t seed;
  int resident_blocks;
};
inline constexpr Schedule kSchedules[] = {
#ifndef SHOAL_EMULATOR_TSAN  // which sees races in any order, and is slow
    {emulator::Order::fifo, 1, 1},
    {emulator::Order::random, 11, 2},
#endif
    {emulator::Order::lifo, 1, 2},
    {emulator::Order::random, 12, 3}};

/// Calls body(text of the schedule) under each of them.
template <class F>
void for_each_schedule(const F& body) {
  const emulator::Options before = emulator::options();
  for (const Schedule& s : kSchedules) {
    emulator::options().order = s.order;
    emulator::options().seed = s.seed;
    emulator::options().resident_blocks = s.resident_blocks;
    emulator::options().preempt_percent = s.order == emulator::Order::random ? 30 : 0;
    body(str("order ", static_cast<int>(s.order), ", seed ", s.seed, ", resident ", s.resident_blocks));
  }
  emulator::options() = before;
}

/// Few and small blocks, so that small tensors go through every loop and a race detector can follow.
class NarrowLaunches {
 public:
  explicit NarrowLaunches(int block_threads = 64, int64_t blocks = 3) {
    cuda::launch_limits() = {block_threads, blocks};
  }
  ~NarrowLaunches() { cuda::launch_limits() = {}; }
  NarrowLaunches(const NarrowLaunches&) = delete;
  NarrowLaunches& operator=(const NarrowLaunches&) = delete;
};

/// Device memory as in training: kept and used again. Otherwise each tensor of a test is an allocation of its
/// own, with guards around it.
class CachedMemory {
 public:
  CachedMemory() {
    cuda::release_idle_memory();
    cuda::memory_options() = {true, int64_t{1} << 20};
  }
  ~CachedMemory() { cuda::memory_options() = {false, int64_t{1} << 20}; }
  CachedMemory(const CachedMemory&) = delete;
  CachedMemory& operator=(const CachedMemory&) = delete;
};

using Tensors = std::vector<Tensor>;

inline Tensor as(const Tensor& x, DType dtype) {
  if (!x.defined() || !is_float(x.dtype()) || x.dtype() == dtype) return x;
  Tensor out = Tensor::empty(x.shape(), dtype, x.device());
  cast_fwd(x.device(), x, out);
  return out;
}
inline Tensors all_as(const Tensors& tensors, DType dtype) {
  Tensors out;
  for (const Tensor& t : tensors) out.push_back(as(t, dtype));
  return out;
}
inline Tensors all_to(const Tensors& tensors, Device device) {
  Tensors out;
  for (const Tensor& t : tensors) out.push_back(t.defined() ? t.to(device).clone() : t);
  return out;
}

/// Runs body with inputs on the emulated device, under every schedule: the bits of its results must not
/// depend on it. Returns them on the CPU.
template <class Body>
Tensors device_results(const Tensors& inputs, const Body& body) {
  Tensors first;
  for_each_schedule([&](const std::string& schedule) {
    const Tensors got = all_to(body(all_to(inputs, kCuda)), kCpu);
    if (first.empty()) first = got;
    for (size_t i = 0; i < got.size(); i++) {
      EXPECT_EQ(got[i].defined(), first[i].defined());
      if (got[i].defined()) {
        EXPECT_TRUE(same_bits(got[i], first[i])) << "result " << i << " with " << schedule;
      }
    }
  });
  return first;
}

inline Tolerance tolerance_of(DType dtype) {
  if (dtype == DType::f64) return {1e-12, 1e-12};
  return dtype == DType::f32 ? Tolerance{2e-5, 2e-6} : Tolerance{1e-2, 1e-2};
}

inline void expect_close(const Tensors& got, const Tensors& want, Tolerance tolerance,
                         const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); i++) {
    ASSERT_EQ(got[i].defined(), want[i].defined()) << what << ", result " << i;
    if (got[i].defined()) {
      EXPECT_TRUE(close(got[i], want[i], tolerance)) << what << ", result " << i;
    }
  }
}

/// body(inputs) returns results on the inputs' device; it is called with the float inputs in `dtype`. What
/// the device computes, with narrow launches and with usual ones, must be what the CPU computes in dtype and
/// in f64.
template <class Body>
void expect_like_cpu(const Tensors& inputs, DType dtype, const Body& body,
                     std::optional<Tolerance> tolerance = std::nullopt) {
  const Tolerance allowed = tolerance.value_or(tolerance_of(dtype));
  const Tensors rounded = all_as(inputs, dtype);
  const Tensors cpu = body(all_to(rounded, kCpu)), exact = body(all_as(rounded, DType::f64));
  const std::string what = str(dtype, " inputs like ", inputs[0].shape());
  {
    const NarrowLaunches narrow;
    const Tensors got = device_results(rounded, body);
    expect_close(got, cpu, allowed, what + " against the CPU");
    expect_close(got, exact, allowed, what + " against f64");
  }
#ifndef SHOAL_EMULATOR_TSAN  // which follows 255 threads
  expect_close(all_to(body(all_to(rounded, kCuda)), kCpu), cpu, allowed, what + " in large blocks");
#endif
}

inline constexpr DType kFloats[] = {DType::f32, DType::bf16, DType::f64};

inline Tensor normal(const Shape& shape, uint64_t seed, double scale = 1) {
  return random_tensor(shape, DType::f64, seed, scale);
}

}  // namespace shoal::testing
