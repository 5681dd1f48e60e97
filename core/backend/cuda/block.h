// What threads of a block do together, and how they read and write memory. For kernels.
#pragma once

#include <cmath>

#include "core/backend/cuda/launch.h"

namespace shoal::cuda {

/// The type a kernel computes in when values are stored as T.
template <class T>
struct ComputeOf {
  using Type = T;
};
template <>
struct ComputeOf<BFloat16> {
  using Type = float;
};
template <class T>
using Compute = typename ComputeOf<T>::Type;

inline constexpr unsigned kWarp = 32, kMaxWarps = 32, kAllLanes = 0xFFFFFFFFU;

/// N neighbours, read or written by one instruction of up to 16 bytes (two when they are larger).
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};
/// How many elements a thread should move at once when T is the largest type in play.
template <class T>
inline constexpr int kPack = sizeof(T) >= 8 ? 1 : static_cast<int>(16 / sizeof(T));

/// Whether packs may be read from or written to all these places; nullptr counts as aligned.
inline bool all_aligned(std::initializer_list<const void*> places) {
  return std::all_of(places.begin(), places.end(),
                     [](const void* place) { return reinterpret_cast<uintptr_t>(place) % 16 == 0; });
}

/// N values at `from`, in their computing type.
template <int N, class T>
SHOAL_DEVICE Pack<Compute<T>, N> load(const T* from) {
  const auto stored = *reinterpret_cast<const Pack<T, N>*>(from);
  Pack<Compute<T>, N> values;
  for (int i = 0; i < N; i++) values.v[i] = static_cast<Compute<T>>(stored.v[i]);
  return values;
}
/// Rounds N values to T and writes them to `to`.
template <int N, class T>
SHOAL_DEVICE void store(T* to, const Pack<Compute<T>, N>& values) {
  Pack<T, N> stored;
  for (int i = 0; i < N; i++) stored.v[i] = values.v[i];
  *reinterpret_cast<Pack<T, N>*>(to) = stored;
}

/// Copies N elements, bit for bit.
template <int N, class T>
SHOAL_DEVICE void copy(T* to, const T* from) {
  *reinterpret_cast<Pack<T, N>*>(to) = *reinterpret_cast<const Pack<T, N>*>(from);
}
/// N times NaN: what stands where an index was wrong.
template <int N, class T>
SHOAL_DEVICE void store_nan(T* to) {
  Pack<Compute<T>, N> values;
  for (int i = 0; i < N; i++) values.v[i] = static_cast<Compute<T>>(NAN);
  store<N>(to, values);
}

/// The sum over the lanes of a warp, in every lane; always in the same order.
template <class T>
SHOAL_DEVICE T warp_sum(T value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

/// The largest value of a warp, in every lane; NaN is left out.
template <class T>
SHOAL_DEVICE T warp_max(T value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

/// Sums of N values over the threads of a block, in every thread; always in the same order for a block size.
/// One barrier each: two areas of scratch are used in turn, and nobody gets to an area's next use before all
/// have passed the barrier in between.
template <class T, int N>
class BlockSums {
 public:
  static constexpr int kScratch = 2 * N * static_cast<int>(kMaxWarps);
  /// scratch: kScratch elements of shared memory, for nothing else.
  SHOAL_DEVICE explicit BlockSums(T* scratch) : scratch_(scratch) {}

  SHOAL_DEVICE void operator()(T (&values)[N]) {
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
    T* area = scratch_ + turn_ * N * kMaxWarps;
    turn_ ^= 1U;
    for (int i = 0; i < N; i++) {
      const T sum = warp_sum(values[i]);
      if (lane == 0) area[i * kMaxWarps + warp] = sum;
    }
    __syncthreads();
    for (int i = 0; i < N; i++) values[i] = warp_sum(lane < num_warps ? area[i * kMaxWarps + lane] : T(0));
  }

 private:
  T* scratch_;
  unsigned turn_ = 0;
};

/// The largest value of a block, in every thread, as BlockSums.
template <class T>
class BlockMax {
 public:
  static constexpr int kScratch = 2 * static_cast<int>(kMaxWarps);
  SHOAL_DEVICE explicit BlockMax(T* scratch) : scratch_(scratch) {}

  /// lowest: what a missing warp counts as.
  SHOAL_DEVICE T operator()(T value, T lowest) {
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
    T* area = scratch_ + turn_ * kMaxWarps;
    turn_ ^= 1U;
    value = warp_max(value);
    if (lane == 0) area[warp] = value;
    __syncthreads();
    return warp_max(lane < num_warps ? area[lane] : lowest);
  }

 private:
  T* scratch_;
  unsigned turn_ = 0;
};

}  // namespace shoal::cuda
