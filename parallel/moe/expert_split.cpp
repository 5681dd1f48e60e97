#include "parallel/moe/expert_split.h"

#include <numeric>

#include "core/ops/permute.h"
#include "parallel/collective_ops.h"

namespace shoal {

ExpertSplit::Gathered ExpertSplit::gather(const Tensor& x_RD,
                                          const std::vector<int64_t>& rows_per_expert) const {
  if (!is_split()) return {x_RD, rows_per_expert, {}, {}};
  const int64_t ranks = group_->size(), experts = std::ssize(rows_per_expert);
  const Tensor all = Tensor::empty({ranks * experts}, DType::i64);
  group_->all_gather(Tensor::from(rows_per_expert, {experts}), all).wait();
  Gathered g;
  g.order = order_arrivals(std::span(all.data<int64_t>(), static_cast<size_t>(all.numel())), ranks, experts,
                           x_RD.device());
  g.offsets.assign(static_cast<size_t>(ranks) + 1, 0);
  std::partial_sum(g.order.recv_rows.begin(), g.order.recv_rows.end(), g.offsets.begin() + 1);
  g.rows_per_expert = g.order.rows_per_expert;
  const Tensor rows = gather_sharded(x_RD, *group_, g.offsets);
  g.x_RD = g.order.identity ? rows : permute_rows(rows, g.order.index_R, g.order.inverse_R);
  return g;
}

Tensor ExpertSplit::scatter(const Tensor& partial_RD, const Gathered& gathered) const {
  if (!is_split()) return partial_RD;
  const ArrivalOrder& order = gathered.order;
  const Tensor rows = order.identity ? partial_RD : permute_rows(partial_RD, order.inverse_R, order.index_R);
  return reduce_scatter(rows, *group_, gathered.offsets);
}

void ExpertSplit::count(const std::vector<int64_t>& rows_of_rank, int64_t num_experts, int64_t row_bytes,
                        PassHalf half) const {
  if (!is_split()) return;
  std::vector<int64_t> offsets(rows_of_rank.size() + 1, 0);
  std::partial_sum(rows_of_rank.begin(), rows_of_rank.end(), offsets.begin() + 1);
  if (half == PassHalf::forward) group_->traffic().all_gather(num_experts * dtype_size(DType::i64));
  count_gather(*group_, offsets, row_bytes);  // of the rows, or of the gradient of the results
  count_sum(*group_, offsets, row_bytes);
}

}  // namespace shoal
