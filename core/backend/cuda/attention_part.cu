// CUDA kernel of core/ops/attention_part.h that is not one of attention itself.
#include "core/ops/attention_part.h"

#include <cmath>

#include "core/backend/cuda/block.h"

namespace shoal::cuda {
namespace {

constexpr int kWarps = 4;

/// A warp per row and head, of `width` columns.
template <class T>
__global__ void merge_kernel(const T* y, const Compute<T>* lse, int64_t num_heads, int width, Compute<T>* sum,
                             Compute<T>* sum_lse) {
  using C = Compute<T>;
  const int64_t per_block = blockDim.x / kWarp, first = blockIdx.x * per_block + threadIdx.x / kWarp;
  for (int64_t head = first; head < num_heads; head += gridDim.x * per_block) {
    const C before = sum_lse[head], added = lse[head], most = before > added ? before : added;
    if (most == C(-INFINITY)) continue;  // neither has seen a key
    const C both = most + std::log(std::exp(before - most) + std::exp(added - most));
    const C keep = std::exp(before - both), add = std::exp(added - both);
    for (int c = static_cast<int>(threadIdx.x % kWarp); c < width; c += static_cast<int>(kWarp)) {
      const int64_t i = head * width + c;
      sum[i] = keep * sum[i] + add * static_cast<C>(y[i]);
    }
    __syncwarp();  // all have read what is written now
    if (threadIdx.x % kWarp == 0) sum_lse[head] = both;
  }
}

template <class T>
void merge(const AttentionMerge& m) {
  const int64_t heads = m.lse.numel();
  if (heads == 0) return;
  SHOAL_LAUNCH((merge_kernel<T>),
               launch_shape(m.y.device(), (heads + kWarps - 1) / kWarps, kWarps * static_cast<int>(kWarp)),
               m.y.data<T>(), m.lse.data<Compute<T>>(), heads, static_cast<int>(m.y.numel() / heads),
               m.sum.data<Compute<T>>(), m.sum_lse.data<Compute<T>>());
}

void merge_attention_impl(const AttentionMerge& m) {
  if (m.y.dtype() == DType::bf16) return merge<BFloat16>(m);
  dispatch_float(m.y.dtype(), "merge_attention", [&]<class T>() { merge<T>(m); });
}

[[maybe_unused]] const bool added = merge_attention.add(DeviceType::cuda, &merge_attention_impl);

}  // namespace
}  // namespace shoal::cuda
