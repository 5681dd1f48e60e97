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
#include "parallel/moe/balanced_routing.h"

namespace shoal {

/// Counts and permutations of one dispatch; combine and both backwards reuse it.
struct DispatchPlan;

struct Dispatched {
  Tensor x_RD;                           // rows sorted by local expert, then by source rank, then by token
  std::vector<int64_t> rows_per_expert;  // one per local expert; sums to R, which may be 0
  /// The rows of each local expert that came from each source rank, [e, sources]; empty: from this rank
  /// alone.
  std::vector<int64_t> rows_per_source;
  std::shared_ptr<const DispatchPlan> plan;
};

/// Rows that come and go in parts: those of some local experts at a time, so that a part is on its way while
/// the experts of another one work. Parts are used in turn: arrive(0), send_back(0), arrive(1), ...
/// Collective.
class DispatchedParts {
 public:
  virtual ~DispatchedParts() = default;
  virtual int64_t num_parts() const = 0;
  /// As Dispatcher::dispatch; rows_per_expert is 0 for the experts of other parts.
  virtual Dispatched arrive(int64_t part) = 0;
  virtual void send_back(int64_t part, const Tensor& y_RD) = 0;
  /// As Dispatcher::combine, when all parts have been sent back.
  virtual Tensor combine(const Tensor& weights_TK) = 0;
};

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  static constexpr int64_t kAsNeeded = -1;
  /// expert_ids_TK: i32 global expert of each choice, -1 = dropped (costs nothing). rows_each: of each expert
  /// for the tokens of this rank, with zeros in rows that no token needs: then the host need not know how
  /// many do, and does not wait for the device. Ranks may have different numbers. Or kAsNeeded. Collective
  /// over the ep group, whatever the counts. Work recorded before wait() overlaps with the exchange, in
  /// forward and in backward.
  virtual Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK,
                                       int64_t rows_each) = 0;
  Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK) {
    return dispatch(x_TD, expert_ids_TK, kAsNeeded);
  }
  /// y_TD[t] = sum over choices k, in order, of weights_TK[t, k] * (row of y that belongs to (t, k)).
  /// Collective.
  virtual Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                                  const std::shared_ptr<const DispatchPlan>& plan) = 0;
  /// Dispatch and combine in parts, where the dispatcher's options ask for that; null: they do not.
  virtual std::unique_ptr<DispatchedParts> dispatch_parts(const Tensor&, const Tensor& /*expert_ids_TK*/,
                                                          int64_t /*rows_each*/) {
    return nullptr;
  }
  /// Whether the results of a token are summed in the order of its choices, whatever the ranks of its
  /// experts.
  virtual bool sums_in_order_of_choices() const { return true; }
  /// Counts, in the traffic of its groups, what dispatch and combine of such rows send in one half of a pass.
  virtual void count(const RoutedRows& rows, PassHalf half) const = 0;
  /// How many parts dispatch_parts makes; 1 without.
  virtual int64_t num_parts() const { return 1; }
};

struct DispatcherContext {
  Communicator* group = nullptr;  // the ep group
  int64_t num_experts = 0;        // E, all ranks; rank r holds shard_range(E, {r, size})
};
/// Kinds: local (ep = 1), all_gather (simple; the reference), all_to_all (variable counts), hierarchical (two
/// levels; rows of an expert are sorted by the rank that they came through, then by node, then by token; with
/// several nodes `rows_per_source` are those of the ranks that they came through).
using DispatcherRegistry = Registry<Dispatcher, const DispatcherContext&>;

}  // namespace shoal
