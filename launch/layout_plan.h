// What one rank of a layout holds and sends, before there are any ranks: the engine's parts are built on an
// imagined mesh, without memory for parameters, and asked. `shoal layout` prints it; a test compares it with
// the counters of real runs. Collectives that the engine gains are counted in plan_rank() or in the part that
// makes them.
#pragma once

#include <cstdint>
#include <vector>

#include "launch/engine.h"

namespace shoal {

/// One rank, during one optimizer step.
struct RankPlan {
  int rank = 0;
  AxisCoords coords;
  int64_t num_params = 0;  // that it works with; those of others may be divided among replicas
  int64_t weight_bytes = 0, gradient_bytes = 0, optimizer_bytes = 0;
  /// Of the passes of all micro-batches, of the sums of gradients and the gather of weights, and of counts
  /// and losses.
  Traffic forward, backward, update, counts;
  Traffic total() const;
};

/// `layout.ranks_per_node` must be set; `options.model` and the layout must be legal. sizes: of each
/// micro-batch.
RankPlan plan_rank(const EngineOptions& options, const ParallelLayout& layout, int rank,
                   const PassSizes& sizes);

/// Layers [begin, end) of the stages of each pipeline rank.
std::vector<std::vector<StageLayers>> stages_of_ranks(const EngineOptions& options,
                                                      const ParallelLayout& layout);

}  // namespace shoal
