#include "parallel/moe/dispatch_plan.h"

#include <numeric>

#include "core/nn/placement.h"

namespace shoal {

namespace {

/// rows_each: as for the kernel, 0: one row for each assignment. counts_E: undefined for a tensor of its own.
SortAssignments sort_on_device(const Tensor& expert_ids_TK, int64_t num_experts, int64_t rows_each,
                               const Tensor& place_E, const Tensor& counts_E = {}) {
  SHOAL_CHECK(expert_ids_TK.dtype() == DType::i32 && expert_ids_TK.dims() == 2,
              "dispatch: expected expert_ids_TK i32 [T, K], got ", expert_ids_TK.dtype(), ' ',
              expert_ids_TK.shape());
  const Device device = expert_ids_TK.device();
  const int64_t num_rows = rows_each > 0 ? num_experts * rows_each : expert_ids_TK.numel();
  const auto empty = [&](const Shape& shape) { return Tensor::empty(shape, DType::i64, device); };
  const SortAssignments sort{expert_ids_TK,
                             counts_E.defined() ? counts_E : empty({num_experts}),
                             empty(expert_ids_TK.shape()),
                             empty({num_rows}),
                             empty({num_rows}),
                             place_E,
                             rows_each};
  sort_assignments_fwd(device, sort);
  return sort;
}

}  // namespace

SortAssignments start_sort(const Tensor& expert_ids_TK, const Tensor& counts_E, const Tensor& place_E) {
  return sort_on_device(expert_ids_TK, counts_E.numel(), 0, place_E, counts_E);
}

SortedAssignments finish_sort(const SortAssignments& sort, std::vector<int64_t> counts_E) {
  SortedAssignments sorted;
  sorted.counts_E = std::move(counts_E);
  const int64_t num_rows = std::accumulate(sorted.counts_E.begin(), sorted.counts_E.end(), int64_t{0});
  sorted.row_N = sort.row_N.rows(0, num_rows);
  sorted.choice_N = sort.choice_N.rows(0, num_rows);
  sorted.slots_TK = sort.slots_TK;
  if (num_rows < sort.ids_TK.numel() / 2) {  // most are dropped: do not keep room for them
    sorted.row_N = sorted.row_N.clone();
    sorted.choice_N = sorted.choice_N.clone();
  }
  return sorted;
}

SortedAssignments sort_assignments(const Tensor& expert_ids_TK, int64_t num_experts, const Tensor& place_E) {
  const SortAssignments sort = sort_on_device(expert_ids_TK, num_experts, 0, place_E);
  return finish_sort(sort, sort.counts_E.to_vector<int64_t>());
}

SortedAssignments sort_padded(const Tensor& expert_ids_TK, int64_t num_experts, int64_t rows_each,
                              const Tensor& place_E) {
  SHOAL_CHECK(rows_each > 0 || (rows_each == 0 && expert_ids_TK.numel() == 0),
              "padded dispatch: expected at least one row for each expert, or no tokens, got ", rows_each,
              " rows and ids ", expert_ids_TK.shape());
  std::vector<int64_t> counts_E(static_cast<size_t>(num_experts), rows_each);
  if (rows_each == 0) {
    const Tensor none = Tensor::empty({0}, DType::i64, expert_ids_TK.device());
    return {std::move(counts_E), none, none, none.view(expert_ids_TK.shape())};
  }
  const SortAssignments sort = sort_on_device(expert_ids_TK, num_experts, rows_each, place_E);
  return {std::move(counts_E), sort.row_N, sort.choice_N, sort.slots_TK};
}

std::vector<int64_t> rows_per_rank(std::span<const int64_t> counts_E, int num_ranks) {
  std::vector<int64_t> rows;
  for (int r = 0; r < num_ranks; r++) {
    const ShardRange shard = shard_range(std::ssize(counts_E), {r, num_ranks});
    rows.push_back(std::accumulate(counts_E.begin() + shard.begin, counts_E.begin() + shard.end, int64_t{0}));
  }
  return rows;
}

ArrivalOrder order_arrivals(std::span<const int64_t> counts, int64_t num_sources, int64_t num_local,
                            Device device) {
  ArrivalOrder order;
  order.recv_rows.assign(static_cast<size_t>(num_sources), 0);
  order.rows_per_expert.assign(static_cast<size_t>(num_local), 0);
  order.rows_per_source.resize(counts.size());
  int64_t num_rows = 0;
  for (int64_t s = 0; s < num_sources; s++) {
    for (int64_t e = 0; e < num_local; e++) {
      const int64_t rows = counts[static_cast<size_t>(s * num_local + e)];
      order.recv_rows[static_cast<size_t>(s)] += rows;
      order.rows_per_expert[static_cast<size_t>(e)] += rows;
      order.rows_per_source[static_cast<size_t>(e * num_sources + s)] = rows;
      num_rows += rows;
    }
  }
  order.identity = num_sources == 1 || num_local <= 1 || num_rows == 0;
  if (order.identity) return order;
  std::vector<int64_t> next(order.rows_per_expert.size());  // where the next row of each expert goes
  std::exclusive_scan(order.rows_per_expert.begin(), order.rows_per_expert.end(), next.begin(), int64_t{0});
  std::vector<int64_t> moves;
  int64_t arrived = 0;
  for (int64_t block = 0; block < num_sources * num_local; block++) {
    const int64_t rows = counts[static_cast<size_t>(block)];
    int64_t& to = next[static_cast<size_t>(block % num_local)];
    moves.insert(moves.end(), {arrived, to, rows});
    arrived += rows;
    to += rows;
  }
  order.index_R = Tensor::empty({num_rows}, DType::i64, device);
  order.inverse_R = Tensor::empty({num_rows}, DType::i64, device);
  move_blocks(device, Tensor::from(moves, {num_sources * num_local, 3}, device), order.index_R,
              order.inverse_R);
  return order;
}

}  // namespace shoal
