// Which numbers of a run are not finite: what a user needs to find the cause of a NaN.
#pragma once

#include <string>
#include <vector>

#include "launch/engine.h"

namespace shoal {

/// "model/x on rank 1" for the first tensor, in the order of `state`, that is not finite on some rank; ""
/// when there is none. Integers are always finite. Collective; every rank gets the same text.
std::string first_not_finite(const std::vector<StateTensor>& state, Communicator& world);

/// Why the engine's last step made no update, in words: the ranks whose own loss is not finite, the first
/// weight that is not, and the first gradient in the order of backward (gradients are summed over ranks, so a
/// replicated one is the same on all of them). Collective; every rank gets the same text.
std::string where_not_finite(TrainEngine& engine, bool own_loss_finite);

}  // namespace shoal
