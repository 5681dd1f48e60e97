// Memory of the stand-in device: an arena that host code cannot touch while nothing of a stream runs, with a
// guard on both sides of each allocation, full of NaN (0xFF) until something is written and again when it is
// freed. And page-locked host memory, which asynchronous copies need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace shoal::standin {

/// While one exists the arena may be read and written, by every thread.
class DeviceAccess {
 public:
  explicit DeviceAccess(bool wanted = true);
  ~DeviceAccess();
  DeviceAccess(const DeviceAccess&) = delete;
  DeviceAccess& operator=(const DeviceAccess&) = delete;

 private:
  bool wanted_;
};

/// Bytes that the device has; 1 GiB unless a test says otherwise.
int64_t& device_capacity();
/// Bytes allocated now.
int64_t device_bytes();

/// Null when the device has not that much left. Filled with 0xFF.
void* allocate_device(size_t bytes);
/// Fills it with 0xFF and forbids it; memory that is used after that is found by ASan, TSan or its values.
/// Throws Error unless `data` was returned by allocate_device.
void free_device(void* data);
/// Throws Error, naming `what`, unless these bytes lie in one allocation.
void check_device_range(const void* data, size_t bytes, const char* what);
bool in_arena(const void* data);

void* allocate_pinned(size_t bytes);
void free_pinned(void* data);
bool is_pinned(const void* data, size_t bytes);

}  // namespace shoal::standin
