// A stable sort by small integer keys, for kernels that group rows: radix sort, at most 10 bits per pass.
// Equal keys stay in the order of the items, so that there is one result, whatever the blocks.
#pragma once

#include <bit>

#include "core/backend/cuda/block.h"

namespace shoal::cuda {

inline constexpr int kSortThreads = 256, kSortItems = 4;  // items per thread and tile
inline constexpr int kSortBits = 10;                      // of a pass: 8 warps count 1024 digits in 32 KB

/// One pass: items are sorted by the digit (key(item) >> shift) & (2^bits - 1).
template <class Key>
struct SortPass {
  Key key;                  // struct with SHOAL_DEVICE uint64_t operator()(int32_t item) const
  const int32_t* order_in;  // the items as they are; null: 0, 1, ...
  int32_t* order_out;
  int* tile_counts;   // [digits, num_tiles]: a digit's items of each tile, then of earlier tiles
  int* digit_starts;  // [digits]: a digit's items, then those of smaller digits
  int64_t count, num_tiles;
  int tile_items, shift, num_digits;

  SHOAL_DEVICE int32_t item(int64_t i) const {
    return order_in == nullptr ? static_cast<int32_t>(i) : order_in[i];
  }
  SHOAL_DEVICE int digit(int32_t item) const {
    return static_cast<int>(key(item) >> shift & static_cast<unsigned>(num_digits - 1));
  }
};

template <class Key>
__global__ void sort_count_kernel(SortPass<Key> a) {
  SHOAL_DYNAMIC_SHARED(int, counts);
  for (int64_t tile = blockIdx.x; tile < a.num_tiles; tile += gridDim.x) {
    for (int d = static_cast<int>(threadIdx.x); d < a.num_digits; d += blockDim.x) counts[d] = 0;
    __syncthreads();
    const int64_t begin = tile * a.tile_items, end = begin + a.tile_items;
    for (int64_t i = begin + threadIdx.x; i < end && i < a.count; i += blockDim.x) {
      atomicAdd(&counts[a.digit(a.item(i))], 1);
    }
    __syncthreads();
    // A thread zeroes the same counts for the next tile.
    for (int d = static_cast<int>(threadIdx.x); d < a.num_digits; d += blockDim.x) {
      a.tile_counts[d * a.num_tiles + tile] = counts[d];
    }
  }
}

/// tile_counts [digits, num_tiles]: from a digit's items of each tile to those of earlier tiles; digit_starts
/// [digits], written: the items of smaller digits.
void scan_digits(Device device, int* tile_counts, int* digit_starts, int num_digits, int64_t num_tiles);

/// A tile per block and time, a piece of it per warp.
template <class Key>
__global__ void sort_scatter_kernel(SortPass<Key> a) {
  SHOAL_DYNAMIC_SHARED(int,
                       counts);  // of each warp: [warps, digits]; then where its next item of a digit goes
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  int* mine = counts + warp * static_cast<unsigned>(a.num_digits);
  const int warp_items = a.tile_items / static_cast<int>(num_warps);
  for (int64_t tile = blockIdx.x; tile < a.num_tiles; tile += gridDim.x) {
    const int64_t begin = tile * a.tile_items + warp * static_cast<unsigned>(warp_items);
    for (int d = static_cast<int>(lane); d < a.num_digits; d += kWarp) mine[d] = 0;
    __syncwarp();
    for (int64_t i = begin + lane; i < begin + warp_items && i < a.count; i += kWarp) {
      atomicAdd(&mine[a.digit(a.item(i))], 1);
    }
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < a.num_digits; d += blockDim.x) {
      int next = a.digit_starts[d] + a.tile_counts[d * a.num_tiles + tile];
      for (unsigned w = 0; w < num_warps; w++) {
        int& count = counts[w * static_cast<unsigned>(a.num_digits) + static_cast<unsigned>(d)];
        next += count;
        count = next - count;
      }
    }
    __syncthreads();
    for (int base = 0; base < warp_items; base += kWarp) {
      const int64_t i = begin + base + lane;
      const bool active = i < a.count;
      const int32_t item = active ? a.item(i) : 0;
      const int digit = active ? a.digit(item) : -1;
      const unsigned same = __match_any_sync(kAllLanes, digit);
      const int before = __popc(same & ((1U << lane) - 1));
      if (active) a.order_out[mine[digit] + before] = item;
      __syncwarp();
      if (active && before == 0) mine[digit] += __popc(same);
      __syncwarp();
    }
  }
}

/// A pass whose key, orders, count, shift and num_digits are set.
template <class Key>
void sort_by_digit(Device device, SortPass<Key> pass) {
  const int threads = std::min(kSortThreads, launch_limits().block_threads);
  pass.tile_items = threads * kSortItems;
  pass.num_tiles = (pass.count + pass.tile_items - 1) / pass.tile_items;
  const Tensor tile_counts =
      Tensor::empty(Shape{int64_t{pass.num_digits}, pass.num_tiles}, DType::i32, device);
  const Tensor digit_starts = Tensor::empty(Shape{int64_t{pass.num_digits}}, DType::i32, device);
  pass.tile_counts = tile_counts.data<int32_t>();
  pass.digit_starts = digit_starts.data<int32_t>();
  const size_t bytes = static_cast<size_t>(pass.num_digits) * sizeof(int);
  const int64_t warps = threads / static_cast<int>(kWarp);
  SHOAL_LAUNCH((sort_count_kernel<Key>), launch_shape(device, pass.num_tiles, threads, 1, bytes), pass);
  scan_digits(device, pass.tile_counts, pass.digit_starts, pass.num_digits, pass.num_tiles);
  SHOAL_LAUNCH((sort_scatter_kernel<Key>),
               launch_shape(device, pass.num_tiles, threads, 1, bytes * static_cast<size_t>(warps)), pass);
}

/// The items of `order` (undefined: 0 .. count - 1) sorted by key, whose values are below 2^num_bits; i32.
template <class Key>
Tensor sorted_order(Device device, int64_t count, const Key& key, int num_bits, Tensor order = {}) {
  SHOAL_CHECK(count < INT32_MAX, "sort: expected less than 2^31 items on a cuda device, got ", count);
  const int num_passes = std::max(1, (num_bits + kSortBits - 1) / kSortBits);
  const int bits = std::max(1, (num_bits + num_passes - 1) / num_passes);
  for (int p = 0; p < num_passes; p++) {
    const Tensor out = Tensor::empty(Shape{count}, DType::i32, device);
    SortPass<Key> pass{};
    pass.key = key;
    pass.order_in = data_or_null<int32_t>(order);
    pass.order_out = out.data<int32_t>();
    pass.count = count;
    pass.shift = p * bits;
    pass.num_digits = 1 << bits;
    sort_by_digit(device, pass);
    order = out;
  }
  return order;
}

/// Bits of the keys 0 .. num_keys - 1.
inline int key_bits(int64_t num_keys) {
  return std::bit_width(static_cast<uint64_t>(std::max<int64_t>(1, num_keys) - 1));
}

}  // namespace shoal::cuda
