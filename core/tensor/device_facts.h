// What the devices of this host have, for decisions before anything is allocated on them.
#pragma once

#include "core/tensor/types.h"

namespace shoal {

struct DeviceFacts {
  int devices = 1;  // of the type on this host, which its ranks take in turn (DeviceRuntime::select)
  /// Bytes that tensors of this process can still get on its device, other processes' use as it is now;
  /// infinity where the device does not tell.
  double available_bytes = 0;
};

/// Of a type that a backend has added; otherwise one device, which does not tell.
DeviceFacts device_facts(DeviceType type);
/// Called once by a backend, from a namespace-scope initialiser.
bool register_device_facts(DeviceType type, DeviceFacts (*facts)());

}  // namespace shoal
