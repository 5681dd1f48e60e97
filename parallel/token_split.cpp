#include "parallel/token_split.h"

#include "core/ops/linear.h"
#include "core/ops/rows.h"
#include "parallel/collective_ops.h"

namespace shoal {

std::vector<int64_t> TokenSplit::offsets(int64_t num_tokens) const {
  std::vector<int64_t> all;
  for (int r = 0; r < group_.size(); r++) all.push_back(shard_range(num_tokens, {r, group_.size()}).begin);
  all.push_back(num_tokens);
  return all;
}

Tensor TokenSplit::gather(const Tensor& own_rows, int64_t num_tokens) const {
  return is_split() ? gather_sharded(own_rows, group_, offsets(num_tokens)) : own_rows;
}

Tensor TokenSplit::gather_replicated(const Tensor& own_rows, int64_t num_tokens) const {
  return is_split() ? shoal::gather_replicated(own_rows, group_, offsets(num_tokens)) : own_rows;
}

Tensor TokenSplit::scatter(const Tensor& partial) const {
  return is_split() ? reduce_scatter(partial, group_, offsets(partial.size(0))) : partial;
}

Tensor TokenSplit::linear_scatter(const Tensor& x, const Tensor& weight, const Tensor& bias) const {
  if (!is_split()) return linear(x, weight, bias);
  // After the sum, on own rows: every rank uses the bias at the same place of its tape, so that all reduce
  // its gradient in the same order.
  const Tensor rows = scatter(linear(x, weight));
  return bias.defined() ? add_row_bias(rows, bias) : rows;
}

void TokenSplit::count_gather(int64_t num_tokens, int64_t row_bytes, PassHalf half) const {
  if (!is_split()) return;
  if (half == PassHalf::forward) return shoal::count_gather(group_, offsets(num_tokens), row_bytes);
  count_sum(group_, offsets(num_tokens), row_bytes);
}

void TokenSplit::count_gather_replicated(int64_t num_tokens, int64_t row_bytes, PassHalf half) const {
  if (half == PassHalf::forward) count_gather(num_tokens, row_bytes, half);
}

void TokenSplit::count_scatter(int64_t num_tokens, int64_t row_bytes, PassHalf half) const {
  count_gather(num_tokens, row_bytes, half == PassHalf::forward ? PassHalf::backward : PassHalf::forward);
}

Tensor TokenSplit::own_rows(const Tensor& all_rows) const {
  if (!is_split()) return all_rows;
  const ShardRange mine = own(all_rows.size(0));
  return take_rows(all_rows, mine.begin, mine.end);
}

}  // namespace shoal
