// Which communicator carries the tensors of a device. Beside the staged one, which always works, a backend
// may add one of its own, and MPI may know the device.
#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace shoal {

/// The ranks of `host`, with calls on tensors of `device` as well as of the host: each goes where its tensors
/// are. For the cpu `host` itself; otherwise what the backend has added, `host` when it carries the device
/// itself, or else staged copies, with a warning that says why. The same on all ranks. Collective.
std::shared_ptr<Communicator> device_world(std::shared_ptr<Communicator> host, Device device);

/// Makes the communicator of a group whose tensors are on `device` of each rank; null when it cannot, which
/// *why then says, on every rank. Collective over `host`.
using DeviceGroupMaker = std::shared_ptr<Communicator> (*)(const std::shared_ptr<Communicator>& host,
                                                           Device device, std::string* why);
/// Called once by a backend, from a namespace-scope initialiser.
bool register_device_groups(DeviceType type, DeviceGroupMaker maker);

}  // namespace shoal
