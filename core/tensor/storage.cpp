// The CPU device runtime: best-fit free list over large segments, with neighbours merged on release.
// Segments are mapped with huge pages and stay mapped. Under sanitizers plain allocations are used instead,
// so that an overrun of one tensor is seen.
#include "core/tensor/storage.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <set>

#include "core/base/text.h"

namespace shoal {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kPlainAllocations = true;
#else
constexpr bool kPlainAllocations = false;
#endif

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kSegmentBytes = int64_t{64} << 20;

class CpuArena final : public DeviceRuntime {
 public:
  void* allocate(int64_t bytes) override {
    const int64_t size = round_up(std::max<int64_t>(bytes, 1), kAlignment);
    const std::lock_guard lock(mutex_);
    void* data = kPlainAllocations ? plain_allocate(size) : take(size);
    count(size);
    return data;
  }

  void release(void* data, int64_t bytes) noexcept override {
    const int64_t size = round_up(std::max<int64_t>(bytes, 1), kAlignment);
    const std::lock_guard lock(mutex_);
    count(-size);
    if (kPlainAllocations) {
      std::free(data);
    } else {
      give_back(static_cast<char*>(data), size);
    }
  }

  void set_zero(void* data, int64_t bytes) override { std::memset(data, 0, static_cast<size_t>(bytes)); }
  void copy(void* to, Device, const void* from, Device, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void synchronize() override {}

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
  void count(int64_t bytes) {
    stats_.current_bytes += bytes;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
  }

  void* plain_allocate(int64_t size) {
    void* data = std::aligned_alloc(kAlignment, static_cast<size_t>(size));
    SHOAL_CHECK(data != nullptr, "cpu memory: cannot allocate ", human_bytes(size));
    stats_.num_system_allocations++;
    return data;
  }

  void* take(int64_t size) {
    auto fit = by_size_.lower_bound({size, nullptr});
    if (fit == by_size_.end()) {
      map_segment(size);
      fit = by_size_.lower_bound({size, nullptr});
    }
    auto [free_size, data] = *fit;
    by_size_.erase(fit);
    by_address_.erase(data);
    if (free_size > size) add_free(data + size, free_size - size);
    return data;
  }

  void give_back(char* data, int64_t size) {
    // Merge with the free neighbours; segments are separate mappings and may touch, which is harmless here
    // because nothing is ever unmapped.
    auto next = by_address_.lower_bound(data);
    if (next != by_address_.end() && next->first == data + size) {
      size += next->second;
      by_size_.erase({next->second, next->first});
      next = by_address_.erase(next);
    }
    if (next != by_address_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == data) {
        data = previous->first;
        size += previous->second;
        by_size_.erase({previous->second, previous->first});
        by_address_.erase(previous);
      }
    }
    add_free(data, size);
  }

  void add_free(char* data, int64_t size) {
    by_address_[data] = size;
    by_size_.insert({size, data});
  }

  void map_segment(int64_t size) {
    const int64_t bytes = round_up(std::max(size, kSegmentBytes), kHugePage);
    // One huge page more than needed, so that the segment can start on a huge page boundary.
    void* raw = mmap(nullptr, static_cast<size_t>(bytes + kHugePage), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    SHOAL_CHECK(raw != MAP_FAILED, "cpu memory: cannot map ", human_bytes(bytes), " more (",
                human_bytes(stats_.reserved_bytes), " in use by this process); use a smaller model or batch");
    auto* data = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(raw), kHugePage));
    madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    stats_.reserved_bytes += bytes;
    stats_.num_system_allocations++;
    add_free(data, bytes);
  }

  mutable std::mutex mutex_;
  MemoryStats stats_;
  std::map<char*, int64_t> by_address_;
  std::set<std::pair<int64_t, char*>> by_size_;
};

DeviceRuntime*& runtime_slot(DeviceType type) {
  static DeviceRuntime* slots[kNumDeviceTypes] = {};
  return slots[static_cast<int>(type)];
}

}  // namespace

void Storage::release() {
  SHOAL_CHECK(owner_ == nullptr && data_ != nullptr, "Storage::release: expected memory of its own");
  device_runtime(device_.type).release(std::exchange(data_, nullptr), bytes_);
}

void Storage::allocate() {
  SHOAL_CHECK(data_ == nullptr, "Storage::allocate: there is memory already");
  data_ = device_runtime(device_.type).allocate(bytes_);
}

void* DeviceRuntime::allocate_host(int64_t bytes) {
  void* data =
      std::aligned_alloc(kAlignment, static_cast<size_t>(round_up(std::max<int64_t>(bytes, 1), kAlignment)));
  SHOAL_CHECK(data != nullptr, "cpu memory: cannot allocate ", human_bytes(bytes));
  return data;
}

void DeviceRuntime::release_host(void* data) noexcept {
  std::free(data);
}

DeviceRuntime& device_runtime(DeviceType type) {
  if (type == DeviceType::cpu) {
    // Leaked on purpose: tensors with static lifetime may be released after main.
    static auto* arena = new CpuArena;
    return *arena;
  }
  DeviceRuntime* runtime = runtime_slot(type);
  if (runtime == nullptr) {
    throw UsageError(
        str("device ", type,
            ": this program was built without it; use device: cpu, or build with -DSHOAL_CUDA=ON"));
  }
  return *runtime;
}

bool register_device_runtime(DeviceType type, DeviceRuntime* runtime) {
  runtime_slot(type) = runtime;
  return true;
}

}  // namespace shoal
