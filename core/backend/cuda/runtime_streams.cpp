// Streams and events of CUDA. Streams live as long as the program, since memory may belong to them; none of
// them waits for the default stream. Events are used again.
#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

#include "core/backend/cuda/error.h"
#include "core/backend/cuda/runtime.h"
#include "core/backend/cuda/wait.h"
#include "core/tensor/host_wait.h"
#include "core/tensor/stream.h"

namespace shoal::cuda {

namespace {

cudaStream_t handle_of(const Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.handle);
}
cudaEvent_t event_of(const std::shared_ptr<void>& mark) {
  return static_cast<cudaEvent_t>(mark.get());
}

class Events {
 public:
  std::shared_ptr<void> take() {
    cudaEvent_t event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        event = idle_.back();
        idle_.pop_back();
      }
    }
    if (event == nullptr) SHOAL_CUDA_CALL(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return {static_cast<void*>(event), [this](void* used) {
              const std::lock_guard lock(mutex_);
              idle_.push_back(static_cast<cudaEvent_t>(used));
            }};
  }

 private:
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

/// The default stream, and those that the calling thread has made.
std::vector<Stream>& own_streams() {
  static thread_local std::vector<Stream> mine{Stream{{DeviceType::cuda, 0}, 0}};
  return mine;
}

class CudaStreams final : public StreamRuntime {
 public:
  Stream create(Device device) override {
    use_device();
    cudaStream_t stream = nullptr;
    SHOAL_CUDA_CALL(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const Stream made{device, reinterpret_cast<int64_t>(stream)};
    own_streams().push_back(made);
    return made;
  }
  std::shared_ptr<void> record(const Stream& stream) override {
    use_device();
    std::shared_ptr<void> mark = events_.take();
    SHOAL_CUDA_CALL(cudaEventRecord(event_of(mark), handle_of(stream)));
    return mark;
  }
  void wait(const Stream& stream, const std::shared_ptr<void>& mark) override {
    use_device();
    SHOAL_CUDA_CALL(cudaStreamWaitEvent(handle_of(stream), event_of(mark), 0));
  }
  void host_wait(const std::shared_ptr<void>& mark) override { wait_for(event_of(mark)); }
  bool reached(const std::shared_ptr<void>& mark) override {
    const cudaError_t status = cudaEventQuery(event_of(mark));
    if (status == cudaErrorNotReady) return false;
    check_call(status, "cudaEventQuery()");
    return true;
  }

 private:
  Events events_;
};

CudaStreams& streams() {
  static auto* only = new CudaStreams;  // leaked, as what belongs to them
  return *only;
}

[[maybe_unused]] const bool added = register_stream_runtime(DeviceType::cuda, &streams());

}  // namespace

void wait_for_device() {
  if (!has_host_wait_checks()) {
    SHOAL_CUDA_CALL(cudaDeviceSynchronize());
    return;
  }
  for (const Stream& stream : own_streams()) streams().host_wait(streams().record(stream));
}

}  // namespace shoal::cuda
