// CPU kernels of core/ops/assignments.h.
#include "core/ops/assignments.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

void count_ids(const SortAssignments& s) {
  const int64_t top_k = s.ids_TK.size(1), num_experts = s.counts_E.numel();
  const int32_t* ids = s.ids_TK.data<int32_t>();
  int64_t* counts = s.counts_E.data<int64_t>();
  std::fill(counts, counts + num_experts, 0);
  for (int64_t i = 0; i < s.ids_TK.numel(); i++) {
    const int32_t e = ids[i];
    SHOAL_CHECK(e >= -1 && e < num_experts, "dispatch: expert_ids_TK[", i / top_k, ", ", i % top_k, "] is ",
                e, ", expected -1 (dropped) or 0..", num_experts - 1);
    if (e >= 0) counts[e]++;
  }
}

/// Where the first row of each expert goes.
std::vector<int64_t> first_rows(const SortAssignments& s) {
  const int64_t num_experts = s.counts_E.numel(), *counts = s.counts_E.data<int64_t>();
  const int32_t* place = s.place_E.defined() ? s.place_E.data<int32_t>() : nullptr;
  std::vector<int64_t> at(static_cast<size_t>(num_experts)), first(at.size());
  for (int64_t e = 0; e < num_experts; e++)  // rows of the expert at each place
    at[static_cast<size_t>(place != nullptr ? place[e] : e)] = s.rows_each > 0 ? s.rows_each : counts[e];
  std::exclusive_scan(at.begin(), at.end(), at.begin(), int64_t{0});
  for (int64_t e = 0; e < num_experts; e++)
    first[static_cast<size_t>(e)] = at[static_cast<size_t>(place != nullptr ? place[e] : e)];
  return first;
}

void sort_assignments_impl(const SortAssignments& s) {
  count_ids(s);
  const int64_t num_tokens = s.ids_TK.size(0), top_k = s.ids_TK.size(1), num_experts = s.counts_E.numel();
  const int32_t* ids = s.ids_TK.data<int32_t>();
  const int64_t* counts = s.counts_E.data<int64_t>();
  std::vector<int64_t> next = first_rows(s);
  int64_t *row = s.row_N.data<int64_t>(), *choice = s.choice_N.data<int64_t>();
  int64_t* slot = s.slots_TK.data<int64_t>();
  if (s.rows_each > 0) {
    for (int64_t e = 0; e < num_experts; e++)
      SHOAL_CHECK(counts[e] <= s.rows_each, "dispatch: expert ", e, " has ", counts[e],
                  " assignments, expected at most ", s.rows_each, " in padded dispatch");
    std::fill(row, row + s.row_N.numel(), -1);
    std::fill(choice, choice + s.choice_N.numel(), -1);
  }
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
}

void move_blocks_impl(const Tensor& moves_B3, const Tensor& index_R, const Tensor& inverse_R) {
  int64_t *index = index_R.data<int64_t>(), *inverse = inverse_R.data<int64_t>();
  for (int64_t b = 0; b < moves_B3.size(0); b++) {
    const int64_t *move = moves_B3.data<int64_t>() + 3 * b, from = move[0], to = move[1], size = move[2];
    for (int64_t i = 0; i < size; i++) {
      index[to + i] = from + i;
      inverse[from + i] = to + i;
    }
  }
}

const bool added[] = {
    sort_assignments_fwd.add(DeviceType::cpu, &sort_assignments_impl, kIsaLevel),
    move_blocks.add(DeviceType::cpu, &move_blocks_impl, kIsaLevel),
};

SHOAL_KERNELS_END
