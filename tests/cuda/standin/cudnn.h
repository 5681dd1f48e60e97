// What tests ask of the stand-in of cuDNN (cudnn.cpp). Needs none of NVIDIA's headers.
#pragma once

#include <cstdint>
#include <string>

namespace shoal::standin {

struct CudnnCounts {
  int64_t plans = 0, executions = 0;
};
/// Of all threads since the last question.
CudnnCounts take_cudnn_counts();

/// The next call of `function` by any thread fails with `status` (a cudnnStatus_t).
void fail_next_cudnn_call(const std::string& function, int status);

}  // namespace shoal::standin
