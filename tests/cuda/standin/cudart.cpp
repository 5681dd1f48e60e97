// Compiled without -fsanitize=thread.
#include "tests/cuda/standin/cudart.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "core/base/error.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/queue.h"

namespace shoal::standin {

namespace {

// Per thread, as the current device is; tests plant failures for their own thread.
thread_local struct {
  const char* function = nullptr;
  cudaError_t error = cudaSuccess;
} planted;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
int device_count = 1;

/// The planted failure of `function`, else `status`; remembered for cudaGetLastError.
cudaError_t result(const char* function, cudaError_t status = cudaSuccess) {
  if (planted.function != nullptr && std::strcmp(planted.function, function) == 0) {
    planted.function = nullptr;
    status = planted.error;
  }
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error = status;
  return status;
}
bool fails(const char* function) {
  return planted.function != nullptr && std::strcmp(planted.function, function) == 0;
}

void check_host(const void* data, size_t bytes, const char* what) {
  SHOAL_CHECK(is_pinned(data, bytes), "stand-in of CUDA: cudaMemcpyAsync ", what, ' ', bytes,
              " bytes of pageable host memory; asynchronous copies need page-locked memory");
}

void check_copy(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool to_device = in_arena(to), from_device = in_arena(from);
  const bool right = kind == cudaMemcpyDefault ||
                     (kind == cudaMemcpyHostToDevice && to_device && !from_device) ||
                     (kind == cudaMemcpyDeviceToHost && !to_device && from_device) ||
                     (kind == cudaMemcpyDeviceToDevice && to_device && from_device) ||
                     (kind == cudaMemcpyHostToHost && !to_device && !from_device);
  SHOAL_CHECK(right, "stand-in of CUDA: cudaMemcpyAsync from ", from_device ? "device" : "host", " to ",
              to_device ? "device" : "host", " memory says another direction (", static_cast<int>(kind), ')');
  if (to_device) check_device_range(to, bytes, "target of cudaMemcpyAsync");
  if (from_device) check_device_range(from, bytes, "source of cudaMemcpyAsync");
  if (!to_device) check_host(to, bytes, "to");
  if (!from_device) check_host(from, bytes, "from");
}

Mark& mark_of(cudaEvent_t event) {
  SHOAL_CHECK(event != nullptr && event->mark != nullptr,
              "stand-in of CUDA: an event that was never recorded");
  return *event->mark;
}

}  // namespace

void fail_next(const char* function, int error) {
  planted = {function, static_cast<cudaError_t>(error)};
}

int& num_devices() {
  return device_count;
}

}  // namespace shoal::standin

using namespace shoal::standin;  // the functions below belong to the toolkit's header

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_devices();
  return result("cudaGetDeviceCount", *count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return result("cudaSetDevice", cudaErrorInvalidDevice);
  current_device = device;
  return result("cudaSetDevice");
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return result("cudaGetDevice");
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {  // of an H200
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 << 10;
      return cudaSuccess;
    default:
      return result("cudaDeviceGetAttribute", cudaErrorInvalidValue);
  }
}
cudaError_t cudaDeviceSynchronize() {
  host_wait_all();
  return result("cudaDeviceSynchronize");
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    default:
      return "another error";
  }
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaError";
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = static_cast<size_t>(device_capacity());
  *free_bytes = static_cast<size_t>(device_capacity() - device_bytes());
  return result("cudaMemGetInfo");
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = fails("cudaMalloc") ? nullptr : allocate_device(bytes);
  return result("cudaMalloc", *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* data) {
  host_wait_all();
  if (data != nullptr) free_device(data);
  return result("cudaFree");
}
cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  if (fails("cudaMallocAsync")) return result("cudaMallocAsync");
  *data = allocate_device(bytes);
  if (*data == nullptr) return result("cudaMallocAsync", cudaErrorMemoryAllocation);
  enqueue(stream, "cudaMallocAsync", [data = *data, bytes] { will_write(data, bytes); });
  return result("cudaMallocAsync");
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  enqueue(stream, "cudaFreeAsync", [data] { free_device(data); });
  return result("cudaFreeAsync");
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  *data = fails("cudaHostAlloc") ? nullptr : allocate_pinned(bytes);
  return result("cudaHostAlloc");
}
cudaError_t cudaFreeHost(void* data) {
  if (data != nullptr) free_pinned(data);
  return result("cudaFreeHost");
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  if (fails("cudaMemcpyAsync")) return result("cudaMemcpyAsync");
  if (bytes == 0) return result("cudaMemcpyAsync");
  check_copy(to, from, bytes, kind);
  enqueue(stream, "cudaMemcpyAsync", [=] { std::memmove(to, from, bytes); });
  return result("cudaMemcpyAsync");
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return result("cudaMemsetAsync");
  check_device_range(to, bytes, "target of cudaMemsetAsync");
  enqueue(stream, "cudaMemsetAsync", [=] { std::memset(to, value, bytes); });
  return result("cudaMemsetAsync");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  SHOAL_CHECK(flags == cudaStreamNonBlocking,
              "stand-in of CUDA: expected cudaStreamNonBlocking; others wait for the default stream");
  *stream = create_stream();
  return result("cudaStreamCreateWithFlags");
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  destroy_stream(stream);
  return result("cudaStreamDestroy");
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  host_wait(stream);
  return result("cudaStreamSynchronize");
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  mark_of(event);
  wait(stream, event->mark);
  return result("cudaStreamWaitEvent");
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return result("cudaEventCreateWithFlags");
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return result("cudaEventDestroy");
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->mark = record(stream);
  return result("cudaEventRecord");
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const bool reached = event->mark == nullptr || query(*event->mark);  // so the library says of new ones
  return result("cudaEventQuery", reached ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  host_wait(mark_of(event));
  return result("cudaEventSynchronize");
}

}  // extern "C"
