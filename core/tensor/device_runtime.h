// What a device must offer: memory, copies and fills. The CPU's is in storage.cpp; a backend adds its own by
// registering it. Storage and Tensor are the only callers.
#pragma once

#include <cstdint>

#include "core/tensor/types.h"

namespace shoal {

struct Stream;

/// The smallest multiple of `unit` that is n or more; n >= 0.
constexpr int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

struct MemoryStats {
  int64_t current_bytes = 0;           // in live storages
  int64_t peak_bytes = 0;              // largest current_bytes since reset_peak()
  int64_t reserved_bytes = 0;          // obtained from the system; never returned while running
  int64_t num_system_allocations = 0;  // requests to the system; constant in a steady training step
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// Chooses the device of this process, by its rank among those of its host; before the first allocation.
  /// Throws UsageError when the machine has none.
  virtual void select(int /*local_rank*/) {}
  /// Uninitialised memory, aligned to 64 bytes or more, for the calling thread's current stream. Thread-safe.
  /// Throws Error when memory is exhausted.
  virtual void* allocate(int64_t bytes) = 0;
  /// Memory may be used again as soon as the work that its stream has been given so far is done: the stream
  /// that was current when it was allocated. Whoever gives it to work of another stream says so to used_on
  /// before it is released.
  virtual void release(void* data, int64_t bytes) noexcept = 0;
  /// The memory, as allocate returned it, is used by the work given to `stream` so far and until release.
  virtual void used_on(void* /*data*/, const Stream& /*stream*/) {}
  virtual void set_zero(void* data, int64_t bytes) = 0;
  /// Copies within this device, or between it and host memory; ordered after earlier work on the stream. The
  /// host's side may be used again when this returns, unless it is of allocate_host: then the copy has only
  /// been put into the stream.
  virtual void copy(void* to, Device to_device, const void* from, Device from_device, int64_t bytes) = 0;
  /// Host memory that copies can use while the host goes on; aligned to 64 bytes or more. Thread-safe.
  virtual void* allocate_host(int64_t bytes);
  virtual void release_host(void* data) noexcept;
  /// Waits for all work of the device. Like copies to the host it throws Error when work failed.
  virtual void synchronize() = 0;
  /// Counts memory of this device that comes from elsewhere as in use; with a negative number no more.
  virtual void count_foreign(int64_t bytes) noexcept = 0;
  virtual MemoryStats stats() const = 0;
  virtual void reset_peak() = 0;
};

/// The runtime of a device type; throws Error when this build has none.
DeviceRuntime& device_runtime(DeviceType type);
/// Called once by a backend, from a namespace-scope initialiser.
bool register_device_runtime(DeviceType type, DeviceRuntime* runtime);

}  // namespace shoal
