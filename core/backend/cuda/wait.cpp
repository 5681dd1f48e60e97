#include "core/backend/cuda/wait.h"

#include <chrono>
#include <thread>

#include "core/backend/cuda/error.h"
#include "core/tensor/host_wait.h"

namespace shoal::cuda {

void wait_for(cudaEvent_t event) {
  if (!has_host_wait_checks()) {
    SHOAL_CUDA_CALL(cudaEventSynchronize(event));
    return;
  }
  constexpr int kEager = 1000;  // questions; then others may use the core
  constexpr std::chrono::microseconds kPause{20};
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t asked = 0;; asked++) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaSuccess) return;
    if (status != cudaErrorNotReady) check_call(status, "cudaEventQuery()");
    if (asked < kEager) continue;
    run_host_wait_checks(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace shoal::cuda
