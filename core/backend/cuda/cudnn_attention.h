// cuDNN's fused attention behind the kernels of bf16_attention.cu (library_attention.h), for bf16, with a
// causal mask or none, with or without ALiBi, and head sizes that are multiples of 8. A plan for each shape
// is made when the shape first comes and kept by the thread. What cuDNN does not take is left to our own
// kernels, with a line in the log; so are documents, and backwards whose engines want more memory than they
// may.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal::cuda {

struct CudnnLimits {
  /// Of one plan. Backward stores gradients of scores, so that its bits are the same each time.
  int64_t workspace_bytes = int64_t{2} << 30;
  size_t plans = 64;  // of a thread: a model has a few shapes, and making a plan takes up to seconds
};
/// For plans that are made from then on. Not to be changed while another thread makes some.
CudnnLimits& cudnn_limits();

}  // namespace shoal::cuda
