// Replica check: whether the ranks that hold the same piece of a tensor hold the same bits. Ranks that have
// drifted apart (a faulty device, a kernel that is not deterministic) train on without any other sign.
#pragma once

#include <string>
#include <vector>

#include "launch/checkpoint.h"

namespace shoal {

/// "" when all copies are equal; else the tensors that differ and which ranks hold which bits:
/// "model/head.weight: ranks 0, 2 hold 1b2f00aa, rank 1 holds 90c1e2d4". Ranks may pass different tensors;
/// those of the same name and piece are compared, by CRC-32C. Collective; every rank gets the same text.
std::string replica_problem(const std::vector<StateTensor>& state, Communicator& world);

}  // namespace shoal
