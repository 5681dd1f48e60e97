// run.deterministic: rank_invariant: which settings it excludes.
#pragma once

#include "launch/train_config.h"

namespace shoal {

/// Adds an error for each setting under which bits would depend on the layout. Nothing without the mode.
void check_rank_invariant(const TrainConfig& config, const ConfigNode& tree, ConfigErrors& errors);

}  // namespace shoal
