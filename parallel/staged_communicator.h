// StagedCommunicator: tensors of a device over a communicator of the host, which need not know of devices:
// copied to host memory, carried there, copied back. Several ranks may share one device. Tensors of the host
// pass through.
#pragma once

#include <functional>
#include <memory>

#include "parallel/communicator.h"

namespace shoal {

/// Starting a call on tensors of a device makes the host wait for the work in the caller's current stream so
/// far, because the copy goes to other ranks from there; several calls may be in flight. Waiting for a call
/// waits on the host, then puts the copy back into the then current stream. Results have the bits that `host`
/// gives. `wrap` makes the communicator of a group split off from the host's; without it they are staged too.
using WrapGroup = std::function<std::shared_ptr<Communicator>(std::shared_ptr<Communicator> host)>;
std::shared_ptr<Communicator> stage_device_tensors(std::shared_ptr<Communicator> host, WrapGroup wrap = {});

}  // namespace shoal
