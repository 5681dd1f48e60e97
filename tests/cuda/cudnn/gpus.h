// GPUs that are not there, as cuDNN takes them: their properties as text, so that graphs can be checked, and
// kernels be generated.
#pragma once

#include <string>

#include "core/backend/cuda/cudnn_graph.h"

namespace shoal::testing {

/// What cuDNN is told of a GPU; what it does not need to choose an engine is the same for all.
struct GpuProperties {
  const char* name;
  int version;  // 900: sm_90
  int multiprocessors;
  int shared_bytes;  // of a block, at most
};
inline constexpr GpuProperties kA100{"NVIDIA A100-SXM4-80GB", 800, 108, 166912};
inline constexpr GpuProperties kH200{"NVIDIA H200", 900, 132, 232448};
inline constexpr GpuProperties kB200{"NVIDIA B200", 1000, 148, 232448};

cuda::CudnnObject described(const GpuProperties& gpu);

struct EngineCounts {
  int64_t all = 0, deterministic = 0;
};
/// How many engines take the graph on that GPU. The first `built` of those that are counted as deterministic
/// generate their kernels, which may fail only where the kernel would be loaded onto the GPU; else
/// CudnnError.
EngineCounts engines_of(const cuda::CudnnGraph& graph, const GpuProperties& gpu, int built);

}  // namespace shoal::testing
