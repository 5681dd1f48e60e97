#include "core/backend/cuda/device_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/backend/cuda/error.h"
#include "core/backend/cuda/runtime.h"
#include "core/backend/cuda/wait.h"
#include "core/base/text.h"

namespace shoal::cuda {

namespace {

constexpr int64_t kAlignment = 512;
constexpr int64_t kSegmentUnit = int64_t{2} << 20;

cudaStream_t handle_of(const Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.handle);
}

Event event_on(const Stream& stream) {
  Event event;
  event.record(stream);
  return event;
}

/// Also false when the device has failed, which the caller's next call meets.
bool all_reached(const std::vector<Event>& events) {
  try {
    return std::all_of(events.begin(), events.end(), [](const Event& e) { return e.reached(); });
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

void* DeviceMemory::allocate(int64_t bytes) {
  const Stream stream = current_stream(Device{DeviceType::cuda, 0});
  Allocation made{stream, std::max<int64_t>(bytes, 1), memory_options().cache, {}};
  if (made.cached) made.bytes = round_up(made.bytes, kAlignment);
  void* data = made.cached ? take(stream, made.bytes) : allocate_plainly(stream, made.bytes);
  const std::lock_guard lock(mutex_);
  count(made.bytes);
  live_.emplace(data, std::move(made));
  return data;
}

void DeviceMemory::release(void* data) noexcept {
  Allocation gone;
  {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(data);
    if (found == live_.end()) return;
    gone = std::move(found->second);
    live_.erase(found);
    count(-gone.bytes);
    if (gone.cached && gone.others.empty()) {
      memory_of(gone.stream).pool.give_back(static_cast<char*>(data), gone.bytes);
      return;
    }
  }
  try {
    if (!gone.cached) return release_plainly(data, gone);
    Leaving leaving{data, gone, {}};
    for (const Stream& other : gone.others) leaving.used.push_back(event_on(other));
    const std::lock_guard lock(mutex_);
    leaving_.push_back(std::move(leaving));
  } catch (const Error&) {
    // The device has failed, often why tensors are released: as nobody can say when the other streams are
    // done with it, this memory is used by nobody any more.
  }
}

void DeviceMemory::used_on(void* data, const Stream& stream) {
  const std::lock_guard lock(mutex_);
  const auto found = live_.find(data);
  if (found == live_.end() || found->second.stream.handle == stream.handle) return;
  std::vector<Stream>& others = found->second.others;
  const bool known =
      std::any_of(others.begin(), others.end(), [&](const Stream& s) { return s.handle == stream.handle; });
  if (!known) others.push_back(stream);
}

void DeviceMemory::count_foreign(int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  count(bytes);
}
MemoryStats DeviceMemory::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}
void DeviceMemory::reset_peak() {
  const std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.current_bytes;
}

void DeviceMemory::count(int64_t bytes) {
  stats_.current_bytes += bytes;
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
}

DeviceMemory::StreamMemory& DeviceMemory::memory_of(const Stream& stream) {
  StreamMemory& memory = memories_[stream.handle];
  memory.stream = stream;
  return memory;
}

char* DeviceMemory::take_from_pool(const Stream& stream, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  return memory_of(stream).pool.take(bytes);
}

void* DeviceMemory::take(const Stream& stream, int64_t bytes) {
  settle();
  if (char* data = take_from_pool(stream, bytes)) return data;
  adopt_idle(stream);
  const int64_t least = round_up(bytes, kSegmentUnit);
  const int64_t wanted = std::max(least, round_up(memory_options().segment_bytes, kSegmentUnit));
  for (;;) {  // once, unless another thread takes from this stream's memory too
    if (char* data = take_from_pool(stream, bytes)) return data;
    int64_t obtained = wanted;
    char* segment = system_allocate(wanted);
    if (segment == nullptr) {
      flush();
      segment = system_allocate(obtained = least);
    }
    if (segment == nullptr) refuse(bytes);
    const std::lock_guard lock(mutex_);
    memory_of(stream).pool.add({segment, obtained, 0, 0});
  }
}

/// Null when the device has no more.
char* DeviceMemory::system_allocate(int64_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check_call(status, "cudaMalloc()");
  const std::lock_guard lock(mutex_);
  stats_.reserved_bytes += bytes;
  stats_.num_system_allocations++;
  return static_cast<char*>(data);
}

/// Memory that other streams used too, and no longer do, is free again.
void DeviceMemory::settle() {
  std::vector<Leaving> some;
  {
    const std::lock_guard lock(mutex_);
    some.swap(leaving_);
  }
  for (Leaving& leaving : some) {
    const bool free = all_reached(leaving.used);
    const std::lock_guard lock(mutex_);
    if (free) {
      const Allocation& gone = leaving.allocation;
      memory_of(gone.stream).pool.give_back(static_cast<char*>(leaving.data), gone.bytes);
    } else {
      leaving_.push_back(std::move(leaving));
    }
  }
}

/// Gives `stream` the unused segments of other streams whose work before a mark is done, and marks the
/// streams that have unused ones: the stream does not wait, it may get them next time.
void DeviceMemory::adopt_idle(const Stream& stream) {
  struct Other {
    Stream stream;
    Event mark;
    bool marked;
  };
  std::vector<Other> others;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, memory] : memories_) {
      if (handle != stream.handle && memory.pool.has_unused())
        others.push_back({memory.stream, memory.mark, memory.marked});
    }
  }
  for (const Other& other : others) {
    if (!other.marked) {
      mark(other.stream);
    } else if (other.mark.reached()) {
      const std::lock_guard lock(mutex_);
      StreamMemory& memory = memory_of(other.stream);
      if (!memory.marked) continue;  // another thread was faster
      memory.marked = false;
      for (const MemoryPool::Segment& s : memory.pool.take_unused(memory.releases_at_mark))
        memory_of(stream).pool.add(s);
    }
  }
}

/// What has been released before is idle when the mark is reached.
void DeviceMemory::mark(const Stream& stream) {
  uint64_t releases = 0;
  {
    const std::lock_guard lock(mutex_);
    releases = memory_of(stream).pool.num_releases();
  }
  const Event event = event_on(stream);
  const std::lock_guard lock(mutex_);
  StreamMemory& memory = memory_of(stream);
  if (memory.marked) return;
  memory.mark = event;
  memory.marked = true;
  memory.releases_at_mark = releases;
}

int64_t DeviceMemory::free_bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [handle, memory] : memories_) bytes += memory.pool.free_bytes();
  return bytes;
}

void DeviceMemory::flush() {
  // What is released from here on may still be in use.
  std::vector<std::pair<Stream, uint64_t>> before;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, memory] : memories_)
      before.emplace_back(memory.stream, memory.pool.num_releases());
  }
  wait_for_device();
  std::vector<MemoryPool::Segment> unused;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [stream, releases] : before) {
      for (const MemoryPool::Segment& s : memory_of(stream).pool.take_unused(releases)) unused.push_back(s);
    }
  }
  cudaError_t status = cudaSuccess;
  for (const MemoryPool::Segment& segment : unused) {
    const cudaError_t now = cudaFree(segment.data);  // tells of earlier errors too, and frees all the same
    if (status == cudaSuccess) status = now;
    const std::lock_guard lock(mutex_);
    stats_.reserved_bytes -= segment.bytes;
  }
  check_call(status, "cudaFree()");
}

void DeviceMemory::refuse(int64_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  SHOAL_CUDA_CALL(cudaMemGetInfo(&free_bytes, &total_bytes));
  const auto total = static_cast<int64_t>(total_bytes), free = static_cast<int64_t>(free_bytes);
  const MemoryStats now = stats();
  const auto text = [](int64_t some) { return human_bytes(std::max<int64_t>(some, 0)); };
  throw Error(str("cuda memory: cannot allocate ", text(bytes), ": of ", text(total), " on the device, ",
                  text(now.current_bytes), " are in tensors, ", text(now.reserved_bytes - now.current_bytes),
                  " in pieces too small, ", text(total - free - now.reserved_bytes),
                  " taken by others; use a smaller data.micro_batch, model.recompute, or more ranks"));
}

void* DeviceMemory::allocate_plainly(const Stream& stream, int64_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMallocAsync(&data, static_cast<size_t>(bytes), handle_of(stream));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    refuse(bytes);
  }
  check_call(status, "cudaMallocAsync()");
  const std::lock_guard lock(mutex_);
  stats_.num_system_allocations++;
  return data;
}

void DeviceMemory::release_plainly(void* data, const Allocation& gone) {
  Stream stream = gone.stream;
  if (!gone.others.empty()) {
    static const Stream freeing = make_stream(stream.device);  // waits for all of them
    event_on(stream).wait(freeing);
    for (const Stream& other : gone.others) event_on(other).wait(freeing);
    stream = freeing;
  }
  cudaFreeAsync(data, handle_of(stream));
}

}  // namespace shoal::cuda
