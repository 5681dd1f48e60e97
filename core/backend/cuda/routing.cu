// CUDA kernels of core/ops/routing.h: a warp per token. Lane l has the experts l, l + 32, ...; sums over
// tokens go through one partial sum per block. Counts are integers, added atomically.
#include "core/ops/routing.h"

#include <cmath>

#include "core/backend/cuda/count.h"
#include "core/backend/cuda/select.h"
#include "core/ops/elementwise.h"

namespace shoal::cuda {
namespace {

#include "core/backend/functors/routing.inc"

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1056;  // 8 for each of the 132 processors of an H200
constexpr size_t kMaxGroupBytes = size_t{48} << 10;

/// The lanes of a warp, which work on one token.
struct Warp {
  SHOAL_DEVICE Warp()
      : lane(threadIdx.x % kWarp),
        in_block(threadIdx.x / kWarp),
        index(int64_t{blockIdx.x} * (blockDim.x / kWarp) + in_block),
        count(int64_t{gridDim.x} * (blockDim.x / kWarp)) {}
  unsigned lane, in_block;
  int64_t index, count;  // of all warps of the grid
};

/// Blocks for a warp per token, and shared memory of `bytes_per_warp` for each warp.
LaunchShape warp_per_token(Device device, int64_t num_tokens, size_t bytes_per_warp = 0) {
  int threads = kThreads;
  while (threads > static_cast<int>(kWarp) && threads / kWarp * bytes_per_warp > kMaxGroupBytes) threads /= 2;
  threads = std::min(threads, launch_limits().block_threads);
  const int64_t per_block = threads / static_cast<int>(kWarp);
  return launch_shape(device, std::min((num_tokens + per_block - 1) / per_block, kMaxBlocks), threads, 1,
                      static_cast<size_t>(per_block) * bytes_per_warp);
}

template <class T>
struct Forward {
  const T *logits, *bias;  // bias may be null
  const uint8_t* valid;    // null: all tokens are
  int32_t* ids;
  T *weights, *scores, *lse;  // lse may be null
  double* partials;           // per block: entropy, sum of lse^2
  int64_t num_tokens, num_experts;
  int num_groups;
  int top_k, top_groups, group_score_top;
  RouterScore score;
  bool normalize;
  T weight_scale;
};

/// p = softmax(logits) when it is wanted; returns logsumexp.
template <class T>
SHOAL_DEVICE T softmax_row(const T* logits, T* p, int64_t n, unsigned lane) {
  T top = -static_cast<T>(INFINITY);
  for (int64_t i = lane; i < n; i += kWarp) top = logits[i] > top ? logits[i] : top;
  top = warp_max(top);
  T total = 0;
  for (int64_t i = lane; i < n; i += kWarp) {
    const T e = fast_exp(logits[i] - top);
    if (p != nullptr) p[i] = e;
    total += e;
  }
  total = warp_sum(total);
  if (p != nullptr) {
    const T inverse = T(1) / total;
    for (int64_t i = lane; i < n; i += kWarp) p[i] *= inverse;
  }
  return top + std::log(total);
}

/// The scores of a token, and logsumexp of its logits when lse is wanted.
template <class T>
SHOAL_DEVICE T score_row(const Forward<T>& a, const T* logits, T* scores, unsigned lane) {
  const int64_t n = a.num_experts;
  if (a.score == RouterScore::softmax) return softmax_row(logits, scores, n, lane);
  for (int64_t i = lane; i < n; i += kWarp) {
    scores[i] = a.score == RouterScore::sigmoid ? T(1) / (T(1) + fast_exp(-logits[i]))
                                                : std::sqrt(softplus(logits[i]));
  }
  return a.lse == nullptr ? T(0) : softmax_row<T>(logits, nullptr, n, lane);
}

/// Entropy of p = scores / sum of scores.
template <class T>
SHOAL_DEVICE double entropy_row(const T* scores, int64_t n, unsigned lane) {
  T sum = 0;
  for (int64_t i = lane; i < n; i += kWarp) sum += scores[i];
  const T inverse = T(1) / (warp_sum(sum) + kFloor<T>);
  constexpr T kSmallest = sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308);  // normal
  T total = 0;
  for (int64_t i = lane; i < n; i += kWarp) {
    const T p = scores[i] * inverse;
    total -= p >= kSmallest ? p * log_of(p) : T(0);
  }
  return warp_sum(total);
}

/// Whether the experts of each group may be chosen, into `eligible`; `group_scores` is room for them.
template <class T, class At>
SHOAL_DEVICE void choose_groups(const Forward<T>& a, const At& at, T* group_scores, int* eligible,
                                unsigned lane) {
  const int64_t size = a.num_experts / a.num_groups;
  for (int g = 0; g < a.num_groups; g++) {
    T total = 0;
    Selection<T, At> best(at, g * size, (g + 1) * size);
    for (int64_t i = 0; i < a.group_score_top && i < size; i++) total += best.next().value;
    if (lane == 0) group_scores[g] = total;
    if (lane == 0) eligible[g] = 0;
  }
  __syncwarp();
  const auto score_of = [&](int64_t g) { return candidate(group_scores[g], g); };
  Selection<T, decltype(score_of)> best(score_of, 0, a.num_groups);
  for (int i = 0; i < a.top_groups; i++) {
    const int chosen = best.next().id;
    if (lane == 0) eligible[chosen] = 1;
  }
  __syncwarp();
}

/// Writes the ids and weights of a token; lane l has the choices l and l + 32.
template <class T, class At>
SHOAL_DEVICE void choose(const Forward<T>& a, int64_t t, const T* scores, const At& at, unsigned lane) {
  static_assert(kMaxTopK == 2 * kWarp);
  Selection<T, At> best(at, 0, a.num_experts);
  Candidate<T> first, second;  // the score, unbiased
  T total = 0;
  for (int k = 0; k < a.top_k; k++) {
    const int32_t id = best.next().id;
    const T score = scores[id];
    total += score;
    if (static_cast<unsigned>(k) == lane) first = {score, id};
    if (static_cast<unsigned>(k) == lane + kWarp) second = {score, id};
  }
  // Divided one by one: a single choice weighs 1, to the bit, and equals those of other tokens.
  const T divisor = a.normalize ? total + kFloor<T> : T(1);
  const auto write = [&](int k, const Candidate<T>& chosen) {
    if (k >= a.top_k) return;
    a.ids[t * a.top_k + k] = chosen.id;
    a.weights[t * a.top_k + k] = chosen.value / divisor * a.weight_scale;
  };
  write(static_cast<int>(lane), first);
  write(static_cast<int>(lane + kWarp), second);
}

template <class T>
SHOAL_DEVICE void clear_token(const Forward<T>& a, int64_t t, unsigned lane) {
  for (int64_t i = lane; i < a.num_experts; i += kWarp) a.scores[t * a.num_experts + i] = 0;
  for (int k = static_cast<int>(lane); k < a.top_k; k += kWarp) {
    a.ids[t * a.top_k + k] = -1;
    a.weights[t * a.top_k + k] = 0;
  }
  if (a.lse != nullptr && lane == 0) a.lse[t] = 0;
}

/// sums: the token's entropy and lse^2 are added.
template <class T>
SHOAL_DEVICE void route_token(const Forward<T>& a, int64_t t, T* group_scores, int* eligible, unsigned lane,
                              double (&sums)[2]) {
  T* scores = a.scores + t * a.num_experts;
  const T lse = score_row(a, a.logits + t * a.num_experts, scores, lane);
  if (a.lse != nullptr && lane == 0) a.lse[t] = lse;
  sums[0] += entropy_row(scores, a.num_experts, lane);
  sums[1] += static_cast<double>(lse) * static_cast<double>(lse);
  __syncwarp();  // scores are read by other lanes from here on, and the groups of the token before no more
  const auto biased = [&](int64_t i) {
    return candidate(a.bias == nullptr ? scores[i] : scores[i] + a.bias[i], i);
  };
  if (a.num_groups <= 1) return choose(a, t, scores, biased, lane);
  choose_groups(a, biased, group_scores, eligible, lane);
  const int64_t size = a.num_experts / a.num_groups;
  const auto of_eligible = [&](int64_t i) { return eligible[i / size] != 0 ? biased(i) : Candidate<T>{}; };
  choose(a, t, scores, of_eligible, lane);
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) route_kernel(Forward<T> a) {
  using Sums = BlockSums<double, 2>;
  SHOAL_SHARED(double, scratch, Sums::kScratch);
  SHOAL_DYNAMIC_SHARED(T, group_area);  // scores of groups of each warp, then which are eligible
  const Warp warp;
  T* group_scores = group_area + warp.in_block * a.num_groups;
  int* eligible =
      reinterpret_cast<int*>(group_area + blockDim.x / kWarp * a.num_groups) + warp.in_block * a.num_groups;
  double sums[2] = {0, 0};
  for (int64_t t = warp.index; t < a.num_tokens; t += warp.count) {
    if (a.valid != nullptr && a.valid[t] == 0) {
      clear_token(a, t, warp.lane);
    } else {
      route_token(a, t, group_scores, eligible, warp.lane, sums);
    }
  }
  if (warp.lane != 0) sums[0] = sums[1] = 0;  // every lane has its warp's
  Sums block_sums(scratch);
  block_sums(sums);
  if (threadIdx.x != 0) return;
  a.partials[2 * int64_t{blockIdx.x}] = sums[0];
  a.partials[2 * int64_t{blockIdx.x} + 1] = sums[1];
}

/// f_i p_i summed over experts and tokens, one partial sum per block.
template <class T>
struct BalanceArgs {
  const T *scores, *frequency;
  double* partials;
  int64_t num_tokens, num_experts, group_tokens;
  bool normalized;  // scores sum to 1
};

template <class T>
__global__ void __launch_bounds__(kThreads) balance_kernel(BalanceArgs<T> a) {
  using Sums = BlockSums<double, 1>;
  SHOAL_SHARED(double, scratch, Sums::kScratch);
  const Warp warp;
  double sum[1] = {0};
  for (int64_t t = warp.index; t < a.num_tokens; t += warp.count) {
    const T *s = a.scores + t * a.num_experts, *f = a.frequency + t / a.group_tokens * a.num_experts;
    T dot = 0, total = 0;
    for (int64_t i = warp.lane; i < a.num_experts; i += kWarp) {
      dot += f[i] * s[i];
      total += s[i];
    }
    dot = warp_sum(dot);
    total = warp_sum(total);
    sum[0] += a.normalized ? dot : dot / (total + kFloor<T>);
  }
  if (warp.lane != 0) sum[0] = 0;
  Sums block_sums(scratch);
  block_sums(sum);
  if (threadIdx.x == 0) a.partials[blockIdx.x] = sum[0];
}

/// The sums over blocks: entropy, z-loss, aux loss. One block.
template <class T>
struct LossArgs {
  const double* partials;          // entropy, sum of lse^2 per block
  const double* balance_partials;  // null: no aux loss
  int64_t num_partials, num_balance_partials;
  double z_factor, aux_factor;
  double* entropy;
  T *z_loss, *aux_loss;  // may be null
};

template <class T>
__global__ void __launch_bounds__(kThreads) losses_kernel(LossArgs<T> a) {
  using Sums = BlockSums<double, 3>;
  SHOAL_SHARED(double, scratch, Sums::kScratch);
  double sums[3] = {0, 0, 0};
  for (int64_t i = threadIdx.x; i < a.num_partials; i += blockDim.x) {
    sums[0] += a.partials[2 * i];
    sums[1] += a.partials[2 * i + 1];
  }
  for (int64_t i = threadIdx.x; i < a.num_balance_partials; i += blockDim.x) sums[2] += a.balance_partials[i];
  Sums block_sums(scratch);
  block_sums(sums);
  if (threadIdx.x != 0) return;
  a.entropy[0] = sums[0];
  if (a.z_loss != nullptr) a.z_loss[0] = static_cast<T>(a.z_factor * sums[1]);
  if (a.aux_loss != nullptr) a.aux_loss[0] = static_cast<T>(a.aux_factor * sums[2]);
}

template <class T>
Tensor bias_in(const Tensor& bias_E) {
  if (!bias_E.defined() || bias_E.dtype() == dtype_of<T>) return bias_E;
  const Tensor bias = Tensor::empty(bias_E.shape(), dtype_of<T>, bias_E.device());
  cast_fwd(bias_E.device(), bias_E, bias);
  return bias;
}

int64_t tokens_per_row(const Tensor& frequency_GE, int64_t num_tokens) {
  return std::max<int64_t>(1, frequency_GE.num_rows() == 0 ? 1 : num_tokens / frequency_GE.num_rows());
}

/// Partial sums of the auxiliary loss.
template <class T>
Tensor balance_partials(const RouteForward& args, const RouteSpec& spec) {
  const Device device = args.logits_TE.device();
  const int64_t num_tokens = args.logits_TE.num_rows();
  const LaunchShape shape = warp_per_token(device, num_tokens);
  const Tensor partials = Tensor::empty({shape.grid_x}, DType::f64, device);
  SHOAL_LAUNCH(
      (balance_kernel<T>), shape,
      BalanceArgs<T>{args.scores_TE.data<T>(), args.frequency_GE.data<T>(), partials.data<double>(),
                     num_tokens, args.logits_TE.row_size(), tokens_per_row(args.frequency_GE, num_tokens),
                     spec.score == RouterScore::softmax});
  return partials;
}

template <class T>
void route_fwd_typed(const RouteForward& args, const RouteSpec& spec, const BalanceSpec& balance) {
  const Device device = args.logits_TE.device();
  const int64_t num_tokens = args.logits_TE.num_rows(), num_experts = args.logits_TE.row_size();
  const Tensor bias = bias_in<T>(args.bias_E);
  const size_t group_bytes =
      spec.num_groups <= 1 ? 0 : static_cast<size_t>(spec.num_groups) * (sizeof(T) + sizeof(int));
  SHOAL_CHECK(group_bytes <= kMaxGroupBytes, "route: expected at most ",
              kMaxGroupBytes / (sizeof(T) + sizeof(int)), " groups of experts on a cuda device, got ",
              spec.num_groups);
  const LaunchShape shape = warp_per_token(device, num_tokens, group_bytes);
  const Tensor partials = Tensor::empty({shape.grid_x, 2}, DType::f64, device);
  SHOAL_LAUNCH(
      (route_kernel<T>), shape,
      Forward<T>{args.logits_TE.data<T>(), data_or_null<T>(bias), data_or_null<uint8_t>(args.valid_T),
                 args.ids_TK.data<int32_t>(), args.weights_TK.data<T>(), args.scores_TE.data<T>(),
                 data_or_null<T>(args.lse_T), partials.data<double>(), num_tokens, num_experts,
                 static_cast<int>(spec.num_groups), static_cast<int>(spec.top_k),
                 static_cast<int>(spec.top_groups), static_cast<int>(spec.group_score_top), spec.score,
                 spec.normalize, static_cast<T>(spec.weight_scale)});
  const bool counted = args.frequency_GE.defined() && !balance.frequency_E.defined();
  count_assignments(args.ids_TK, args.counts_E, counted ? args.frequency_GE : Tensor{});
  const Tensor balance_sums = args.aux_loss.defined() ? balance_partials<T>(args, spec) : Tensor{};
  SHOAL_LAUNCH(
      (losses_kernel<T>), launch_shape(device, 1, kThreads),
      LossArgs<T>{partials.data<double>(), data_or_null<double>(balance_sums), shape.grid_x,
                  balance_sums.defined() ? balance_sums.numel() : 0, balance.per_token(balance.z_coeff),
                  balance.per_token(balance.aux_coeff * static_cast<double>(num_experts)),
                  args.entropy.data<double>(), data_or_null<T>(args.z_loss), data_or_null<T>(args.aux_loss)});
}

void route_fwd_impl(const RouteForward& args, const RouteSpec& spec, const BalanceSpec& balance) {
  dispatch_float(args.logits_TE.dtype(), "route",
                 [&]<class T>() { route_fwd_typed<T>(args, spec, balance); });
}

[[maybe_unused]] const bool added = route_fwd.add(DeviceType::cuda, &route_fwd_impl);

}  // namespace
}  // namespace shoal::cuda
