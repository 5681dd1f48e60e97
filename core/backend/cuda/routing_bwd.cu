// CUDA kernel of route_bwd in core/ops/routing.h: a warp per token, as in routing.cu.
#include <cmath>

#include "core/backend/cuda/block.h"
#include "core/ops/routing.h"

namespace shoal::cuda {
namespace {

#include "core/backend/functors/routing.inc"

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 2112;  // 16 for each of the 132 processors of an H200

template <class T>
struct Backward {
  const T *logits, *scores, *dweights, *lse, *frequency;  // all but the first two may be null
  const int32_t* ids;
  const T *daux, *dz;           // scalars; null: 0
  double aux_factor, z_factor;  // of f_i p_i and of lse^2
  T* dlogits;
  int64_t num_tokens, num_experts, group_tokens;
  int top_k;
  RouterScore score;
  bool normalize;
  T weight_scale;
};

/// A token's row and the gradients of its losses.
template <class T>
struct Row {
  const T *x, *s, *f;
  T* ds;
  T aux, z;
  int64_t n;
  unsigned lane;

  template <class F>
  SHOAL_DEVICE void each(const F& f_of_i) const {
    for (int64_t i = lane; i < n; i += kWarp) f_of_i(i);
  }
};

/// Adds d(weights)/d(scores): w_k = c s_k / (sum s + floor), or c s_k. Each lane to its own experts.
template <class T>
SHOAL_DEVICE void add_weights(const Backward<T>& a, int64_t t, const Row<T>& row) {
  const int32_t* id = a.ids + t * a.top_k;
  const T* dw = a.dweights + t * a.top_k;
  T total = 0, dot = 0;
  for (int k = 0; k < a.top_k; k++) {
    total += row.s[id[k]];
    dot += dw[k] * row.s[id[k]];
  }
  T factor = a.weight_scale, shared = 0;
  if (a.normalize) {
    factor /= total + kFloor<T>;
    shared = dot / (total + kFloor<T>);
  }
  for (int k = 0; k < a.top_k; k++) {
    if (static_cast<unsigned>(id[k]) % kWarp == row.lane) row.ds[id[k]] += factor * (dw[k] - shared);
  }
}

template <class T>
SHOAL_DEVICE T dot_of(const Row<T>& row) {
  T dot = 0;
  row.each([&](int64_t i) { dot += row.s[i] * row.ds[i]; });
  return warp_sum(dot);
}

template <class T>
SHOAL_DEVICE void softmax_bwd(const Backward<T>& a, int64_t t, const Row<T>& row) {
  if (a.dweights != nullptr) add_weights(a, t, row);
  const T dot = dot_of(row), z = row.z == 0 ? T(0) : row.z * a.lse[t];
  row.each([&](int64_t i) { row.ds[i] = row.s[i] * (row.ds[i] - dot + z); });
}

template <class T>
SHOAL_DEVICE void independent_bwd(const Backward<T>& a, int64_t t, const Row<T>& row) {
  if (row.aux != 0) {  // through p = s / (sum s + floor)
    T sum = 0;
    row.each([&](int64_t i) { sum += row.s[i]; });
    const T inverse = T(1) / (warp_sum(sum) + kFloor<T>), dot = dot_of(row) * inverse;
    row.each([&](int64_t i) { row.ds[i] = (row.ds[i] - dot) * inverse; });
  }
  if (a.dweights != nullptr) add_weights(a, t, row);
  if (a.score == RouterScore::sigmoid) {
    row.each([&](int64_t i) { row.ds[i] *= row.s[i] * (T(1) - row.s[i]); });
  } else {
    row.each([&](int64_t i) {
      const T slope = T(1) / ((T(1) + fast_exp(-row.x[i])) * T(2) * row.s[i]);
      row.ds[i] = row.s[i] > 0 ? row.ds[i] * slope : T(0);
    });
  }
  if (row.z == 0) return;
  const T lse = a.lse[t], z = row.z * lse;
  row.each([&](int64_t i) { row.ds[i] += z * fast_exp(row.x[i] - lse); });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) route_bwd_kernel(Backward<T> a) {
  const int64_t num_warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
  const double daux = a.daux == nullptr ? 0 : static_cast<double>(a.daux[0]);
  const double dz = a.dz == nullptr ? 0 : static_cast<double>(a.dz[0]);
  for (int64_t t = int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp; t < a.num_tokens;
       t += num_warps) {
    const int64_t at = t * a.num_experts;
    const T* f = a.frequency == nullptr ? nullptr : a.frequency + t / a.group_tokens * a.num_experts;
    const Row<T> row{a.logits + at,
                     a.scores + at,
                     f,
                     a.dlogits + at,
                     static_cast<T>(daux * a.aux_factor),
                     static_cast<T>(dz * 2 * a.z_factor),
                     a.num_experts,
                     threadIdx.x % kWarp};
    const bool padding = a.ids[t * a.top_k] < 0, balanced = !padding && row.aux != 0;
    row.each([&](int64_t i) { row.ds[i] = balanced ? row.aux * row.f[i] : T(0); });
    if (padding) continue;
    if (a.score == RouterScore::softmax) {
      softmax_bwd(a, t, row);
    } else {
      independent_bwd(a, t, row);
    }
  }
}

template <class T>
void route_bwd_typed(const RouteBackward& args, const RouteSpec& spec, const BalanceSpec& balance) {
  const Device device = args.logits_TE.device();
  const int64_t num_tokens = args.logits_TE.num_rows(), num_experts = args.logits_TE.row_size();
  const int64_t num_groups = args.frequency_GE.defined() ? args.frequency_GE.num_rows() : 0;
  const Backward<T> a{args.logits_TE.data<T>(),
                      args.scores_TE.data<T>(),
                      data_or_null<T>(args.dweights_TK),
                      data_or_null<T>(args.lse_T),
                      data_or_null<T>(args.frequency_GE),
                      args.ids_TK.data<int32_t>(),
                      data_or_null<T>(args.daux),
                      data_or_null<T>(args.dz),
                      balance.per_token(balance.aux_coeff * static_cast<double>(num_experts)),
                      balance.per_token(balance.z_coeff),
                      args.dlogits_TE.data<T>(),
                      num_tokens,
                      num_experts,
                      std::max<int64_t>(1, num_groups == 0 ? 1 : num_tokens / num_groups),
                      static_cast<int>(spec.top_k),
                      spec.score,
                      spec.normalize,
                      static_cast<T>(spec.weight_scale)};
  const int threads = std::min(kThreads, launch_limits().block_threads);
  const int64_t per_block = threads / static_cast<int>(kWarp);
  SHOAL_LAUNCH((route_bwd_kernel<T>),
               launch_shape(device, std::min((num_tokens + per_block - 1) / per_block, kMaxBlocks), threads),
               a);
}

void route_bwd_impl(const RouteBackward& args, const RouteSpec& spec, const BalanceSpec& balance) {
  dispatch_float(args.logits_TE.dtype(), "route",
                 [&]<class T>() { route_bwd_typed<T>(args, spec, balance); });
}

[[maybe_unused]] const bool added = route_bwd.add(DeviceType::cuda, &route_bwd_impl);

}  // namespace
}  // namespace shoal::cuda
