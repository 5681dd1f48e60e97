// Device memory, streams and copies of CUDA. Everything is used through core/tensor (DeviceRuntime, Stream);
// what is here is for tests and for other host code of the backend.
//
// Memory is cached per stream (memory_pool.h): what is released is used again at once by the same stream, and
// by another one when an event shows that the work before is done. Copies from and to ordinary host memory go
// through page-locked buffers (staging.h).
#pragma once

#include <cstdint>

namespace shoal::cuda {

struct MemoryOptions {
  /// false: every tensor is an allocation of its own (cudaMallocAsync), so that tools see accesses outside of
  /// it and after its end. SHOAL_CUDA_CACHE=0 in the environment.
  bool cache = true;
  int64_t segment_bytes = int64_t{32} << 20;  // the least asked of the device at once
};
/// For tensors made from then on. Not to be changed while another thread makes some.
MemoryOptions& memory_options();

/// Waits for all work and gives the memory that no tensor has back to the system.
void release_idle_memory();

/// Makes the device of this process the calling thread's. To be called by host code that calls the CUDA
/// libraries on a thread of its own; cheap.
void use_device();

}  // namespace shoal::cuda
