// The world of the running MPI test binary, and the probes that bootstrap_test starts it with.
#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace shoal::testing {

const std::shared_ptr<Communicator>& mpi_world();

/// The same ranks over each transport, whatever SHOAL_COLLECTIVES says.
struct Transport {
  const char* name;
  std::shared_ptr<Communicator> world;
};
const Transport& transport(const std::string& name);  // "mpi" or "shared"

/// Instead of the tests: misbehave in the way `probe` names. Returns the exit code of the body.
int run_probe(const std::string& probe, const std::shared_ptr<Communicator>& world);

}  // namespace shoal::testing
