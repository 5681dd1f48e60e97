// Storage: a reference-counted block of device memory. The CPU blocks come from CpuArena, a caching allocator
// that never gives memory back while the program runs: a page fault costs more than most kernels.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/tensor/device_runtime.h"

namespace shoal {

class Storage {
 public:
  Storage(int64_t bytes, Device device)
      : data_(device_runtime(device.type).allocate(bytes)), bytes_(bytes), device_(device) {}
  /// Memory of the CPU that `owner` keeps for as long as it is needed here.
  Storage(void* data, int64_t bytes, std::shared_ptr<void> owner)
      : data_(data), bytes_(bytes), owner_(std::move(owner)) {
    device_runtime(device_.type).count_foreign(bytes_);
  }
  ~Storage() {
    if (owner_ != nullptr) {
      device_runtime(device_.type).count_foreign(-bytes_);
    } else if (data_ != nullptr) {
      device_runtime(device_.type).release(data_, bytes_);
    }
  }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  /// Null while it is released.
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  /// Gives the memory back; the values are lost. Not of memory with an owner.
  void release();
  /// Other memory, uninitialised, in the place of what was released.
  void allocate();
  Device device() const { return device_; }

 private:
  void* data_;
  int64_t bytes_;
  Device device_;
  std::shared_ptr<void> owner_;  // null: the device runtime
};

}  // namespace shoal
