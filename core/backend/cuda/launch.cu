#include "core/backend/cuda/launch.h"

namespace shoal::cuda {

LaunchLimits& launch_limits() {
  static thread_local LaunchLimits limits;
  return limits;
}

LaunchShape launch_shape(Device device, int64_t blocks, int threads, int64_t blocks_y, size_t shared_bytes) {
  constexpr int64_t kMaxBlocksY = 65535;
  const LaunchLimits& limits = launch_limits();
  LaunchShape shape;
  shape.grid_x = static_cast<unsigned>(std::min(blocks, limits.blocks));
  shape.grid_y = static_cast<unsigned>(std::min({blocks_y, limits.blocks, kMaxBlocksY}));
  shape.block = static_cast<unsigned>(std::min(threads, limits.block_threads));
  shape.shared_bytes = shared_bytes;
  shape.stream = reinterpret_cast<cudaStream_t>(current_stream(device).handle);
  return shape;
}

int threads_for(int64_t work, int most) {
  constexpr int64_t kWarp = 32;
  return static_cast<int>(std::clamp<int64_t>((work + kWarp - 1) / kWarp * kWarp, kWarp, most));
}

}  // namespace shoal::cuda
