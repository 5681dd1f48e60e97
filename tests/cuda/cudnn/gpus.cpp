#include "tests/cuda/cudnn/gpus.h"

#include <nlohmann/json.hpp>

namespace shoal::testing {

namespace {

std::string as_json(const GpuProperties& gpu) {
  const nlohmann::json json = {{"deviceName", gpu.name},
                               {"deviceVer", gpu.version},
                               {"multiProcessorCount", gpu.multiprocessors},
                               {"maxSharedMemoryPerBlockOptin", gpu.shared_bytes},
                               {"maxSharedMemoryPerBlock", 48 << 10},
                               {"reservedSharedMemoryPerBlock", 1024},
                               {"maxGridSize", {2147483647, 65535, 65535}},
                               {"maxBlockSize", {1024, 1024, 64}},
                               {"regsPerBlock", 65536},
                               {"maxRegistersPerSM", 65536},
                               {"warpSize", 32},
                               {"maxCtasPerSM", 32},
                               {"maxThreadsPerBlock", 1024},
                               {"maxThreadsPerSM", 2048},
                               {"totalGlobalMem", int64_t{80} << 30},
                               {"l2CacheSize", 50 << 20},
                               {"smClockRateKHz", 1'900'000},
                               {"memClockRateKHz", 3'000'000},
                               {"driverVer", 13000},
                               {"cudaDeviceId", 0},
                               {"pciDeviceId", 1},
                               {"isTccDriver", 0},
                               {"supportCoopLaunch", 1}};
  return json.dump();
}

}  // namespace

cuda::CudnnObject described(const GpuProperties& gpu) {
  const std::string json = as_json(gpu);
  cuda::CudnnObject device(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, std::ssize(json), json.data());
  return device.finalize("device properties");
}

EngineCounts engines_of(const cuda::CudnnGraph& graph, const GpuProperties& gpu, int built) {
  const cuda::CudnnObject device = described(gpu);
  const cuda::CudnnTarget target{nullptr, &device};
  EngineCounts counts;
  for (const cuda::CudnnEngine& engine : graph.engines(target)) {
    counts.all++;
    if (!engine.deterministic()) continue;
    if (counts.deterministic++ >= built) continue;
    try {
      engine.plan(target, graph.name());
    } catch (const cuda::CudnnError& error) {
      if (error.status() != CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER) throw;
    }
  }
  return counts;
}

}  // namespace shoal::testing
