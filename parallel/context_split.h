// ContextSplit: how sequences lie on the ranks of a context parallel group. Each is cut into 2 * cp chunks,
// sizes differing by at most one, and rank r holds chunks r and 2 * cp - 1 - r, so that all ranks see about
// as many pairs of a causal attention (Llama 3, arXiv:2407.21783, section 3.3.2). A rank's rows are those of
// sequence 0, then of sequence 1, and so on. Without context parallelism every function returns its argument.
#pragma once

#include <cstdint>
#include <vector>

#include "core/nn/placement.h"
#include "core/ops/attention_part.h"
#include "core/tensor/tensor.h"
#include "parallel/communicator.h"

namespace shoal {

/// How keys and values of other ranks reach a rank's queries.
enum class ContextKind : uint8_t {
  all_gather,  // all at once; their gradients are summed to their owners
  ring,        // from neighbour to neighbour while those at hand are used (arXiv:2310.01889)
};

/// The positions that a rank of a context parallel group holds of a sequence.
PositionRuns context_runs(int64_t seq, AxisCoord cp);

class ContextSplit {
 public:
  /// `group` must outlive this.
  ContextSplit(Communicator& group, ContextKind kind) : group_(&group), kind_(kind) {}

  bool is_split() const { return group_->size() > 1; }
  Communicator& group() const { return *group_; }
  ContextKind kind() const { return kind_; }
  PositionRuns runs(int64_t seq, int rank) const { return context_runs(seq, {rank, group_->size()}); }
  PositionRuns own(int64_t seq) const { return runs(seq, group_->rank()); }
  /// The first row of each rank and the total when all ranks' rows lie one after the other.
  std::vector<int64_t> offsets(int64_t batch, int64_t seq) const;

  /// All rows of whole sequences, for work that every rank does alike; recorded. Collective.
  Tensor gather_replicated(const Tensor& own_rows, int64_t batch, int64_t seq) const;
  /// This rank's rows of something that all ranks have; the others take no gradient. Recorded.
  Tensor own_rows(const Tensor& all_rows, int64_t batch, int64_t seq) const;

  /// What gather_replicated of rows of that size sends; its backward sends nothing.
  void count_gather_replicated(int64_t batch, int64_t seq, int64_t row_bytes) const;

  // Not recorded. `by_rank`: the rows of rank 0, then of rank 1, and so on, as collectives have them.
  Tensor in_sequence_order(const Tensor& by_rank, int64_t batch, int64_t seq) const;
  Tensor in_rank_order(const Tensor& all_rows, int64_t batch, int64_t seq) const;

 private:
  Communicator* group_;
  ContextKind kind_;
};

/// Rows of whole sequences [batch * seq, ...] that lie in `runs`, as a copy. Any dtype; not recorded.
Tensor take_runs(const Tensor& all_rows, const PositionRuns& runs, int64_t batch, int64_t seq);

}  // namespace shoal
