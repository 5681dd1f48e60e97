#include "core/backend/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "core/backend/cuda/error.h"
#include "core/backend/cuda/fault_record.h"
#include "core/backend/cuda/memory_pool.h"
#include "core/backend/cuda/staging.h"
#include "core/backend/cuda/wait.h"
#include "core/base/text.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/stream.h"

namespace shoal::cuda {

namespace {

constexpr int64_t kAlignment = 512;
constexpr int64_t kSegmentUnit = int64_t{2} << 20;

std::atomic<int> chosen_device{0};

int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

Stream this_stream() {
  return current_stream(Device{DeviceType::cuda, 0});
}
cudaStream_t handle_of(const Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.handle);
}

Event event_on(const Stream& stream) {
  Event event;
  event.record(stream);
  return event;
}

/// Memory that a tensor has.
struct Allocation {
  Stream stream;  // that was current when it was made
  int64_t bytes = 0;
  bool cached = true;          // MemoryOptions::cache when it was made
  std::vector<Stream> others;  // that use it too
};

/// The memory of one stream, and how far the device was at some time.
struct StreamMemory {
  Stream stream;
  MemoryPool pool;
  Event mark;
  bool marked = false;
  uint64_t releases_at_mark = 0;
};

class CudaRuntime final : public DeviceRuntime {
 public:
  void select(int local_rank) override {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
      cudaGetLastError();
      throw UsageError(str("run.device: cuda, but this machine has no usable GPU (",
                           status == cudaSuccess ? "none was found" : cudaGetErrorString(status),
                           "); use device: cpu, or see whether nvidia-smi lists one"));
    }
    chosen_device = local_rank % count;
    use_device();
  }

  void* allocate(int64_t bytes) override {
    use_device();
    const Stream stream = this_stream();
    const std::lock_guard lock(mutex_);
    Allocation made{stream, round_up(std::max<int64_t>(bytes, 1), kAlignment), memory_options().cache, {}};
    void* data = nullptr;
    if (made.cached) {
      data = take(stream, made.bytes);
    } else {
      made.bytes = std::max<int64_t>(bytes, 1);
      data = allocate_plainly(stream, made.bytes);
    }
    count(made.bytes);
    live_.emplace(data, std::move(made));
    return data;
  }

  void release(void* data, int64_t) noexcept override {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(data);
    if (found == live_.end()) return;
    Allocation gone = std::move(found->second);
    live_.erase(found);
    count(-gone.bytes);
    if (!gone.cached) {
      release_plainly(data, gone);
    } else if (gone.others.empty()) {
      memory_of(gone.stream).pool.give_back(static_cast<char*>(data), gone.bytes);
    } else {
      Leaving leaving{data, gone, {}};
      for (const Stream& other : gone.others) leaving.used.push_back(event_on(other));
      leaving_.push_back(std::move(leaving));
    }
  }

  void used_on(void* data, const Stream& stream) override {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(data);
    if (found == live_.end() || found->second.stream.handle == stream.handle) return;
    std::vector<Stream>& others = found->second.others;
    const bool known =
        std::any_of(others.begin(), others.end(), [&](const Stream& s) { return s.handle == stream.handle; });
    if (!known) others.push_back(stream);
  }

  void set_zero(void* data, int64_t bytes) override {
    use_device();
    if (bytes > 0)
      SHOAL_CUDA_CALL(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), handle_of(this_stream())));
  }

  void copy(void* to, Device to_device, const void* from, Device from_device, int64_t bytes) override {
    if (bytes == 0) return;
    use_device();
    const cudaStream_t stream = handle_of(this_stream());
    const bool to_host = to_device.type == DeviceType::cpu, from_host = from_device.type == DeviceType::cpu;
    if (!to_host && !from_host) {
      SHOAL_CUDA_CALL(
          cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
    } else if (is_locked(to_host ? to : from, bytes)) {
      SHOAL_CUDA_CALL(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes),
                                      to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream));
    } else if (to_host) {
      int64_t fault = kNoFault;
      copy_to_host({{&fault, fault_record(from_device), sizeof fault}, {to, from, bytes}}, stream);
      throw_fault(from_device, fault);
    } else {
      copy_to_device(to, from, bytes, stream);
    }
  }

  void* allocate_host(int64_t bytes) override {
    use_device();
    void* data = nullptr;
    const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    SHOAL_CUDA_CALL(cudaHostAlloc(&data, size, cudaHostAllocDefault));
    const std::lock_guard lock(mutex_);
    locked_[static_cast<const char*>(data)] = static_cast<int64_t>(size);
    return data;
  }

  void release_host(void* data) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      locked_.erase(static_cast<const char*>(data));
    }
    cudaFreeHost(data);
  }

  void synchronize() override {
    use_device();
    wait_for_device();
    const Stream stream = this_stream();
    int64_t fault = kNoFault;
    copy_to_host({{&fault, fault_record(stream.device), sizeof fault}}, handle_of(stream));
    throw_fault(stream.device, fault);
  }

  void count_foreign(int64_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    count(bytes);
  }
  MemoryStats stats() const override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() override {
    const std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.current_bytes;
  }

 private:
  struct Leaving {
    void* data;
    Allocation allocation;
    std::vector<Event> used;
  };

  void count(int64_t bytes) {
    stats_.current_bytes += bytes;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
  }

  StreamMemory& memory_of(const Stream& stream) {
    StreamMemory& memory = memories_[stream.handle];
    memory.stream = stream;
    return memory;
  }

  bool is_locked(const void* data, int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    auto after = locked_.upper_bound(static_cast<const char*>(data));
    if (after == locked_.begin()) return false;
    --after;
    return static_cast<const char*>(data) + bytes <= after->first + after->second;
  }

  // All below: locked.

  void* take(const Stream& stream, int64_t bytes) {
    settle();
    MemoryPool& pool = memory_of(stream).pool;
    if (char* data = pool.take(bytes)) return data;
    adopt_idle(stream);
    if (char* data = pool.take(bytes)) return data;
    const int64_t wanted = round_up(std::max(bytes, memory_options().segment_bytes), kSegmentUnit);
    const int64_t least = round_up(bytes, kSegmentUnit);
    char* segment = nullptr;
    int64_t obtained = 0;
    for (const int64_t size : {wanted, least}) {
      if (segment == nullptr) segment = system_allocate(obtained = size);
    }
    if (segment == nullptr) {
      flush();
      segment = system_allocate(obtained = least);
    }
    if (segment == nullptr) refuse(bytes);
    pool.add({segment, obtained, 0, 0});
    return pool.take(bytes);
  }

  /// Null when the device has no more.
  char* system_allocate(int64_t bytes) {
    void* data = nullptr;
    const cudaError_t status = cudaMalloc(&data, static_cast<size_t>(bytes));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    check_call(status, "cudaMalloc()");
    stats_.reserved_bytes += bytes;
    stats_.num_system_allocations++;
    return static_cast<char*>(data);
  }

  /// Memory that other streams used too, and no longer do, is free again.
  void settle() {
    std::erase_if(leaving_, [&](const Leaving& l) {
      if (!std::all_of(l.used.begin(), l.used.end(), [](const Event& e) { return e.reached(); }))
        return false;
      memory_of(l.allocation.stream).pool.give_back(static_cast<char*>(l.data), l.allocation.bytes);
      return true;
    });
  }

  /// Gives `stream` the unused segments of other streams whose work before a mark is done, and marks the
  /// streams that have unused ones: the stream does not wait, it may get them next time.
  void adopt_idle(const Stream& stream) {
    for (auto& [handle, other] : memories_) {
      if (handle == stream.handle || !other.pool.has_unused()) continue;
      if (other.marked && other.mark.reached()) {
        other.marked = false;
        for (const MemoryPool::Segment& s : other.pool.take_unused(other.releases_at_mark))
          memory_of(stream).pool.add(s);
      }
      if (other.marked || !other.pool.has_unused()) continue;
      other.mark = event_on(other.stream);
      other.marked = true;
      other.releases_at_mark = other.pool.num_releases();
    }
  }

  /// Gives all unused segments back to the system, after all work.
  void flush() {
    SHOAL_CUDA_CALL(cudaDeviceSynchronize());
    settle();
    for (auto& [handle, memory] : memories_) {
      for (const MemoryPool::Segment& s : memory.pool.take_unused(memory.pool.num_releases())) {
        SHOAL_CUDA_CALL(cudaFree(s.data));
        stats_.reserved_bytes -= s.bytes;
      }
    }
  }

  [[noreturn]] void refuse(int64_t bytes) {
    size_t free_bytes = 0, total_bytes = 0;
    SHOAL_CUDA_CALL(cudaMemGetInfo(&free_bytes, &total_bytes));
    const auto total = static_cast<int64_t>(total_bytes), free = static_cast<int64_t>(free_bytes);
    const int64_t cut = stats_.reserved_bytes - stats_.current_bytes;
    throw Error(str("cuda memory: cannot allocate ", human_bytes(bytes), ": of ", human_bytes(total),
                    " on the device, ", human_bytes(stats_.current_bytes), " are in tensors, ",
                    human_bytes(std::max<int64_t>(cut, 0)), " in pieces too small, ",
                    human_bytes(std::max<int64_t>(total - free - stats_.reserved_bytes, 0)),
                    " taken by others; use a smaller data.micro_batch, model.recompute, or more ranks"));
  }

  void* allocate_plainly(const Stream& stream, int64_t bytes) {
    void* data = nullptr;
    const cudaError_t status = cudaMallocAsync(&data, static_cast<size_t>(bytes), handle_of(stream));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      refuse(bytes);
    }
    check_call(status, "cudaMallocAsync()");
    stats_.num_system_allocations++;
    return data;
  }

  void release_plainly(void* data, const Allocation& gone) {
    Stream stream = gone.stream;
    if (!gone.others.empty()) {  // a stream that waits for all of them
      if (!freeing_.handle) freeing_ = make_stream(stream.device);
      event_on(stream).wait(freeing_);
      for (const Stream& other : gone.others) event_on(other).wait(freeing_);
      stream = freeing_;
    }
    cudaFreeAsync(data, handle_of(stream));
  }

  mutable std::mutex mutex_;
  MemoryStats stats_;
  std::map<int64_t, StreamMemory> memories_;  // by handle of the stream
  std::unordered_map<void*, Allocation> live_;
  std::vector<Leaving> leaving_;
  std::map<const char*, int64_t> locked_;  // of allocate_host
  Stream freeing_{{DeviceType::cuda, 0}, 0};
};

[[maybe_unused]] const bool added = [] {
  static auto* runtime = new CudaRuntime;  // leaked: tensors with static lifetime are released late
  return register_device_runtime(DeviceType::cuda, runtime);
}();

}  // namespace

MemoryOptions& memory_options() {
  static MemoryOptions options = [] {
    MemoryOptions made;
    const char* cache = std::getenv("SHOAL_CUDA_CACHE");
    made.cache = cache == nullptr || std::strcmp(cache, "0") != 0;
    return made;
  }();
  return options;
}

void use_device() {
  static thread_local int mine = -1;
  const int device = chosen_device;
  if (mine == device) return;
  SHOAL_CUDA_CALL(cudaSetDevice(device));
  mine = device;
}

}  // namespace shoal::cuda
