// Dispatcher: brings token rows to the ranks that hold their experts and back. combine is the transpose of
// dispatch: each is the other's backward. Knows experts; knows nothing of scores.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/autograd/pending.h"
#include "core/base/registry.h"
#include "core/tensor/tensor.h"
#include "parallel/communicator.h"

namespace shoal {

/// Counts and permutations of one dispatch; combine and both backwards reuse it.
struct DispatchPlan;

struct Dispatched {
  Tensor x_RD;                           // rows sorted by local expert, then by source rank, then by token
  std::vector<int64_t> rows_per_expert;  // one per local expert; sums to R, which may be 0
  std::shared_ptr<const DispatchPlan> plan;
};

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  /// expert_ids_TK: i32 global expert of each choice, -1 = dropped (costs nothing). Collective over the ep
  /// group, whatever the counts. Work recorded before wait() overlaps with the exchange, in forward and in
  /// backward.
  virtual Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK) = 0;
  /// y_TD[t] = sum over choices k, in order, of weights_TK[t, k] * (row of y that belongs to (t, k)).
  /// Collective.
  virtual Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                                  const std::shared_ptr<const DispatchPlan>& plan) = 0;
};

struct DispatcherContext {
  Communicator* group = nullptr;  // the ep group
  int64_t num_experts = 0;        // E, all ranks; rank r holds shard_range(E, {r, size})
};
/// Kinds: local (ep = 1), all_gather (simple; the reference), all_to_all (variable counts).
using DispatcherRegistry = Registry<Dispatcher, const DispatcherContext&>;

}  // namespace shoal
