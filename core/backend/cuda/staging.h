// Copies between ordinary host memory and the device, through page-locked buffers that are not used again
// before the device has read or the host has emptied them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace shoal::cuda {

/// Host to device: returns when `from` has been read, which does not wait for the stream unless very much is
/// on its way already.
void copy_to_device(void* to, const void* from, int64_t bytes, cudaStream_t stream);
/// Device to host: waits for the stream. The only place where a tensor's values reach the host.
void copy_to_host(void* to, const void* from, int64_t bytes, cudaStream_t stream);

}  // namespace shoal::cuda
