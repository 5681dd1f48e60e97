// CPU kernel of route_bwd in core/ops/routing.h.
#include <cmath>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/ops/routing.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/routing_common.inc"

using cpu::parallel_rows;

template <class T>
struct RouteBackwardRows {
  const T *logits, *scores, *dweights, *lse;
  const int32_t* ids;
  FrequencyRows<T> frequency;
  T aux_factor, z_factor;  // of f_i p_i and of lse^2
  T* dlogits;
  int64_t num_experts;
  const RouteSpec* spec;

  // Adds d(weights)/d(scores): w_k = c s_k / (sum s + floor), or c s_k.
  void add_weights(int64_t t, const T* s, T* ds) const {
    const int64_t k_count = spec->top_k;
    const int32_t* id = ids + t * k_count;
    const T* dw = dweights + t * k_count;
    T total = 0, dot = 0;
    for (int64_t k = 0; k < k_count; k++) {
      total += s[id[k]];
      dot += dw[k] * s[id[k]];
    }
    T factor = static_cast<T>(spec->weight_scale), shared = 0;
    if (spec->normalize) {
      factor /= total + kFloor<T>;
      shared = dot / (total + kFloor<T>);
    }
    for (int64_t k = 0; k < k_count; k++) ds[id[k]] += factor * (dw[k] - shared);
  }

  // ds = d(aux)/d(p), written.
  void start(int64_t t, T* ds) const {
    if (aux_factor == 0) {
      std::fill_n(ds, num_experts, T(0));
      return;
    }
    const T* f = frequency.row(t);
#pragma omp simd
    for (int64_t i = 0; i < num_experts; i++) ds[i] = aux_factor * f[i];
  }

  void softmax(int64_t t, const T* s, T* ds) const {
    start(t, ds);
    if (dweights != nullptr) add_weights(t, s, ds);
    T dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < num_experts; i++) dot += s[i] * ds[i];
    const T z = z_factor == 0 ? T(0) : z_factor * lse[t];
#pragma omp simd
    for (int64_t i = 0; i < num_experts; i++) ds[i] = s[i] * (ds[i] - dot + z);
  }

  void independent(int64_t t, const T* s, T* ds) const {
    start(t, ds);
    if (aux_factor != 0) {  // through p = s / (sum s + floor)
      const T inverse = T(1) / (sum_of(s, num_experts) + kFloor<T>);
      T dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < num_experts; i++) dot += s[i] * ds[i];
      dot *= inverse;
#pragma omp simd
      for (int64_t i = 0; i < num_experts; i++) ds[i] = (ds[i] - dot) * inverse;
    }
    if (dweights != nullptr) add_weights(t, s, ds);
    const T* x = logits + t * num_experts;
    if (spec->score == RouterScore::sigmoid) {
#pragma omp simd
      for (int64_t i = 0; i < num_experts; i++) ds[i] *= s[i] * (T(1) - s[i]);
    } else {
#pragma omp simd
      for (int64_t i = 0; i < num_experts; i++) {
        const T slope = T(1) / ((T(1) + fast_exp(-x[i])) * T(2) * s[i]);
        ds[i] = s[i] > 0 ? ds[i] * slope : T(0);
      }
    }
    if (z_factor == 0) return;
    const T z = z_factor * lse[t];
#pragma omp simd
    for (int64_t i = 0; i < num_experts; i++) ds[i] += z * fast_exp(x[i] - lse[t]);
  }

  void backward(int64_t t) const {
    T* ds = dlogits + t * num_experts;
    const T* s = scores + t * num_experts;
    if (ids[t * spec->top_k] < 0) {  // padding
      std::fill_n(ds, num_experts, T(0));
      return;
    }
    if (spec->score == RouterScore::softmax) {
      softmax(t, s, ds);
    } else {
      independent(t, s, ds);
    }
  }
};

void route_bwd_impl(const RouteBackward& a, const RouteSpec& spec, const BalanceSpec& balance) {
  dispatch_float(a.logits_TE.dtype(), "route", [&]<class T>() {
    const int64_t num_tokens = a.logits_TE.num_rows(), num_experts = a.logits_TE.row_size();
    const double daux = a.daux.defined() ? a.daux.data<T>()[0] : 0,
                 dz = a.dz.defined() ? a.dz.data<T>()[0] : 0;
    const double aux = daux * balance.per_token(balance.aux_coeff * static_cast<double>(num_experts));
    const double z = dz * 2 * balance.per_token(balance.z_coeff);
    const RouteBackwardRows<T> rows{a.logits_TE.data<T>(),
                                    a.scores_TE.data<T>(),
                                    a.dweights_TK.defined() ? a.dweights_TK.data<T>() : nullptr,
                                    a.lse_T.defined() ? a.lse_T.data<T>() : nullptr,
                                    a.ids_TK.data<int32_t>(),
                                    FrequencyRows<T>(a.frequency_GE, num_tokens, num_experts),
                                    static_cast<T>(aux),
                                    static_cast<T>(z),
                                    a.dlogits_TE.data<T>(),
                                    num_experts,
                                    &spec};
    parallel_rows(num_tokens, 2 * num_experts, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) rows.backward(t);
    });
  });
}

const bool added = route_bwd.add(DeviceType::cpu, &route_bwd_impl, kIsaLevel);

SHOAL_KERNELS_END
