// ExpertSplit: how rows of experts lie on the ranks of an expert tensor parallel group, which hold other
// parts of the same experts' widths (etp). Each rank has rows of its own; all of them multiply the rows of
// all, and partial results are summed back to the rank of each row. Without such a group every function
// returns its argument. Knows no weights.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor/tensor.h"
#include "parallel/communicator.h"
#include "parallel/moe/dispatch_plan.h"

namespace shoal {

class ExpertSplit {
 public:
  /// `group` (etp) must outlive this.
  explicit ExpertSplit(Communicator& group) : group_(&group) {}
  bool is_split() const { return group_->size() > 1; }

  /// The rows of all ranks, sorted by local expert, then by rank.
  struct Gathered {
    Tensor x_RD;
    std::vector<int64_t> rows_per_expert;
    std::vector<int64_t> offsets;  // first row of each rank, before they were sorted
    ArrivalOrder order;
  };
  /// x: this rank's rows, sorted by local expert. Gradients are summed over the ranks. The ranks tell each
  /// other their counts; the device is not waited for. Collective.
  Gathered gather(const Tensor& x_RD, const std::vector<int64_t>& rows_per_expert) const;
  /// This rank's rows of the sum of what the ranks have computed of all rows. Collective.
  Tensor scatter(const Tensor& partial_RD, const Gathered& gathered) const;

  /// What gather and scatter send in one half of a pass: rows_of_rank of that size, of num_experts local
  /// experts.
  void count(const std::vector<int64_t>& rows_of_rank, int64_t num_experts, int64_t row_bytes,
             PassHalf half) const;

 private:
  Communicator* group_;
};

}  // namespace shoal
