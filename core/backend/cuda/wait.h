// How the host waits for the device.
#pragma once

#include <cuda_runtime_api.h>

namespace shoal::cuda {

/// Until the work before the event is done. Meanwhile the thread's checks are called
/// (core/tensor/host_wait.h), which may throw; where there are none it sleeps in the driver.
void wait_for(cudaEvent_t event);

/// Until the work of all streams is done, in the same way. Where there are checks: of the default stream and
/// those that this thread made, since streams of ranks that are threads may wait for each other.
void wait_for_device();

}  // namespace shoal::cuda
