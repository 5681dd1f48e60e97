// TokenSplit: how the tokens of a micro-batch lie on the ranks of a tensor parallel group. Between layers
// each rank holds some rows (sequence parallelism, arXiv:2205.05198): norms, residuals, routers' inputs and
// dispatches work on these. Layers whose weights are cut gather all rows and sum their partial results back
// into rows. Without tensor parallelism every function returns its argument. These tokens are those of a rank
// of the context parallel group, which shares the sequences (parallel/context_split.h).
#pragma once

#include <cstdint>
#include <vector>

#include "core/nn/placement.h"
#include "core/tensor/tensor.h"
#include "parallel/communicator.h"
#include "parallel/context_split.h"

namespace shoal {

class TokenSplit {
 public:
  /// The groups must outlive this.
  TokenSplit(Communicator& group, const ContextSplit& context) : group_(group), context_(context) {}

  bool is_split() const { return group_.size() > 1; }
  Communicator& group() const { return group_; }
  const ContextSplit& context() const { return context_; }
  AxisCoord coord() const { return {group_.rank(), group_.size()}; }
  /// The rows that this rank holds of `num_tokens`: consecutive, sizes differ by at most one.
  ShardRange own(int64_t num_tokens) const { return shard_range(num_tokens, coord()); }

  // Each is recorded on the tape; all but own_rows are collective.
  /// All rows, for work of which each rank does another part; gradients are summed.
  Tensor gather(const Tensor& own_rows, int64_t num_tokens) const;
  /// All rows, for work that every rank does alike.
  Tensor gather_replicated(const Tensor& own_rows, int64_t num_tokens) const;
  /// This rank's rows of the sum over ranks.
  Tensor scatter(const Tensor& partial) const;
  /// This rank's rows of x W^T summed over ranks, plus a bias (or undefined).
  Tensor linear_scatter(const Tensor& x, const Tensor& weight, const Tensor& bias) const;
  /// This rank's rows of something that all ranks have; the others take no gradient.
  Tensor own_rows(const Tensor& all_rows) const;

  // What gather, gather_replicated and scatter of rows of that size send in one half of a pass.
  void count_gather(int64_t num_tokens, int64_t row_bytes, PassHalf half) const;
  void count_gather_replicated(int64_t num_tokens, int64_t row_bytes, PassHalf half) const;
  void count_scatter(int64_t num_tokens, int64_t row_bytes, PassHalf half) const;

 private:
  std::vector<int64_t> offsets(int64_t num_tokens) const;
  Communicator& group_;
  ContextSplit context_;
};

}  // namespace shoal
