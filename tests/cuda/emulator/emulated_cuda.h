// The CUDA that kernels see when a C++ compiler compiles them: core/backend/cuda/launch.h includes this
// instead of NVIDIA's headers. Only what kernels use is here; what is missing does not compile. As on a GPU
// only barriers and __syncwarp order memory: shuffles and votes do not.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/cuda/emulator/machine.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/streams.h"

#undef __global__  // of the toolkit's headers, which tests of host code include before this one
#undef __device__
#undef __host__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (::shoal::emulator::thread_index())
#define blockIdx (::shoal::emulator::block_index())
#define blockDim (::shoal::emulator::block_size())
#define gridDim (::shoal::emulator::grid_size())

// A variable of the block; the key tells it from others, and exists once per instantiation of a kernel.
#define SHOAL_SHARED(T, name, count)                            \
  static const char name##_key = 0;                             \
  auto& name = *static_cast<std::type_identity_t<T>(*)[count]>( \
      ::shoal::emulator::shared_variable(&name##_key, sizeof(T) * static_cast<size_t>(count), #name))
#define SHOAL_DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(::shoal::emulator::dynamic_shared())

#define SHOAL_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace shoal::emulator {

/// Puts a kernel into the stream, with copies of its arguments. Returns a cudaError_t.
template <class... Params, class... Args>
int launch(const char* name, void (*kernel)(Params...), Index3 grid, Index3 block, size_t shared_bytes,
           cudaStream_t stream, const Args&... args) {
  if (const int planted = standin::planted_failure("cudaLaunchKernelExC"); planted != 0) return planted;
  standin::enqueue(stream, name, [=, copies = std::tuple<std::decay_t<Params>...>(args...)] {
    run_grid(name, grid, block, shared_bytes, [&] { std::apply(kernel, copies); });
  });
  return 0;
}

enum class Lane : uint8_t { index, down, up, exclusive_or };

template <class T>
T shuffle(unsigned mask, T value, Lane kind, unsigned by, const char* function, Site site) {
  T all[32];
  const unsigned me = lane();
  unsigned from = by % 32;
  if (kind == Lane::down) from = me + by < 32 ? me + by : me;
  if (kind == Lane::up) from = me >= by ? me - by : me;
  if (kind == Lane::exclusive_or) from = (me ^ by) % 32;
  warp_exchange(mask, &value, all, sizeof(T), false, function, site, 1U << from);
  if ((mask >> from & 1U) == 0) fault(std::string(function) + " reads a lane that is not in its mask");
  return all[from];
}

template <class T, class F>
T atomic_update(T* address, const F& next) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static_assert(sizeof(T) == sizeof(Bits));
  before_atomic();
  auto* bits = reinterpret_cast<Bits*>(address);
  Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &old, std::bit_cast<Bits>(next(std::bit_cast<T>(old))), false,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return std::bit_cast<T>(old);
}

}  // namespace shoal::emulator

inline void __syncthreads(SHOAL_SITE) {
  shoal::emulator::block_barrier(true, {file, line});
}
inline int __syncthreads_or(int predicate, SHOAL_SITE) {
  return shoal::emulator::block_barrier(predicate != 0, {file, line}).any ? 1 : 0;
}
inline int __syncthreads_and(int predicate, SHOAL_SITE) {
  return shoal::emulator::block_barrier(predicate != 0, {file, line}).all ? 1 : 0;
}
inline int __syncthreads_count(int predicate, SHOAL_SITE) {
  return shoal::emulator::block_barrier(predicate != 0, {file, line}).count;
}

inline void __syncwarp(unsigned mask = ~0U, SHOAL_SITE) {
  char all[32];
  const char none = 0;
  shoal::emulator::warp_exchange(mask, &none, all, 1, true, "__syncwarp", {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SHOAL_SITE) {
  char all[32];
  const char mine = predicate != 0 ? 1 : 0;
  shoal::emulator::warp_exchange(mask, &mine, all, 1, false, "__ballot_sync", {file, line});
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; i++) votes |= (mask >> i & 1U) != 0 && all[i] != 0 ? 1U << i : 0U;
  return votes;
}
/// The lanes of `mask` whose value has the bits of this lane's.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, SHOAL_SITE) {
  T all[32];
  shoal::emulator::warp_exchange(mask, &value, all, sizeof(T), false, "__match_any_sync", {file, line});
  unsigned same = 0;
  for (unsigned i = 0; i < 32; i++) same |= (mask >> i & 1U) != 0 && all[i] == value ? 1U << i : 0U;
  return same;
}
inline int __any_sync(unsigned mask, int predicate, SHOAL_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate, SHOAL_SITE) {
  return __ballot_sync(mask, predicate, file, line) == mask ? 1 : 0;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, SHOAL_SITE) {
  return shoal::emulator::shuffle(mask, value, shoal::emulator::Lane::index, static_cast<unsigned>(from),
                                  "__shfl_sync", {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, SHOAL_SITE) {
  return shoal::emulator::shuffle(mask, value, shoal::emulator::Lane::down, by, "__shfl_down_sync",
                                  {file, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, SHOAL_SITE) {
  return shoal::emulator::shuffle(mask, value, shoal::emulator::Lane::up, by, "__shfl_up_sync", {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int by, SHOAL_SITE) {
  return shoal::emulator::shuffle(mask, value, shoal::emulator::Lane::exclusive_or, static_cast<unsigned>(by),
                                  "__shfl_xor_sync", {file, line});
}

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return shoal::emulator::atomic_update(address, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return shoal::emulator::atomic_update(address, [=](T old) { return old < value ? old : value; });
}
template <class T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return shoal::emulator::atomic_update(address, [=](T old) { return old > value ? old : value; });
}

inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
inline int __ffs(unsigned bits) {
  return __builtin_ffs(static_cast<int>(bits));
}
