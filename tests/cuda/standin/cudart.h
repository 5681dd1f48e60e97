// Stand-in of the CUDA run time (cudart.cpp): what tests can ask of it. The functions themselves have the
// prototypes of the toolkit's header. Wrong use throws Error with a clear text instead of returning a code.
#pragma once

#include <cstdint>

namespace shoal::standin {

/// The next call of the function of that name ("cudaMemcpyAsync") returns this cudaError_t and does nothing
/// else.
void fail_next(const char* function, int error);

/// cudaGetDeviceCount; 1 unless a test says otherwise. All devices share one memory.
int& num_devices();

}  // namespace shoal::standin
