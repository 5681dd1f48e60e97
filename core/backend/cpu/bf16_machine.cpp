// CPU kernels of core/ops/machine.h; compiled for avx512_bf16 too.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <type_traits>
#include <utility>

#include "core/backend/cpu/isa.h"
#include "core/base/threads.h"
#include "core/ops/machine.h"

// clang-format off
SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/bf16_tile.inc"
// clang-format on

// More than latency times throughput of a multiply-add; all fit the registers.
constexpr int kSums = 12;

/// Keeps the compiler from leaving out what made a value.
template <class T>
void use(T value) {
  static std::atomic<T> sink;
  sink.store(value, std::memory_order_relaxed);
}

template <class T>
double multiply_adds(int64_t rounds) {
  Vector<T> sum[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; i++) sum[i] = T(i) - Vector<T>{};
  // Converges to 1, so that no number overflows or becomes subnormal.
  const Vector<T> factor = T(0.75) - Vector<T>{}, summand = T(0.25) - Vector<T>{};
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; i++) sum[i] = sum[i] * factor + summand;
  }
  for (int i = 1; i < kSums; i++) sum[0] += sum[i];
  use<T>(sum[0][0]);
  return 2.0 * kSums * kLanes<T> * static_cast<double>(rounds);
}

double pair_multiply_adds(int64_t rounds) {
  // Sums that begin equal would stay equal, and the compiler would make one of them.
  Floats sum[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; i++) sum[i] = 0x1p-100F * static_cast<float>(i) - Floats{};
  // Two bf16 of 2^-60: 10^9 sums of their products are far from the ends of f32.
  const Words pair = 0x21802180U - Words{};
  for (int64_t r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < kSums; i++) sum[i] = dot_pairs(sum[i], pair, pair);
  }
  for (int i = 1; i < kSums; i++) sum[0] += sum[i];
  use<float>(sum[0][0]);
  return 4.0 * kSums * kFloats * static_cast<double>(rounds);
}

double multiply_add_rounds_impl(DType dtype, int64_t rounds) {
  const int64_t threads = num_threads();
  double flops = 0;
  parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      double own = 0;
      if (dtype == DType::bf16) {
        own = pair_multiply_adds(rounds);
      } else {
        own = dtype == DType::f64 ? multiply_adds<double>(rounds) : multiply_adds<float>(rounds);
      }
      if (t == 0) flops = own * static_cast<double>(threads);
    }
  });
  return flops;
}

float sum_of(const float* from, int64_t n) {
  constexpr int kVectors = 4;  // independent sums hide the latency of an addition
  Floats sum[kVectors] = {};
  int64_t i = 0;
  for (; i + kVectors * kFloats <= n; i += kVectors * kFloats) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v++) sum[v] += load(from + i + v * kFloats);
  }
  for (; i < n; i++) sum[0][0] += from[i];
  return (sum[0] + sum[1] + sum[2] + sum[3])[0];
}

double memory_pass_impl(MemoryPattern pattern, const Tensor& a, const Tensor& b, const Tensor& c) {
  constexpr int64_t kGrain = 1 << 16;
  constexpr float kFactor = 0.5F;
  const int64_t n = a.numel();
  SHOAL_CHECK((pattern != MemoryPattern::copy && pattern != MemoryPattern::triad) || b.numel() == n,
              "memory_pass: expected tensors of one size, got ", a.shape(), " and ", b.shape());
  SHOAL_CHECK(pattern != MemoryPattern::triad || c.numel() == n,
              "memory_pass: expected tensors of one size, got ", a.shape(), " and ", c.shape());
  float* to = a.data<float>();
  const float* from = b ? b.data<float>() : nullptr;
  const float* other = c ? c.data<float>() : nullptr;
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    switch (pattern) {
      case MemoryPattern::read:
        use<float>(sum_of(to + begin, end - begin));
        break;
      case MemoryPattern::copy:
#pragma omp simd
        for (int64_t i = begin; i < end; i++) to[i] = from[i];
        break;
      case MemoryPattern::triad:
#pragma omp simd
        for (int64_t i = begin; i < end; i++) to[i] = from[i] + kFactor * other[i];
        break;
      case MemoryPattern::update:
#pragma omp simd
        for (int64_t i = begin; i < end; i++) to[i] *= kFactor;
        break;
    }
  });
  const int passes = pattern == MemoryPattern::read ? 1 : pattern == MemoryPattern::triad ? 3 : 2;
  return static_cast<double>(passes * a.num_bytes());
}

[[maybe_unused]] const bool added[] = {
    multiply_add_rounds.add(DeviceType::cpu, &multiply_add_rounds_impl, kIsaLevel),
    memory_pass.add(DeviceType::cpu, &memory_pass_impl, kIsaLevel),
};

// clang-format off
SHOAL_KERNELS_END
// clang-format on
