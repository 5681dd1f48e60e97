// The integer side of dispatch: which row goes where. No communication, no gradients. Used by the
// dispatchers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/ops/assignments.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// Base of what each dispatcher remembers between dispatch and combine.
struct DispatchPlan {
  virtual ~DispatchPlan() = default;
};

/// The dispatcher's own plan; throws Error when the plan was made by another kind.
template <class Plan>
const Plan& plan_of(const std::shared_ptr<const DispatchPlan>& plan, const char* kind) {
  const auto* own = dynamic_cast<const Plan*>(plan.get());
  SHOAL_CHECK(own != nullptr, kind, " dispatcher: combine needs the plan of its own dispatch, got ",
              plan ? "one of another kind" : "none");
  return *own;
}

/// The assignments (token, choice) of expert_ids_TK sorted by expert, then token, then choice; dropped ones
/// (-1) left out. N rows: counts_E sums to N.
struct SortedAssignments {
  std::vector<int64_t> counts_E;
  Tensor row_N, choice_N;  // i64, on the device of the ids: token and choice of each row
  Tensor slots_TK;         // i64, there too: the row of each assignment, -1 when dropped

  int64_t num_rows() const { return row_N.numel(); }
};
/// expert_ids_TK: i32 in [-1, num_experts); throws Error naming the first other value. place_E (i32, on the
/// device; undefined: 0, 1, ...): the place of each expert in the order. Waits for the device: the host needs
/// the counts, for the sizes of what is sent and for the experts' products.
SortedAssignments sort_assignments(const Tensor& expert_ids_TK, int64_t num_experts,
                                   const Tensor& place_E = {});
/// The same in two steps, without waiting: counts_E [E], i64 on the device of the ids, is written, for
/// whoever reads it together with something else and then finishes.
SortAssignments start_sort(const Tensor& expert_ids_TK, const Tensor& counts_E, const Tensor& place_E);
SortedAssignments finish_sort(const SortAssignments& sort, std::vector<int64_t> counts_E);
/// The same with exactly rows_each rows for each expert, of which those without an assignment have token and
/// choice -1; an expert must not have more assignments. Does not wait.
SortedAssignments sort_padded(const Tensor& expert_ids_TK, int64_t num_experts, int64_t rows_each,
                              const Tensor& place_E = {});

/// Sums of consecutive counts: what each rank's experts get.
std::vector<int64_t> rows_per_rank(std::span<const int64_t> counts_E, int num_ranks);

/// Rows arrive grouped by source rank, then by local expert; they are used grouped by local expert, then by
/// source. y[n] = x[index_R[n]] puts them in order, inverse_R brings them back.
struct ArrivalOrder {
  std::vector<int64_t> recv_rows;        // per source
  std::vector<int64_t> rows_per_expert;  // per local expert
  std::vector<int64_t> rows_per_source;  // of each local expert from each source
  bool identity = false;                 // arrival order is the order of use already: no tensors then
  Tensor index_R, inverse_R;             // i64, on the device
};
/// counts: num_sources x num_local, row major.
ArrivalOrder order_arrivals(std::span<const int64_t> counts, int64_t num_sources, int64_t num_local,
                            Device device = {});

}  // namespace shoal
