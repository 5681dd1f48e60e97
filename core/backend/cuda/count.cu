// CUDA kernels of core/ops/routing.h that count. Counts are integers, added atomically: no order matters.
#include "core/backend/cuda/count.h"

#include "core/backend/cuda/map.h"
#include "core/ops/routing.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 256;
constexpr size_t kMaxSharedCounts = size_t{48} << 10;
using Count = unsigned long long;  // what CUDA adds atomically
using CountSum = BlockSums<long long, 1>;

struct CountArgs {
  const int32_t* ids;
  Count* counts;  // [num_groups, num_experts], zeros
  int64_t num_groups, group_slots, num_experts;
  bool in_shared;  // count in the block first
};

__global__ void count_kernel(CountArgs a) {
  SHOAL_DYNAMIC_SHARED(unsigned, bins);
  for (int64_t g = blockIdx.y; g < a.num_groups; g += gridDim.y) {
    Count* counts = a.counts + g * a.num_experts;
    if (a.in_shared) {
      for (int64_t e = threadIdx.x; e < a.num_experts; e += blockDim.x) bins[e] = 0;
      __syncthreads();
    }
    const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    for (int64_t n = first; n < a.group_slots; n += int64_t{gridDim.x} * blockDim.x) {
      const int32_t id = a.ids[g * a.group_slots + n];
      if (id < 0 || id >= a.num_experts) continue;
      if (a.in_shared) {
        atomicAdd(&bins[id], 1U);
      } else {
        atomicAdd(&counts[id], Count{1});
      }
    }
    if (!a.in_shared) continue;
    __syncthreads();
    // A thread zeroes the same bins for the next group.
    for (int64_t e = threadIdx.x; e < a.num_experts; e += blockDim.x) {
      if (bins[e] != 0) atomicAdd(&counts[e], Count{bins[e]});
    }
  }
}

void count_groups(const Tensor& ids_TK, const Tensor& counts_GE) {
  counts_GE.set_zero();
  const int64_t num_experts = counts_GE.row_size(),
                num_groups = counts_GE.numel() / std::max<int64_t>(1, num_experts);
  const int64_t group_slots = num_groups == 0 ? 0 : ids_TK.numel() / num_groups;
  constexpr int64_t kSlotsPerBlock = 8 * kThreads;
  const size_t bytes = static_cast<size_t>(num_experts) * sizeof(unsigned);
  const bool in_shared = bytes <= kMaxSharedCounts;
  SHOAL_LAUNCH((count_kernel),
               launch_shape(ids_TK.device(), (group_slots + kSlotsPerBlock - 1) / kSlotsPerBlock, kThreads,
                            num_groups, in_shared ? bytes : 0),
               CountArgs{ids_TK.data<int32_t>(), reinterpret_cast<Count*>(counts_GE.data<int64_t>()),
                         num_groups, group_slots, num_experts, in_shared});
}

/// A group per block and time.
template <class T>
__global__ void group_frequency_kernel(const int64_t* counts, int64_t num_groups, int64_t num_experts,
                                       T* frequency) {
  SHOAL_SHARED(long long, scratch, CountSum::kScratch);
  CountSum block_sum(scratch);
  for (int64_t g = blockIdx.x; g < num_groups; g += gridDim.x) {
    const int64_t* row = counts + g * num_experts;
    long long total[1] = {0};
    for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) total[0] += row[e];
    block_sum(total);
    for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
      frequency[g * num_experts + e] =
          total[0] == 0 ? T(0) : static_cast<T>(row[e]) / static_cast<T>(total[0]);
    }
  }
}

struct AddGroups {
  static constexpr int kPack = 1;
  const int64_t* counts;
  int64_t num_groups, num_experts;
  int64_t* sum;
  template <int N>
  SHOAL_DEVICE void at(int64_t e) const {
    int64_t total = 0;
    for (int64_t g = 0; g < num_groups; g++) total += counts[g * num_experts + e];
    sum[e] = total;
  }
};

template <class T>
struct Frequency {
  static constexpr int kPack = 1;
  const int64_t* counts;
  double assignments;
  T* frequency;
  template <int N>
  SHOAL_DEVICE void at(int64_t e) const {
    frequency[e] = static_cast<T>(static_cast<double>(counts[e]) / assignments);
  }
};

void count_frequency_impl(const Tensor& counts_E, double assignments, const Tensor& frequency_E) {
  dispatch_float(frequency_E.dtype(), "count_frequency", [&]<class T>() {
    map(counts_E.device(), counts_E.numel(), false,
        Frequency<T>{counts_E.data<int64_t>(), assignments, frequency_E.data<T>()});
  });
}

/// One block. bias += rate * sign(mean - count), without rounding the mean.
__global__ void balance_bias_kernel(float* bias, const int64_t* counts, int64_t num_experts, float rate) {
  SHOAL_SHARED(long long, scratch, CountSum::kScratch);
  CountSum block_sum(scratch);
  long long total[1] = {0};
  for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) total[0] += counts[e];
  block_sum(total);
  for (int64_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    const long long difference = total[0] - num_experts * counts[e];
    bias[e] += rate * static_cast<float>((difference > 0) - (difference < 0));
  }
}

void balance_bias_impl(const Tensor& bias_E, const Tensor& counts_E, double rate) {
  SHOAL_LAUNCH((balance_bias_kernel), launch_shape(bias_E.device(), 1, kThreads), bias_E.data<float>(),
               counts_E.data<int64_t>(), counts_E.numel(), static_cast<float>(rate));
}

void count_experts_impl(const Tensor& ids_TK, const Tensor& counts_E) {
  count_groups(ids_TK, counts_E);
}

[[maybe_unused]] const bool added[] = {
    count_experts_fwd.add(DeviceType::cuda, &count_experts_impl),
    count_frequency.add(DeviceType::cuda, &count_frequency_impl),
    balance_bias.add(DeviceType::cuda, &balance_bias_impl),
};

}  // namespace

void count_assignments(const Tensor& ids_TK, const Tensor& counts_E, const Tensor& frequency_GE) {
  if (!frequency_GE.defined()) return count_groups(ids_TK, counts_E);
  const Device device = ids_TK.device();
  const int64_t num_groups = frequency_GE.num_rows(), num_experts = frequency_GE.row_size();
  const Tensor counts_GE = Tensor::empty({num_groups, num_experts}, DType::i64, device);
  count_groups(ids_TK, counts_GE);
  const int64_t* counts = counts_GE.data<int64_t>();
  map(device, num_experts, false, AddGroups{counts, num_groups, num_experts, counts_E.data<int64_t>()});
  dispatch_float(frequency_GE.dtype(), "route", [&]<class T>() {
    SHOAL_LAUNCH((group_frequency_kernel<T>),
                 launch_shape(device, num_groups, threads_for(num_experts, kThreads)), counts, num_groups,
                 num_experts, frequency_GE.data<T>());
  });
}

}  // namespace shoal::cuda
