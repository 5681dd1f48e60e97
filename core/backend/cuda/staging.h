// Copies between ordinary host memory and the device, through page-locked buffers that are not used again
// before the device has read or the host has emptied them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

namespace shoal::cuda {

/// Host to device: returns when `from` has been read, which does not wait for the stream unless very much is
/// on its way already.
void copy_to_device(void* to, const void* from, int64_t bytes, cudaStream_t stream);
/// Bytes that are to be copied to the host.
struct ToHost {
  void* to;
  const void* from;
  int64_t bytes;
};
/// Device to host, one after the other: waits for the stream, once unless they are large. The only place
/// where values of the device reach the host, but for memory of DeviceRuntime::allocate_host.
void copy_to_host(std::initializer_list<ToHost> copies, cudaStream_t stream);

}  // namespace shoal::cuda
