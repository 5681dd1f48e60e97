// Failures of the stand-ins' functions, planted by tests for their own thread: ranks may be threads. The run
// time returns the planted cudaError_t; cublasLt says CUBLAS_STATUS_EXECUTION_FAILED and NCCL "unhandled cuda
// error", as they do when CUDA fails under them. A function that fails does nothing else, but for those that
// give something back or end something: they do that first.
#pragma once

#include <cstdint>

namespace shoal::standin {

/// The next call of the function of that name ("cudaMemcpyAsync") returns this cudaError_t.
void fail_next(const char* function, int error);

/// This thread's call number `number` from now on (from 0, of any function) fails; every later one too if it
/// `stays`, as after an illegal access. Questions that are asked until the answer is another one have no
/// number, because their count depends on time.
void fail_call(uint64_t number, int error, bool stays);
/// Nothing fails any more; counts from 0 again.
void fail_nothing();
/// Calls of this thread since fail_call or fail_nothing, and the first of them that failed; null: none.
uint64_t num_library_calls();
const char* failed_function();

/// For the stand-ins: what the call of `function` that begins here has to return; 0: nothing is planted.
int planted_failure(const char* function);

}  // namespace shoal::standin
