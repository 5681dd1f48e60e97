// The memory of the emulated device: host memory with a guard on both sides of each tensor, full of NaN
// (0xFF) until something is written. Under ASan a touch of a guard is reported at once; otherwise a changed
// guard is found after the launch or when the memory is released.
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "core/backend/cuda/fault.h"
#include "core/base/error.h"
#include "core/tensor/device_runtime.h"
#include "tests/cuda/emulator/fiber.h"
#include "tests/cuda/emulator/machine.h"

namespace shoal::emulator {

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kGuardsAreForbidden = true;
#else
constexpr bool kGuardsAreForbidden = false;
#endif
constexpr int64_t kGuardBytes = 64;
constexpr int kPoisonByte = 0xFF;

class EmulatedDevice final : public DeviceRuntime {
 public:
  void* allocate(int64_t bytes) override {
    const auto total = static_cast<size_t>((bytes + 3 * kGuardBytes - 1) / kGuardBytes * kGuardBytes);
    auto* guard = static_cast<char*>(std::aligned_alloc(kGuardBytes, total));
    SHOAL_CHECK(guard != nullptr, "emulated device: cannot allocate ", bytes, " bytes");
    std::memset(guard, kPoisonByte, total);
    char* data = guard + kGuardBytes;
    forbid(guard, kGuardBytes);
    forbid(data + bytes, total - static_cast<size_t>(kGuardBytes + bytes));
    const std::lock_guard lock(mutex_);
    live_[data] = bytes;
    stats_.current_bytes += bytes;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.current_bytes);
    stats_.num_system_allocations++;
    return data;
  }

  void release(void* pointer, int64_t bytes) noexcept override {
    auto* data = static_cast<char*>(pointer);
    {
      const std::lock_guard lock(mutex_);
      live_.erase(data);
      stats_.current_bytes -= bytes;
    }
    char* guard = data - kGuardBytes;
    allow(guard, static_cast<size_t>(bytes + 2 * kGuardBytes));
    std::free(guard);
  }

  void set_zero(void* data, int64_t bytes) override { std::memset(data, 0, static_cast<size_t>(bytes)); }
  void copy(void* to, Device, const void* from, Device, int64_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
  }
  void synchronize() override {
    constexpr Device kDevice{DeviceType::cuda, 0};
    cuda::throw_fault(kDevice, *cuda::fault_record(kDevice));
  }
  void count_foreign(int64_t) noexcept override {}
  MemoryStats stats() const override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() override {
    const std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.current_bytes;
  }

  /// What is wrong with the guards, or "".
  std::string overrun() const {
    if (kGuardsAreForbidden) return "";
    const std::lock_guard lock(mutex_);
    for (const auto& [data, bytes] : live_) {
      const bool before = !is_poison(data - kGuardBytes), after = !is_poison(data + bytes);
      if (before || after) {
        return str("device memory was written ", before ? "before" : "after", " a tensor of ", bytes,
                   " bytes");
      }
    }
    return "";
  }

 private:
  static bool is_poison(const char* guard) {
    for (int64_t i = 0; i < kGuardBytes; i++) {
      if (static_cast<unsigned char>(guard[i]) != kPoisonByte) return false;
    }
    return true;
  }

  mutable std::mutex mutex_;
  std::map<char*, int64_t> live_;
  MemoryStats stats_;
};

EmulatedDevice& device() {
  static auto* only = new EmulatedDevice;  // leaked: tensors with static lifetime are released late
  return *only;
}

[[maybe_unused]] const bool added = [] {
  set_memory_check([] { return device().overrun(); });
  return register_device_runtime(DeviceType::cuda, &device());
}();

}  // namespace

}  // namespace shoal::emulator
