// CUDA kernel of the capacity drops in core/ops/routing.h: assignments are sorted by capacity group and
// expert, those of one expert in the order in which they are served; what comes after the first C of them is
// dropped.
#include <cmath>

#include "core/backend/cuda/map.h"
#include "core/backend/cuda/sort.h"
#include "core/ops/routing.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 256;
using Count = unsigned long long;  // what CUDA adds atomically

struct Slots {
  int32_t* ids;
  int64_t count, top_k, num_experts, num_groups, group_slots;
};

/// Group and expert of an assignment; num_groups * num_experts where there is none.
struct BinKey {
  Slots s;
  SHOAL_DEVICE uint64_t operator()(int32_t n) const {
    const int32_t id = s.ids[n];
    const int64_t bin =
        id < 0 || id >= s.num_experts ? s.num_groups * s.num_experts : n / s.group_slots * s.num_experts + id;
    return static_cast<uint64_t>(bin);
  }
};

/// Larger weights first; NaN last, with -infinity.
template <class T>
struct WeightKey {
  const T* weights;
  SHOAL_DEVICE uint64_t operator()(int32_t n) const {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    constexpr Bits kSign = Bits(1) << (8 * sizeof(T) - 1);
    T w = weights[n];
    if (!(w == w)) w = -static_cast<T>(INFINITY);
    if (w == 0) w = 0;  // -0 is no smaller
    const Bits bits = __builtin_bit_cast(Bits, w);
    return static_cast<Bits>(~((bits & kSign) != 0 ? ~bits : bits | kSign));
  }
};

/// All first choices of a group in token order, then all second ones, ...
struct ByChoice {
  static constexpr int kPack = 1;
  int32_t* order;
  int64_t top_k, group_slots;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    const int64_t group = i / group_slots, in_group = i % group_slots, group_tokens = group_slots / top_k;
    const int64_t choice = in_group / group_tokens, token = in_group % group_tokens;
    order[i] = static_cast<int32_t>(group * group_slots + token * top_k + choice);
  }
};

/// Tokens of each group that have an expert.
__global__ void count_tokens_kernel(Slots s, Count* tokens) {
  const int64_t num_tokens = s.count / s.top_k, group_tokens = s.group_slots / s.top_k;
  for (int64_t t = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < num_tokens;
       t += int64_t{gridDim.x} * blockDim.x) {
    bool any = false;
    for (int64_t k = 0; k < s.top_k; k++) any = any || s.ids[t * s.top_k + k] >= 0;
    if (any) atomicAdd(&tokens[t / group_tokens], Count{1});
  }
}

/// starts[bin] = where it starts in the sorted order; bins without assignments are left out.
struct Starts {
  static constexpr int kPack = 1;
  BinKey key;
  const int32_t* order;
  int32_t* starts;
  template <int N>
  SHOAL_DEVICE void at(int64_t p) const {
    const uint64_t bin = key(order[p]);
    if (p == 0 || key(order[p - 1]) != bin) starts[bin] = static_cast<int32_t>(p);
  }
};

/// expert_capacity of core/ops/routing.h.
SHOAL_DEVICE int64_t capacity_of(double factor, int64_t top_k, int64_t tokens, int64_t num_experts) {
  const double wanted =
      factor * static_cast<double>(top_k) * static_cast<double>(tokens) / static_cast<double>(num_experts);
  const double rounded = std::ceil(wanted * (1 - 1e-12));
  return rounded < 0 ? 0 : rounded > static_cast<double>(tokens) ? tokens : static_cast<int64_t>(rounded);
}

template <class T>
struct DropArgs {
  Slots s;
  T* weights;
  const int32_t *order, *starts;
  const Count* tokens;
  double factor;
  Count* dropped;
};

template <class T>
__global__ void drop_kernel(DropArgs<T> a) {
  using Sums = BlockSums<int, 1>;
  SHOAL_SHARED(int, scratch, Sums::kScratch);
  int dropped[1] = {0};
  for (int64_t p = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; p < a.s.count;
       p += int64_t{gridDim.x} * blockDim.x) {
    const int32_t n = a.order[p];
    const uint64_t bin = BinKey{a.s}(n);
    if (bin == static_cast<uint64_t>(a.s.num_groups * a.s.num_experts)) continue;
    const auto tokens = static_cast<int64_t>(a.tokens[n / a.s.group_slots]);
    if (p - a.starts[bin] < capacity_of(a.factor, a.s.top_k, tokens, a.s.num_experts)) continue;
    a.s.ids[n] = -1;
    a.weights[n] = 0;
    dropped[0]++;
  }
  Sums block_sums(scratch);
  block_sums(dropped);
  if (threadIdx.x == 0 && dropped[0] != 0) atomicAdd(a.dropped, static_cast<Count>(dropped[0]));
}

/// The assignments in the order in which experts are served.
template <class T>
Tensor serving_order(Device device, const Slots& s, const T* weights, DropPolicy policy) {
  const int64_t num_bins = s.num_groups * s.num_experts;
  Tensor order;
  if (policy == DropPolicy::probability) {
    order = sorted_order(device, s.count, WeightKey<T>{weights}, 8 * static_cast<int>(sizeof(T)));
  } else {
    order = Tensor::empty({s.count}, DType::i32, device);
    map(device, s.count, false, ByChoice{order.data<int32_t>(), s.top_k, s.group_slots});
  }
  return sorted_order(device, s.count, BinKey{s}, key_bits(num_bins + 1), order);
}

template <class T>
void drop_over_capacity(const Slots& s, const Tensor& weights_TK, const CapacitySpec& spec,
                        const Tensor& dropped) {
  const Device device = weights_TK.device();
  T* weights = weights_TK.data<T>();
  const Tensor order = serving_order(device, s, weights, spec.policy);
  const Tensor tokens = Tensor::zeros({s.num_groups}, DType::i64, device);
  auto* tokens_G = reinterpret_cast<Count*>(tokens.data<int64_t>());
  const auto blocks = [](int64_t work) { return std::min<int64_t>((work + kThreads - 1) / kThreads, 1056); };
  SHOAL_LAUNCH((count_tokens_kernel), launch_shape(device, blocks(s.count / s.top_k), kThreads), s, tokens_G);
  const Tensor starts = Tensor::empty({s.num_groups * s.num_experts + 1}, DType::i32, device);
  map(device, s.count, false, Starts{BinKey{s}, order.data<int32_t>(), starts.data<int32_t>()});
  SHOAL_LAUNCH((drop_kernel<T>), launch_shape(device, blocks(s.count), kThreads),
               DropArgs<T>{s, weights, order.data<int32_t>(), starts.data<int32_t>(), tokens_G, spec.factor,
                           reinterpret_cast<Count*>(dropped.data<int64_t>())});
}

void drop_over_capacity_impl(const Tensor& ids_TK, const Tensor& weights_TK, int64_t num_experts,
                             const CapacitySpec& spec, const Tensor& dropped) {
  dropped.set_zero();
  const int64_t num_tokens = ids_TK.size(0), top_k = ids_TK.size(1);
  if (ids_TK.numel() == 0) return;
  const int64_t group_tokens = spec.tokens_per_group > 0 ? spec.tokens_per_group : num_tokens;
  const Slots s{ids_TK.data<int32_t>(),    ids_TK.numel(),      top_k, num_experts,
                num_tokens / group_tokens, group_tokens * top_k};
  dispatch_float(weights_TK.dtype(), "drop_over_capacity",
                 [&]<class T>() { drop_over_capacity<T>(s, weights_TK, spec, dropped); });
}

[[maybe_unused]] const bool added = drop_over_capacity_fwd.add(DeviceType::cuda, &drop_over_capacity_impl);

}  // namespace
}  // namespace shoal::cuda
