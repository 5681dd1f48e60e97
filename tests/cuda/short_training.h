// A short training on the stand-in device, for tests that disturb it.
#pragma once

#include "tests/cuda/support.h"
#include "tests/support/parity.h"

namespace shoal::testing {

/// Trains a small MoE model for two steps; `group` carries device tensors. Returns the loss of the second
/// one.
inline double short_training(const std::shared_ptr<Communicator>& group, ParityCase c) {
  c.device = kCuda;
  ParallelLayout layout;
  layout.dp = group->size();
  layout.ep = c.ep;
  layout.edp = group->size() / c.ep;
  const Mesh mesh(group, layout);
  TrainEngine engine(parity_engine(c), mesh);
  const ShardRange mine = shard_range(kParityBatch, mesh.coords()[Axis::dp]);
  double loss = 0;
  for (int64_t step = 0; step < 2; step++) {
    const std::vector<ModelBatch> batches = {parity_batch(step, mine.begin, mine.end, kCuda)};
    loss = engine.step(batches, 1e-3).loss;
  }
  return loss;
}

}  // namespace shoal::testing
