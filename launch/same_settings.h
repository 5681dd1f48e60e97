// Ranks that were started with different settings would train replicas that part silently.
#pragma once

#include "launch/train_config.h"
#include "parallel/communicator.h"

namespace shoal {

/// Throws UsageError on every rank when the settings (run.threads excepted) or the kernels' instruction sets
/// of two ranks differ; it names the first differing key of each such rank. Collective; blocks.
void require_same_settings(const TrainConfig& config, Communicator& world);

}  // namespace shoal
