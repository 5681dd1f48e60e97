// CPU kernel of the capacity drops in core/ops/routing.h.
#include <algorithm>
#include <limits>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/ops/routing.h"

SHOAL_KERNELS_BEGIN

template <class T>
struct CapacityGroup {
  int32_t* ids;  // [tokens, top_k]
  T* weights;
  int64_t num_tokens, top_k, num_experts;
  int64_t capacity;
  int64_t* first_E1;  // scratch, num_experts + 1
  int64_t* order_N;   // scratch, num_tokens * top_k

  void drop(int64_t n) const {
    ids[n] = -1;
    weights[n] = 0;
  }
};

template <class T>
int64_t count_valid(const CapacityGroup<T>& g) {
  int64_t count = 0;
  for (int64_t t = 0; t < g.num_tokens; t++) {
    const int32_t* row = g.ids + t * g.top_k;
    count += std::any_of(row, row + g.top_k, [](int32_t id) { return id >= 0; }) ? 1 : 0;
  }
  return count;
}

template <class T>
int64_t drop_by_position(const CapacityGroup<T>& g) {
  int64_t* used = g.first_E1;
  std::fill(used, used + g.num_experts, 0);
  int64_t dropped = 0;
  for (int64_t k = 0; k < g.top_k; k++) {
    for (int64_t n = k; n < g.num_tokens * g.top_k; n += g.top_k) {
      const int32_t id = g.ids[n];
      if (id < 0) continue;
      if (used[id] < g.capacity) {
        used[id]++;
      } else {
        g.drop(n);
        dropped++;
      }
    }
  }
  return dropped;
}

// Sorts the assignments by expert (keeping token order), then drops the smallest weights of full experts.
template <class T>
int64_t drop_by_probability(const CapacityGroup<T>& g) {
  const int64_t num_slots = g.num_tokens * g.top_k;
  int64_t* first = g.first_E1;
  std::fill(first, first + g.num_experts + 1, 0);
  for (int64_t n = 0; n < num_slots; n++) {
    if (g.ids[n] >= 0) first[g.ids[n] + 1]++;
  }
  for (int64_t e = 0; e < g.num_experts; e++) first[e + 1] += first[e];
  for (int64_t n = 0; n < num_slots; n++) {
    if (g.ids[n] >= 0) g.order_N[first[g.ids[n]]++] = n;  // first[e] becomes the end of e
  }
  const auto key = [&](int64_t n) {
    return g.weights[n] == g.weights[n] ? g.weights[n] : -std::numeric_limits<T>::infinity();
  };
  int64_t dropped = 0;
  for (int64_t e = 0; e < g.num_experts; e++) {
    int64_t *begin = g.order_N + (e == 0 ? 0 : first[e - 1]), *end = g.order_N + first[e];
    if (end - begin <= g.capacity) continue;
    std::nth_element(begin, begin + g.capacity, end,
                     [&](int64_t a, int64_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
    for (int64_t* n = begin + g.capacity; n < end; n++) g.drop(*n);
    dropped += end - begin - g.capacity;
  }
  return dropped;
}

void drop_over_capacity_impl(const Tensor& ids_TK, const Tensor& weights_TK, int64_t num_experts,
                             const CapacitySpec& spec, const Tensor& dropped) {
  const int64_t num_tokens = ids_TK.size(0), top_k = ids_TK.size(1);
  const int64_t group_tokens = spec.tokens_per_group > 0 ? spec.tokens_per_group : num_tokens;
  const int64_t num_groups = group_tokens == 0 ? 0 : num_tokens / group_tokens;
  const Tensor first = Tensor::empty({num_groups, num_experts + 1}, DType::i64);
  const bool by_weight = spec.policy == DropPolicy::probability;
  const Tensor order = by_weight ? Tensor::empty({num_tokens * top_k}, DType::i64) : Tensor{};
  const Tensor dropped_G = Tensor::empty({num_groups}, DType::i64);
  int64_t *first_data = first.data<int64_t>(), *dropped_data = dropped_G.data<int64_t>();
  int64_t* order_data = by_weight ? order.data<int64_t>() : nullptr;
  dispatch_float(weights_TK.dtype(), "drop_over_capacity", [&]<class T>() {
    int32_t* ids = ids_TK.data<int32_t>();
    T* weights = weights_TK.data<T>();
    parallel_tasks(num_groups, [&](int64_t g) {
      const int64_t offset = g * group_tokens * top_k;
      CapacityGroup<T> group{ids + offset,
                             weights + offset,
                             group_tokens,
                             top_k,
                             num_experts,
                             0,
                             first_data + g * (num_experts + 1),
                             by_weight ? order_data + offset : nullptr};
      group.capacity = expert_capacity(spec.factor, top_k, count_valid(group), num_experts);
      dropped_data[g] = by_weight ? drop_by_probability(group) : drop_by_position(group);
    });
  });
  int64_t total = 0;
  for (int64_t g = 0; g < num_groups; g++) total += dropped_data[g];
  dropped.data<int64_t>()[0] = total;
}

const bool added = drop_over_capacity_fwd.add(DeviceType::cpu, &drop_over_capacity_impl, kIsaLevel);

SHOAL_KERNELS_END
