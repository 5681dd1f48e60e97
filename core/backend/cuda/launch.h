// What CUDA kernels and their launchers are written with. Kernels are ordinary CUDA C++ that also compiles as
// C++ for the emulator (tests/cuda/emulator), so that they run where no GPU is. For that they use
//   SHOAL_SHARED(T, name, count), SHOAL_DYNAMIC_SHARED(T, name)   instead of __shared__,
//   SHOAL_LAUNCH(kernel, shape, args...)                          instead of <<<...>>>,
// 1-dimensional blocks of whole warps, and no inline assembly.
#pragma once

#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_runtime.h>
#else
#include <emulated_cuda.h>
#endif

#include "core/backend/cuda/error.h"
#include "core/base/error.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

#ifdef __CUDACC__
#define SHOAL_SHARED(T, name, count) __shared__ T name[count]
#define SHOAL_DYNAMIC_SHARED(T, name)                             \
  extern __shared__ __align__(128) unsigned char shoal_dynamic[]; \
  T* name = reinterpret_cast<T*>(shoal_dynamic)
#endif
#ifdef __CUDACC__
#define SHOAL_UNROLL _Pragma("unroll")  // the loop after it: arrays it indexes stay in registers
#else
#define SHOAL_UNROLL
#endif
#define SHOAL_DEVICE __device__ __forceinline__
/// `kernel` in parentheses when it has commas.
#define SHOAL_LAUNCH(kernel, shape, ...) ::shoal::cuda::launch(#kernel, kernel, shape, __VA_ARGS__)

namespace shoal::cuda {

/// Limits of all launches of this thread. Results depend on them only by the order of sums. Tests lower them:
/// a race detector follows few threads, and small tensors are to go through every loop.
struct LaunchLimits {
  int block_threads = 1024;  // a multiple of 32
  int64_t blocks = INT32_MAX;
};
LaunchLimits& launch_limits();

struct LaunchShape {
  unsigned grid_x = 0, grid_y = 1;  // blocks; none: nothing is launched
  unsigned block = 32;              // threads
  size_t shared_bytes = 0;          // dynamic
  cudaStream_t stream = nullptr;
};

/// `blocks` blocks in x and `blocks_y` in y (both as far as the limits allow: kernels loop over the rest), of
/// `threads` threads, on the current stream of `device`.
LaunchShape launch_shape(Device device, int64_t blocks, int threads, int64_t blocks_y = 1,
                         size_t shared_bytes = 0);
/// Threads for a block that shares `work` items of a row: enough whole warps, at most `most`.
int threads_for(int64_t work, int most);

#ifdef __CUDACC__
/// Puts the kernel into the stream of `shape`.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, const Args&... args) {
  if (shape.grid_x == 0 || shape.grid_y == 0) return;
  constexpr size_t kWithoutAsking = size_t{48} << 10;
  if (shape.shared_bytes > kWithoutAsking) {
    check_launch(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shape.shared_bytes)));
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.grid_x, shape.grid_y);
  config.blockDim = dim3(shape.block);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  check_launch(name, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
  note_kernel(name);
}
#else
/// Runs the kernel in the emulator.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, const Args&... args) {
  if (shape.grid_x == 0 || shape.grid_y == 0) return;
  check_launch(name, emulator::launch(name, kernel, {shape.grid_x, shape.grid_y, 1}, {shape.block, 1, 1},
                                      shape.shared_bytes, shape.stream, args...));
  note_kernel(name);
}
#endif

/// Null for an undefined tensor.
template <class T>
T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

}  // namespace shoal::cuda
