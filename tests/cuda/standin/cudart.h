// Stand-in of the CUDA run time (cudart.cpp): what tests can ask of it. The functions themselves have the
// prototypes of the toolkit's header. Wrong use throws Error with a clear text instead of returning a code;
// failures are planted with failures.h.
#pragma once

namespace shoal::standin {

/// cudaGetDeviceCount; 1 unless a test says otherwise. All devices share one memory.
int& num_devices();

}  // namespace shoal::standin
