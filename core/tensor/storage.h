// Storage: a reference-counted block of device memory. The CPU blocks come from CpuArena, a caching allocator
// that never gives memory back while the program runs: a page fault costs more than most kernels.
#pragma once

#include <cstdint>
#include <memory>

#include "core/tensor/device_runtime.h"

namespace shoal {

class Storage {
 public:
  Storage(int64_t bytes, Device device)
      : data_(device_runtime(device.type).allocate(bytes)), bytes_(bytes), device_(device) {}
  ~Storage() { device_runtime(device_.type).release(data_, bytes_); }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }

 private:
  void* data_;
  int64_t bytes_;
  Device device_;
};

}  // namespace shoal
