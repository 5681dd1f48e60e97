// MpiCommunicator: the Communicator over MPI, for host memory, and for tensors of CUDA devices where MPI
// itself says that it knows CUDA. Made of nonblocking point-to-point messages only: any number of calls may
// be in flight and may be waited for in any order, every rank's sums run in rank order, and any size works
// because a message is cut into chunks. Used by one thread (MPI_THREAD_FUNNELED).
#pragma once

#include <cstdint>
#include <memory>

#include "parallel/communicator.h"

namespace shoal {

/// MPI_COMM_WORLD, duplicated. MPI must have been started (see bootstrap.h). Collective.
/// With SHOAL_CHECK_COLLECTIVES=1 in the environment every call is first compared between the ranks of its
/// group, so that a mismatch is an Error that names both calls instead of a hang; starting a call then waits
/// for all ranks.
std::shared_ptr<Communicator> make_mpi_world();

/// Whether this MPI sends from and receives into memory of CUDA devices.
bool mpi_knows_cuda();

/// Limits, equal on all ranks; tests lower them to reach the paths of large tensors with small ones.
struct MpiLimits {
  int64_t chunk_bytes = int64_t{1} << 30;          // one MPI message; counts are int, so < 2^31
  int64_t small_reduce_bytes = int64_t{32} << 10;  // size() * bytes up to which all_reduce gathers everything
  /// Calls on tensors of devices: the host waits for the device before each stage, then MPI reads and writes
  /// its memory.
  bool device_tensors = mpi_knows_cuda();
};
MpiLimits& mpi_limits();

}  // namespace shoal
