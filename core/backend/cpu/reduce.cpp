// CPU kernels of core/ops/reduce.h.
#include "core/ops/reduce.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstring>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/base/threads.h"

SHOAL_KERNELS_BEGIN

using cpu::Compute;

constexpr int64_t kSumBlock = 1024;              // elements; the sum of a block stays in the first cache
constexpr int64_t kSumGrain = int64_t{1} << 15;  // elements per thread that are worth a thread
constexpr int64_t kSmallCopy = 2048;             // bytes that are not worth streaming

#ifdef __SSE2__
// Without the fence that makes the stores visible to other cores before what follows.
void stream_unfenced(std::byte* to, const std::byte* from, int64_t bytes) {
  const int64_t head = std::min<int64_t>(bytes, -reinterpret_cast<intptr_t>(to) & 15);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    const auto* line = reinterpret_cast<const __m128i*>(from + i);
    auto* out = reinterpret_cast<__m128i*>(to + i);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1), c = _mm_loadu_si128(line + 2),
                  d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}
void fence() {
  _mm_sfence();
}
#else
void stream_unfenced(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}
void fence() {}
#endif

void stream_bytes_impl(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes < kSmallCopy) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  stream_unfenced(to, from, bytes);
  fence();
}

template <class T>
void sum_range(std::span<const std::byte* const> parts, std::span<std::byte* const> outs, size_t num_streamed,
               int64_t begin, int64_t end) {
  using C = Compute<T>;
  alignas(64) C acc[kSumBlock];
  alignas(64) T sums[kSumBlock];
  for (int64_t b = begin; b < end; b += kSumBlock) {
    const int64_t n = std::min(kSumBlock, end - b);
    const T* first = reinterpret_cast<const T*>(parts[0]) + b;
    const T* second = reinterpret_cast<const T*>(parts[1]) + b;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) acc[i] = static_cast<C>(first[i]) + static_cast<C>(second[i]);
    for (size_t p = 2; p < parts.size(); p++) {
      const T* part = reinterpret_cast<const T*>(parts[p]) + b;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) acc[i] += static_cast<C>(part[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) sums[i] = static_cast<T>(acc[i]);
    const auto* from = reinterpret_cast<const std::byte*>(sums);
    const int64_t at = b * static_cast<int64_t>(sizeof(T)), bytes = n * static_cast<int64_t>(sizeof(T));
    for (size_t j = 0; j < outs.size(); j++) {
      if (j < num_streamed && bytes >= kSmallCopy) {
        stream_unfenced(outs[j] + at, from, bytes);
      } else {
        std::memcpy(outs[j] + at, from, static_cast<size_t>(bytes));
      }
    }
  }
  fence();
}

void sum_parts_impl(DType dtype, std::span<const std::byte* const> parts, std::span<std::byte* const> outs,
                    size_t num_streamed, int64_t count) {
  dispatch_storage(dtype, "sum_parts", [&]<class T>() {
    parallel_for(count, kSumGrain,
                 [&](int64_t begin, int64_t end) { sum_range<T>(parts, outs, num_streamed, begin, end); });
  });
}

const bool added_sum_parts = sum_parts.add(DeviceType::cpu, &sum_parts_impl, kIsaLevel);
const bool added_stream_bytes = stream_bytes.add(DeviceType::cpu, &stream_bytes_impl, kIsaLevel);

SHOAL_KERNELS_END
