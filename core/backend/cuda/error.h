// What the CUDA run time reports, as Errors. Host code of the backend wraps each call that returns a
// cudaError_t: SHOAL_CUDA_CALL(cudaFree(data)).
#pragma once

#include <string>

#define SHOAL_CUDA_CALL(call) ::shoal::cuda::check_call(call, #call)

namespace shoal::cuda {

/// Throws Error unless `status`, a cudaError_t, is cudaSuccess. Kernels run later than they are launched, so
/// an error may belong to one of the latest of this thread, which are named.
void check_call(int status, const char* call);

/// Throws Error unless `status`, a cudaError_t, says that the kernel could be launched.
void check_launch(const char* kernel, int status);

/// The calling thread has put the kernel into a stream; the name is kept by pointer.
void note_kernel(const char* name);
/// The latest kernels of the calling thread, the last one first: "a, b, c"; "" when there were none.
std::string recent_kernels();

}  // namespace shoal::cuda
