#include "parallel/moe/dispatch_plan.h"

#include <numeric>

#include "core/nn/placement.h"

namespace shoal {

namespace {

std::vector<int64_t> count_experts(const int32_t* ids, int64_t num_tokens, int64_t top_k,
                                   int64_t num_experts) {
  std::vector<int64_t> counts(static_cast<size_t>(num_experts), 0);
  for (int64_t i = 0; i < num_tokens * top_k; i++) {
    const int32_t e = ids[i];
    SHOAL_CHECK(e >= -1 && e < num_experts, "dispatch: expert_ids_TK[", i / top_k, ", ", i % top_k, "] is ",
                e, ", expected -1 (dropped) or 0..", num_experts - 1);
    if (e >= 0) counts[static_cast<size_t>(e)]++;
  }
  return counts;
}

}  // namespace

SortedAssignments sort_assignments(const Tensor& expert_ids_TK, int64_t num_experts) {
  SHOAL_CHECK(expert_ids_TK.dtype() == DType::i32 && expert_ids_TK.dims() == 2,
              "dispatch: expected expert_ids_TK i32 [T, K], got ", expert_ids_TK.dtype(), ' ',
              expert_ids_TK.shape());
  const Tensor host = expert_ids_TK.to(Device{});
  const int64_t num_tokens = host.size(0), top_k = host.size(1);
  const int32_t* ids = host.data<int32_t>();
  SortedAssignments sorted;
  sorted.counts_E = count_experts(ids, num_tokens, top_k, num_experts);
  std::vector<int64_t> next(sorted.counts_E.size());
  std::exclusive_scan(sorted.counts_E.begin(), sorted.counts_E.end(), next.begin(), int64_t{0});
  const int64_t num_rows = std::accumulate(sorted.counts_E.begin(), sorted.counts_E.end(), int64_t{0});
  sorted.row_N = Tensor::empty({num_rows}, DType::i64);
  sorted.choice_N = Tensor::empty({num_rows}, DType::i64);
  sorted.slots_TK = Tensor::empty({num_tokens, top_k}, DType::i64);
  int64_t *row = sorted.row_N.data<int64_t>(), *choice = sorted.choice_N.data<int64_t>();
  int64_t* slot = sorted.slots_TK.data<int64_t>();
  for (int64_t t = 0, i = 0; t < num_tokens; t++) {
    for (int64_t k = 0; k < top_k; k++, i++) {
      if (ids[i] < 0) {
        slot[i] = -1;
        continue;
      }
      const int64_t n = next[static_cast<size_t>(ids[i])]++;
      slot[i] = n;
      row[n] = t;
      choice[n] = k;
    }
  }
  return sorted;
}

std::vector<int64_t> rows_per_rank(std::span<const int64_t> counts_E, int num_ranks) {
  std::vector<int64_t> rows;
  for (int r = 0; r < num_ranks; r++) {
    const ShardRange shard = shard_range(std::ssize(counts_E), {r, num_ranks});
    rows.push_back(std::accumulate(counts_E.begin() + shard.begin, counts_E.begin() + shard.end, int64_t{0}));
  }
  return rows;
}

ArrivalOrder order_arrivals(std::span<const int64_t> counts, int64_t num_sources, int64_t num_local) {
  ArrivalOrder order;
  order.recv_rows.assign(static_cast<size_t>(num_sources), 0);
  order.rows_per_expert.assign(static_cast<size_t>(num_local), 0);
  int64_t num_rows = 0;
  for (int64_t s = 0; s < num_sources; s++) {
    for (int64_t e = 0; e < num_local; e++) {
      const int64_t rows = counts[static_cast<size_t>(s * num_local + e)];
      order.recv_rows[static_cast<size_t>(s)] += rows;
      order.rows_per_expert[static_cast<size_t>(e)] += rows;
      num_rows += rows;
    }
  }
  order.identity = num_sources == 1 || num_local <= 1 || num_rows == 0;
  if (order.identity) return order;
  order.index_R = Tensor::empty({num_rows}, DType::i64);
  order.inverse_R = Tensor::empty({num_rows}, DType::i64);
  int64_t *index = order.index_R.data<int64_t>(), *inverse = order.inverse_R.data<int64_t>();
  std::vector<int64_t> next(order.rows_per_expert.size());  // where the next row of each expert goes
  std::exclusive_scan(order.rows_per_expert.begin(), order.rows_per_expert.end(), next.begin(), int64_t{0});
  int64_t arrived = 0;
  for (size_t block = 0; block < static_cast<size_t>(num_sources * num_local); block++) {
    int64_t& to = next[block % static_cast<size_t>(num_local)];
    for (int64_t i = 0; i < counts[block]; i++, to++, arrived++) {
      index[to] = arrived;
      inverse[arrived] = to;
    }
  }
  return order;
}

}  // namespace shoal
