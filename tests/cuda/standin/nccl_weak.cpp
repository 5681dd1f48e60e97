// What the stand-in of NCCL and its users ask of the stand-ins of streams and of CUDA's run time, for builds
// in which those do not have it: everything runs when it is put into a stream. Weak: the real stand-ins win.
#include <cuda_runtime_api.h>

#include "tests/cuda/standin/nccl_world.h"

#define SHOAL_WEAK __attribute__((weak))

namespace shoal::standin {

SHOAL_WEAK void run_until(cudaStream_t, uint64_t) {}
SHOAL_WEAK void will_read(const void*, size_t) {}
SHOAL_WEAK void will_write(void*, size_t) {}
SHOAL_WEAK void release(void*) {}
SHOAL_WEAK void acquire(void*) {}

}  // namespace shoal::standin

extern "C" {
SHOAL_WEAK cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
SHOAL_WEAK const char* cudaGetErrorString(cudaError_t) {
  return "an error of the stand-in";
}
SHOAL_WEAK cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new int);
  return cudaSuccess;
}
SHOAL_WEAK cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<int*>(event);
  return cudaSuccess;
}
SHOAL_WEAK cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
SHOAL_WEAK cudaError_t cudaEventQuery(cudaEvent_t) {
  return cudaSuccess;
}
}
