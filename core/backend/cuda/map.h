// Kernels without neighbours: every element, or every element of every row, by itself. What happens to an
// element is a Body, a struct of pointers and numbers with
//   template <int N> SHOAL_DEVICE void at(int64_t i) const                    // elements [i, i + N)
//   template <int N> SHOAL_DEVICE void at(int64_t row, int64_t column) const  // the same of a row
// and kPack, the largest N it wants; it is called with that N and, where that does not fit, with 1.
#pragma once

#include "core/backend/cuda/block.h"

namespace shoal::cuda {

/// N elements per thread and time; the last count % N one by one.
template <int N, class Body>
__global__ void map_kernel(int64_t count, Body body) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t packs = count / N;
  for (int64_t i = first; i < packs; i += stride) body.template at<N>(i * N);
  if constexpr (N > 1) {
    for (int64_t i = packs * N + first; i < count; i += stride) body.template at<1>(i);
  }
}

/// N columns per thread and time: N divides width. Rows along y of the grid.
template <int N, class Body>
__global__ void map_rows_kernel(int64_t num_rows, int64_t width, Body body) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x * N;
  for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    for (int64_t column = first; column < width; column += stride) body.template at<N>(row, column);
  }
}

inline constexpr int kMapThreads = 256;

/// body.at for each of `count` elements. aligned: the body's pointers, as all_aligned says.
template <class Body>
void map(Device device, int64_t count, bool aligned, const Body& body) {
  const auto run = [&]<int N>() {
    const int threads = threads_for((count + N - 1) / N, kMapThreads);
    const int64_t per_block = int64_t{threads} * N;
    SHOAL_LAUNCH((map_kernel<N, Body>), launch_shape(device, (count + per_block - 1) / per_block, threads),
                 count, body);
  };
  if (aligned) {
    run.template operator()<Body::kPack>();
  } else {
    run.template operator()<1>();
  }
}

/// body.at for each of `width` columns of each row. aligned: every row of each of the body's pointers.
template <class Body>
void map_rows(Device device, int64_t num_rows, int64_t width, bool aligned, const Body& body) {
  const auto run = [&]<int N>() {
    const int threads = threads_for((width + N - 1) / N, kMapThreads);
    const int64_t per_block = int64_t{threads} * N;
    SHOAL_LAUNCH((map_rows_kernel<N, Body>),
                 launch_shape(device, (width + per_block - 1) / per_block, threads, num_rows), num_rows,
                 width, body);
  };
  if (aligned && width % Body::kPack == 0) {
    run.template operator()<Body::kPack>();
  } else {
    run.template operator()<1>();
  }
}

}  // namespace shoal::cuda
