// SharedCommunicator: the Communicator of ranks on one host, over memory that they share. Groups that span
// hosts keep the communicator they were made with; their parts on one host share memory again.
#pragma once

#include <memory>

#include "parallel/communicator.h"

namespace shoal {

/// What SHOAL_COLLECTIVES asks for: auto (the default; shared memory within a host) or mpi (MPI everywhere).
/// Throws UsageError for anything else.
bool shared_collectives_wanted();

/// Collective. `world` carries out what cannot be done in shared memory: the setting up, splits, and all
/// calls of groups that span hosts. Where memory cannot be shared a warning says why, and everything goes
/// through `world`.
std::shared_ptr<Communicator> share_memory(std::shared_ptr<Communicator> world);

/// Whether this group's calls go through shared memory.
bool uses_shared_memory(const Communicator& group);

}  // namespace shoal
