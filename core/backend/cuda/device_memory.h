// DeviceMemory: the memory of tensors. What is released is used again at once by the stream that it was made
// for, and by another one when an event shows that the work before is done. Used by runtime.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/backend/cuda/memory_pool.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/stream.h"

namespace shoal::cuda {

/// Thread-safe. Holds no lock while it calls CUDA: a wait for one stream must not keep threads that feed
/// another one, which that may wait for, from going on.
class DeviceMemory {
 public:
  /// For the calling thread's current stream. Throws Error, which says what is used and what to do, when the
  /// device has no more even after everything that is kept was given back.
  void* allocate(int64_t bytes);
  void release(void* data) noexcept;
  void used_on(void* data, const Stream& stream);
  void count_foreign(int64_t bytes) noexcept;
  MemoryStats stats() const;
  /// Of what was obtained from the system, free now.
  int64_t free_bytes() const;
  void reset_peak();
  /// Gives all segments that no tensor uses back to the system, after all work.
  void flush();

 private:
  /// Memory that a tensor has.
  struct Allocation {
    Stream stream;  // that was current when it was made
    int64_t bytes = 0;
    bool cached = true;          // MemoryOptions::cache when it was made
    std::vector<Stream> others;  // that use it too
  };
  /// Memory that is free when other streams have reached these events.
  struct Leaving {
    void* data;
    Allocation allocation;
    std::vector<Event> used;
  };
  /// What one stream has, and how far it was at some time.
  struct StreamMemory {
    Stream stream;
    MemoryPool pool;
    Event mark;
    bool marked = false;
    uint64_t releases_at_mark = 0;
  };

  void* take(const Stream& stream, int64_t bytes);
  char* take_from_pool(const Stream& stream, int64_t bytes);
  char* system_allocate(int64_t bytes);
  void settle();
  void adopt_idle(const Stream& stream);
  void mark(const Stream& stream);
  [[noreturn]] void refuse(int64_t bytes);
  void* allocate_plainly(const Stream& stream, int64_t bytes);
  void release_plainly(void* data, const Allocation& gone);
  // Locked:
  void count(int64_t bytes);
  StreamMemory& memory_of(const Stream& stream);

  mutable std::mutex mutex_;
  MemoryStats stats_;
  std::map<int64_t, StreamMemory> memories_;  // by handle of the stream
  std::unordered_map<void*, Allocation> live_;
  std::vector<Leaving> leaving_;
};

}  // namespace shoal::cuda
