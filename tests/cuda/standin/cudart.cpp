// Compiled without -fsanitize=thread.
#include "tests/cuda/standin/cudart.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "core/base/error.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/queue.h"

namespace shoal::standin {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_device = 0;
int device_count = 1;

/// The planted failure of `function`, else what body() returns; remembered for cudaGetLastError.
template <class F>
cudaError_t call(const char* function, const F& body) {
  auto status = static_cast<cudaError_t>(planted_failure(function));
  if (status == cudaSuccess) status = body();
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error = status;
  return status;
}
/// The same for what returns nothing.
template <class F>
cudaError_t done(const char* function, const F& body) {
  return call(function, [&] {
    body();
    return cudaSuccess;
  });
}
/// The same for what gives something back, which happens in any case.
template <class F>
cudaError_t ended(const char* function, const F& body) {
  body();
  return done(function, [] {});
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

int& num_devices() {
  return device_count;
}

}  // namespace shoal::standin

using namespace shoal::standin;  // the functions below belong to the toolkit's header

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  return call("cudaGetDeviceCount", [&] {
    *count = num_devices();
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}
cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", [&] {
    if (device < 0 || device >= num_devices()) return cudaErrorInvalidDevice;
    current_device = device;
    return cudaSuccess;
  });
}
cudaError_t cudaGetDevice(int* device) {
  return done("cudaGetDevice", [&] { *device = current_device; });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return call("cudaDeviceGetAttribute", [&] {
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
        return cudaErrorInvalidValue;
    }
  });
}
cudaError_t cudaDeviceSynchronize() {
  return done("cudaDeviceSynchronize", [] { host_wait_all(); });
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
    case cudaErrorInvalidValue:
      return "invalid argument";
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
  return done("cudaMemGetInfo", [&] {
    *total_bytes = static_cast<size_t>(device_capacity());
    *free_bytes = static_cast<size_t>(device_capacity() - device_bytes());
  });
}
cudaError_t cudaMalloc(void** data, size_t bytes) {
  return call("cudaMalloc", [&] {
    *data = allocate_device(bytes);
    return *data != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
  });
}
cudaError_t cudaFree(void* data) {
  return ended("cudaFree", [&] {
    host_wait_all();
    if (data != nullptr) free_device(data);
  });
}
cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  return call("cudaMallocAsync", [&] {
    *data = allocate_device(bytes);
    if (*data == nullptr) return cudaErrorMemoryAllocation;
    enqueue(stream, "cudaMallocAsync", [data = *data, bytes] { will_write(data, bytes); });
    return cudaSuccess;
  });
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  return ended("cudaFreeAsync", [&] { enqueue(stream, "cudaFreeAsync", [data] { free_device(data); }); });
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  return done("cudaHostAlloc", [&] { *data = allocate_pinned(bytes); });
}
cudaError_t cudaFreeHost(void* data) {
  return ended("cudaFreeHost", [&] {
    if (data != nullptr) free_pinned(data);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return done("cudaMemcpyAsync", [&] {
    if (bytes == 0) return;
    check_copy(to, from, bytes, kind);
    enqueue(stream, "cudaMemcpyAsync", [=] { std::memmove(to, from, bytes); });
  });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return done("cudaMemsetAsync", [&] {
    if (bytes == 0) return;
    check_device_range(to, bytes, "target of cudaMemsetAsync");
    enqueue(stream, "cudaMemsetAsync", [=] { std::memset(to, value, bytes); });
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return done("cudaStreamCreateWithFlags", [&] {
    SHOAL_CHECK(flags == cudaStreamNonBlocking,
                "stand-in of CUDA: expected cudaStreamNonBlocking; others wait for the default stream");
    *stream = create_stream();
  });
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return ended("cudaStreamDestroy", [&] { destroy_stream(stream); });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  // Whatever it tells: nothing runs on a device that has failed.
  return ended("cudaStreamSynchronize", [&] { host_wait(stream); });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return done("cudaStreamWaitEvent", [&] {
    mark_of(event);
    wait(stream, event->mark);
  });
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return done("cudaEventCreateWithFlags", [&] { *event = new CUevent_st; });
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return ended("cudaEventDestroy", [&] { delete event; });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return done("cudaEventRecord", [&] { event->mark = record(stream); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", [&] {
    const bool reached = event->mark == nullptr || query(*event->mark);  // so the library says of new ones
    return reached ? cudaSuccess : cudaErrorNotReady;
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return done("cudaEventSynchronize", [&] { host_wait(mark_of(event)); });
}

}  // extern "C"
