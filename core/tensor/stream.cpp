#include "core/tensor/stream.h"

#include <array>

namespace shoal {

namespace {

std::array<StreamRuntime*, kNumDeviceTypes>& runtimes() {
  static std::array<StreamRuntime*, kNumDeviceTypes> slots{};
  return slots;
}
StreamRuntime* runtime_of(Device device) {
  return runtimes()[static_cast<size_t>(device.type)];
}

thread_local std::array<Stream, kNumDeviceTypes> current_streams = {Stream{{DeviceType::cpu, 0}, 0},
                                                                    Stream{{DeviceType::cuda, 0}, 0}};

}  // namespace

bool register_stream_runtime(DeviceType type, StreamRuntime* runtime) {
  runtimes()[static_cast<size_t>(type)] = runtime;
  return true;
}

Stream make_stream(Device device) {
  StreamRuntime* runtime = runtime_of(device);
  return runtime ? runtime->create(device) : Stream{device, 0};
}

Stream current_stream(Device device) {
  return current_streams[static_cast<size_t>(device.type)];
}

StreamScope::StreamScope(const Stream& stream) : previous_(current_stream(stream.device)) {
  current_streams[static_cast<size_t>(stream.device.type)] = stream;
}

StreamScope::~StreamScope() {
  current_streams[static_cast<size_t>(previous_.device.type)] = previous_;
}

void Event::record(const Stream& stream) {
  device_ = stream.device;
  if (StreamRuntime* runtime = runtime_of(device_)) mark_ = runtime->record(stream);
}

void Event::wait(const Stream& stream) const {
  StreamRuntime* runtime = runtime_of(device_);
  if (runtime && mark_) runtime->wait(stream, mark_);
}

void Event::host_wait() const {
  StreamRuntime* runtime = runtime_of(device_);
  if (runtime && mark_) runtime->host_wait(mark_);
}

bool Event::reached() const {
  StreamRuntime* runtime = runtime_of(device_);
  return !runtime || !mark_ || runtime->reached(mark_);
}

}  // namespace shoal
