#include "core/backend/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>

#include "core/backend/cuda/device_memory.h"
#include "core/backend/cuda/error.h"
#include "core/backend/cuda/fault_record.h"
#include "core/backend/cuda/staging.h"
#include "core/backend/cuda/wait.h"
#include "core/tensor/device_facts.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/stream.h"

namespace shoal::cuda {

namespace {

std::atomic<int> chosen_device{0};

Stream this_stream() {
  return current_stream(Device{DeviceType::cuda, 0});
}
cudaStream_t handle_of(const Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.handle);
}

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
    return memory_.allocate(bytes);
  }
  void release(void* data, int64_t) noexcept override { memory_.release(data); }
  void used_on(void* data, const Stream& stream) override { memory_.used_on(data, stream); }

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

  void count_foreign(int64_t bytes) noexcept override { memory_.count_foreign(bytes); }
  MemoryStats stats() const override { return memory_.stats(); }
  void reset_peak() override { memory_.reset_peak(); }
  void release_idle_memory() { memory_.flush(); }
  int64_t free_bytes() const { return memory_.free_bytes(); }

 private:
  bool is_locked(const void* data, int64_t bytes) const {
    const std::lock_guard lock(mutex_);
    auto after = locked_.upper_bound(static_cast<const char*>(data));
    if (after == locked_.begin()) return false;
    --after;
    return static_cast<const char*>(data) + bytes <= after->first + after->second;
  }

  DeviceMemory memory_;
  mutable std::mutex mutex_;
  std::map<const char*, int64_t> locked_;  // of allocate_host
};

CudaRuntime& runtime() {
  static auto* only = new CudaRuntime;  // leaked: tensors with static lifetime are released late
  return *only;
}

DeviceFacts facts() {
  use_device();
  DeviceFacts out;
  size_t free_bytes = 0, total_bytes = 0;
  SHOAL_CUDA_CALL(cudaGetDeviceCount(&out.devices));
  SHOAL_CUDA_CALL(cudaMemGetInfo(&free_bytes, &total_bytes));
  out.available_bytes = static_cast<double>(free_bytes) + static_cast<double>(runtime().free_bytes());
  return out;
}

[[maybe_unused]] const bool added[] = {register_device_runtime(DeviceType::cuda, &runtime()),
                                       register_device_facts(DeviceType::cuda, &facts)};

}  // namespace

MemoryOptions& memory_options() {
  static MemoryOptions options = [] {
    MemoryOptions made;
    const char* text = std::getenv("SHOAL_CUDA_CACHE");
    const std::string_view value = text == nullptr ? "" : text;
    if (!value.empty() && value != "0" && value != "1")
      throw UsageError(str("SHOAL_CUDA_CACHE: expected 0 or 1, got '", value, "'"));
    made.cache = value != "0";
    return made;
  }();
  return options;
}

void release_idle_memory() {
  runtime().release_idle_memory();
}

void use_device() {
  static thread_local int mine = -1;
  const int device = chosen_device;
  if (mine == device) return;
  SHOAL_CUDA_CALL(cudaSetDevice(device));
  mine = device;
}

}  // namespace shoal::cuda
