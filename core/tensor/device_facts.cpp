#include "core/tensor/device_facts.h"

#include <array>
#include <limits>

namespace shoal {

namespace {

constinit std::array<DeviceFacts (*)(), kNumDeviceTypes> registered{};

}  // namespace

DeviceFacts device_facts(DeviceType type) {
  const auto facts = registered[static_cast<size_t>(type)];
  return facts != nullptr ? facts() : DeviceFacts{1, std::numeric_limits<double>::infinity()};
}

bool register_device_facts(DeviceType type, DeviceFacts (*facts)()) {
  registered[static_cast<size_t>(type)] = facts;
  return true;
}

}  // namespace shoal
