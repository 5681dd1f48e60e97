// CPU kernels of core/ops/routing.h that count.
#include "core/backend/cpu/isa.h"
#include "core/ops/routing.h"

SHOAL_KERNELS_BEGIN

void count_experts_impl(const Tensor& ids_TK, const Tensor& counts_E) {
  const int32_t* ids = ids_TK.data<int32_t>();
  int64_t* counts = counts_E.data<int64_t>();
  std::fill(counts, counts + counts_E.numel(), 0);
  for (int64_t n = 0; n < ids_TK.numel(); n++) {
    if (ids[n] >= 0) counts[ids[n]]++;
  }
}

void count_frequency_impl(const Tensor& counts_E, double assignments, const Tensor& frequency_E) {
  dispatch_float(frequency_E.dtype(), "count_frequency", [&]<class T>() {
    const int64_t* counts = counts_E.data<int64_t>();
    T* frequency = frequency_E.data<T>();
    for (int64_t e = 0; e < counts_E.numel(); e++)
      frequency[e] = static_cast<T>(static_cast<double>(counts[e]) / assignments);
  });
}

void balance_bias_impl(const Tensor& bias_E, const Tensor& counts_E, double rate) {
  const int64_t num_experts = counts_E.numel(), *counts = counts_E.data<int64_t>();
  float* bias = bias_E.data<float>();
  int64_t total = 0;
  for (int64_t e = 0; e < num_experts; e++) total += counts[e];
  for (int64_t e = 0; e < num_experts; e++) {
    // sign(mean - count) without rounding.
    const int64_t difference = total - num_experts * counts[e];
    bias[e] += static_cast<float>(rate) * static_cast<float>((difference > 0) - (difference < 0));
  }
}

const bool added[] = {
    count_experts_fwd.add(DeviceType::cpu, &count_experts_impl, kIsaLevel),
    count_frequency.add(DeviceType::cpu, &count_frequency_impl, kIsaLevel),
    balance_bias.add(DeviceType::cpu, &balance_bias_impl, kIsaLevel),
};

SHOAL_KERNELS_END
