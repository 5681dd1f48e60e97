// CPU kernel of core/ops/attention_part.h that is not one of attention itself.
#include "core/ops/attention_part.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

template <class T>
void merge(const AttentionMerge& m) {
  using C = cpu::Compute<T>;
  const T* y = m.y.data<T>();
  const C* lse = m.lse.data<C>();
  C *sum = m.sum.data<C>(), *sum_lse = m.sum_lse.data<C>();
  const int64_t heads = m.lse.numel();
  const int64_t c = heads == 0 ? 0 : m.y.numel() / heads;
  cpu::parallel_rows(heads, c, [=](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; h++) {
      const C most = std::max(sum_lse[h], lse[h]);
      if (most == -std::numeric_limits<C>::infinity()) continue;  // neither has seen a key
      const C both = most + std::log(std::exp(sum_lse[h] - most) + std::exp(lse[h] - most));
      const C before = std::exp(sum_lse[h] - both), added = std::exp(lse[h] - both);
      for (int64_t i = h * c; i < (h + 1) * c; i++) sum[i] = before * sum[i] + added * static_cast<C>(y[i]);
      sum_lse[h] = both;
    }
  });
}

void merge_attention_impl(const AttentionMerge& m) {
  if (m.y.dtype() == DType::bf16) return merge<BFloat16>(m);
  dispatch_float(m.y.dtype(), "merge_attention", [&]<class T>() { merge<T>(m); });
}

const bool added = merge_attention.add(DeviceType::cpu, &merge_attention_impl, kIsaLevel);

SHOAL_KERNELS_END
