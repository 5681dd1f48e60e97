#include "core/backend/cuda/sort.h"

namespace shoal::cuda {
namespace {

/// values[i] becomes the sum of values[0..i); returns the sum of all. By the lanes of a warp.
SHOAL_DEVICE int warp_exclusive_scan(int* values, int64_t count) {
  const unsigned lane = threadIdx.x % kWarp;
  int before = 0;
  for (int64_t base = 0; base < count; base += kWarp) {
    const int64_t i = base + lane;
    const int value = i < count ? values[i] : 0;
    int sum = value;
    for (unsigned offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (i < count) values[i] = before + sum - value;
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return before;
}

/// A warp per digit: the items of a digit are counted into digit_starts.
__global__ void scan_tiles_kernel(int* tile_counts, int* digit_starts, int num_digits, int64_t num_tiles) {
  const int num_warps = static_cast<int>(gridDim.x * (blockDim.x / kWarp));
  for (int d = static_cast<int>(blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp); d < num_digits;
       d += num_warps) {
    const int total = warp_exclusive_scan(tile_counts + d * num_tiles, num_tiles);
    if (threadIdx.x % kWarp == 0) digit_starts[d] = total;
  }
}

/// One warp.
__global__ void scan_digits_kernel(int* digit_starts, int num_digits) {
  warp_exclusive_scan(digit_starts, num_digits);
}

}  // namespace

void scan_digits(Device device, int* tile_counts, int* digit_starts, int num_digits, int64_t num_tiles) {
  const int threads = std::min(kSortThreads, launch_limits().block_threads),
            warps = threads / static_cast<int>(kWarp);
  SHOAL_LAUNCH((scan_tiles_kernel), launch_shape(device, (num_digits + warps - 1) / warps, threads),
               tile_counts, digit_starts, num_digits, num_tiles);
  SHOAL_LAUNCH((scan_digits_kernel), launch_shape(device, 1, static_cast<int>(kWarp)), digit_starts,
               num_digits);
}

}  // namespace shoal::cuda
