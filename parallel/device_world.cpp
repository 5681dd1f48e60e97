#include "parallel/device_world.h"

#include <array>
#include <atomic>
#include <utility>

#include "core/base/log.h"
#include "parallel/staged_communicator.h"

namespace shoal {

namespace {

std::array<DeviceGroupMaker, kNumDeviceTypes>& makers() {
  static std::array<DeviceGroupMaker, kNumDeviceTypes> makers{};
  return makers;
}

}  // namespace

bool register_device_groups(DeviceType type, DeviceGroupMaker maker) {
  makers()[static_cast<size_t>(type)] = maker;
  return true;
}

std::shared_ptr<Communicator> device_world(std::shared_ptr<Communicator> host, Device device) {
  if (device.type == DeviceType::cpu || host->size() == 1) return host;
  std::string why = str("this build has no communicator for ", device.type);
  if (const DeviceGroupMaker make = makers()[static_cast<size_t>(device.type)]) {
    if (std::shared_ptr<Communicator> group = make(host, device, &why)) return group;
  }
  if (host->all_true(host->carries(device))) return host;
  static std::atomic<bool> warned = false;
  if (host->rank() == 0 && !warned.exchange(true)) {
    log::warn("tensors of ", device.type, " travel over copies in host memory [", host->name(), "]: ", why,
              ", and MPI does not carry them itself");
  }
  // The ranks of a part may have a device each where all ranks together do not.
  return stage_device_tensors(std::move(host), [device](std::shared_ptr<Communicator> part) {
    return device_world(std::move(part), device);
  });
}

}  // namespace shoal
