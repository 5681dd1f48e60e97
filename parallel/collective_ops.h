// Collectives with gradients. They are named by what the consumer of the result does, because that decides
// the backward. All are collective in forward and, in reverse order, in backward; an empty tensor takes part
// like any other.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/tensor/tensor.h"
#include "parallel/communicator.h"

namespace shoal {

/// Identity / all-reduce sum: replicated x enters work that is split over the group.
Tensor copy_to(const Tensor& x, Communicator& group);
/// All-reduce sum / identity: partial sums become one replicated value.
Tensor reduce_from(const Tensor& x, Communicator& group);
/// All-gather of rows / own slice: every rank then does the same work. Rows per rank may differ.
Tensor gather_replicated(const Tensor& x, Communicator& group);
/// All-gather of rows / reduce-scatter: each rank then does different work. Rows per rank may differ.
Tensor gather_sharded(const Tensor& x, Communicator& group);
/// Reduce-scatter of rows / all-gather: partial sums become row shards. Rows must divide by the group size.
Tensor reduce_scatter(const Tensor& x, Communicator& group);

/// The same where everyone knows the first row of each rank and the total, size() + 1 entries: no rank asks
/// the others how many rows they have, and shards of reduce_scatter may differ.
Tensor gather_replicated(const Tensor& x, Communicator& group, std::vector<int64_t> offsets);
Tensor gather_sharded(const Tensor& x, Communicator& group, std::vector<int64_t> offsets);
Tensor reduce_scatter(const Tensor& x, Communicator& group, std::vector<int64_t> offsets);

/// Without gradients: the first row of each rank and the total, size() + 1 entries; and all ranks' rows,
/// given these offsets. Block.
std::vector<int64_t> gather_row_offsets(int64_t rows, Communicator& group);
Tensor gather_all_rows(const Tensor& x, Communicator& group, const std::vector<int64_t>& offsets);
/// Rows [offsets[rank], offsets[rank + 1]) of the sum over ranks. x may be overwritten. Blocks.
Tensor sum_rows_of_rank(const Tensor& x, Communicator& group, const std::vector<int64_t>& offsets);

// What gather_all_rows and sum_rows_of_rank would send, counted in the group's traffic.
void count_gather(Communicator& group, const std::vector<int64_t>& offsets, int64_t row_bytes);
void count_sum(Communicator& group, const std::vector<int64_t>& offsets, int64_t row_bytes);

/// An exchange of rows in flight. start and wait are two records on the tape: what is recorded between them
/// overlaps with the exchange in forward and in backward (wait.backward starts the reverse exchange,
/// start.backward finishes it).
class Exchange;
struct StartedExchange {
  Tensor handle;  // not to be read; carries the gradient
  std::shared_ptr<Exchange> exchange;
};
StartedExchange all_to_all_start(const Tensor& x, Communicator& group, std::vector<int64_t> send_rows,
                                 std::vector<int64_t> recv_rows);
Tensor all_to_all_wait(const StartedExchange& started);

}  // namespace shoal
