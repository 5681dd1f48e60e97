// CUDA kernels of the bias of linear layers (core/ops/linear.h). The products are in cublas_linear.cpp.
#include "core/ops/linear.h"

#include "core/backend/cuda/groups.h"
#include "core/backend/cuda/map.h"

namespace shoal::cuda {
namespace {

void check_bias(const char* where, const Tensor& y, const Tensor& bias, std::span<const int64_t> rows) {
  SHOAL_CHECK(stats_dtype(y.dtype()) == bias.dtype() &&
                  bias.numel() == static_cast<int64_t>(rows.size()) * y.row_size(),
              where, ": expected a bias ", stats_dtype(y.dtype()), " of ", rows.size(), " x ", y.row_size(),
              " for ", y.dtype(), ' ', y.shape(), ", got ", bias.dtype(), ' ', bias.shape());
}

template <class T>
struct AddBias {
  static constexpr int kPack = cuda::kPack<Compute<T>>;
  T* y;
  const Compute<T>* bias;  // of the first of the groups
  int64_t width;
  RowGroups groups;
  /// row: counted from the first row of the groups.
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const int64_t at_row = groups.first[0] + row;
    int low = 0, high = groups.count;  // the group is in [low, high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (at_row < groups.first[middle] ? high : low) = middle;
    }
    T* to = y + at_row * width + column;
    auto values = load<N>(to);
    const auto add = load<N>(bias + low * width + column);
    for (int i = 0; i < N; i++) values.v[i] += add.v[i];
    store<N>(to, values);
  }
};

void add_bias_impl(const Tensor& y, const Tensor& bias, std::span<const int64_t> rows) {
  const char* where = "add_bias";
  check_bias(where, y, bias, rows);
  dispatch_storage(y.dtype(), where, [&]<class T>() {
    const int64_t width = y.row_size();
    T* to = y.data<T>();
    const auto* from = bias.data<Compute<T>>();
    for_each_row_groups(where, rows, y.num_rows(), [&](const RowGroups& groups, int64_t first_group) {
      map_rows(y.device(), groups.first[groups.count] - groups.first[0], width, all_aligned({to, from}),
               AddBias<T>{to, from + first_group * width, width, groups});
    });
  });
}

// 32 columns of a group per block and time; its warps take turns with the rows. Two areas of scratch are used
// in turn, so that one barrier is enough.
template <class T>
__global__ void bias_bwd_kernel(const T* dy, Compute<T>* dbias, int64_t width, RowGroups groups) {
  using C = Compute<T>;
  SHOAL_SHARED(C, scratch, 2 * kMaxWarps * kWarp);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  unsigned turn = 0;
  for (int g = static_cast<int>(blockIdx.y); g < groups.count; g += static_cast<int>(gridDim.y)) {
    for (int64_t start = int64_t{blockIdx.x} * kWarp; start < width; start += int64_t{gridDim.x} * kWarp) {
      const int64_t column = start + lane;
      C sum = 0;
      if (column < width) {
        for (int64_t r = groups.first[g] + warp; r < groups.first[g + 1]; r += num_warps)
          sum += static_cast<C>(dy[r * width + column]);
      }
      C* area = scratch + turn * kMaxWarps * kWarp;
      turn ^= 1U;
      area[warp * kWarp + lane] = sum;
      __syncthreads();
      if (warp == 0 && column < width) {
        C total = 0;
        for (unsigned w = 0; w < num_warps; w++) total += area[w * kWarp + lane];
        dbias[g * width + column] += total;
      }
    }
  }
}

void bias_bwd_impl(const Tensor& dy, const Tensor& dbias, std::span<const int64_t> rows) {
  constexpr int kMostThreads = 1024;
  const char* where = "bias_bwd";
  check_bias(where, dy, dbias, rows);
  dispatch_storage(dy.dtype(), where, [&]<class T>() {
    const int64_t width = dy.row_size();
    for_each_row_groups(where, rows, dy.num_rows(), [&](const RowGroups& groups, int64_t first_group) {
      const int64_t num_rows = groups.first[groups.count] - groups.first[0];
      if (num_rows == 0) return;
      const int threads = threads_for(num_rows / groups.count * int64_t{kWarp}, kMostThreads);
      SHOAL_LAUNCH(bias_bwd_kernel<T>,
                   launch_shape(dy.device(), (width + kWarp - 1) / kWarp, threads, groups.count),
                   dy.data<T>(), dbias.data<Compute<T>>() + first_group * width, width, groups);
    });
  });
}

[[maybe_unused]] const bool added[] = {
    add_bias.add(DeviceType::cuda, &add_bias_impl),
    bias_bwd.add(DeviceType::cuda, &bias_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
