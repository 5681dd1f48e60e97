// Process start and end: which rank this is, the world communicator, and what happens when a rank fails.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace shoal {

struct LaunchInfo {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  bool mpi = false;                    // started by mpirun or srun
};
/// From the launcher's environment, without starting MPI.
LaunchInfo launch_info();

/// Runs body(world) and returns the process' exit code (an ExitCode value). Under mpirun/srun the world is
/// MPI (started here, MPI_THREAD_FUNNELED; ranks yield while waiting when there are more ranks than cores on
/// this host), otherwise a group of one without MPI. An exception is printed as "[rank N] error: ..." and
/// ends every rank of the job (MPI_Abort) with the error's exit code; ranks that fail with the same message
/// print it once ("[ranks 1, 3] error: ...", or "error: ..." for all of them), and when all ranks fail with
/// no call in flight they leave without an abort. SHOAL_COLLECTIVES, SHOAL_CHECK_COLLECTIVES and
/// SHOAL_COLLECTIVE_TIMEOUT are read first; a value that is none, or one of the former two that differs
/// between ranks, is a usage error of the job.
int run_world(const std::function<int(const std::shared_ptr<Communicator>& world)>& body);

/// "Open MPI 4.1.4" for `shoal --version`.
std::string mpi_library_version();

}  // namespace shoal
