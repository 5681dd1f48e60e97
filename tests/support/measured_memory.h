// The memory that steps of a config really take, against the estimate.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "launch/engine_options.h"
#include "launch/memory.h"
#include "tests/support/tiny_model.h"

namespace shoal::testing {

inline constexpr int64_t kMeasuredVocab = 500;

/// Highest number of bytes of tensors alive while a model is built and takes two steps, less what was there.
inline double measured_bytes(const TrainConfig& config) {
  const Device where = device_of(config);
  DeviceRuntime& device = device_runtime(where.type);
  device.synchronize();
  const int64_t before = device.stats().current_bytes;
  device.reset_peak();
  const Mesh mesh(make_single_communicator(), ParallelLayout{});
  TrainEngine engine(engine_options(config, kMeasuredVocab), mesh);
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(config.data.global_batch));
  for (size_t r = 0; r < rows.size(); r++) {
    for (int64_t s = 0; s < config.data.seq_len; s++)
      rows[r].push_back(static_cast<int32_t>((r * 131 + static_cast<size_t>(s) * 71) % kMeasuredVocab));
  }
  const ModelBatch batch = batch_of(rows, where);
  for (int i = 0; i < 2; i++) engine.step(std::span(&batch, 1), 1e-3);
  device.synchronize();
  return static_cast<double>(device.stats().peak_bytes - before);
}

/// "" when the estimate is as near to the measured bytes as that part of them.
inline std::string too_far(const TrainConfig& config, double measured, double part = 0.1) {
  const MemoryEstimate estimate = estimate_memory(config, layout_of(config, 1), kMeasuredVocab);
  if (std::abs(estimate.total() - measured) < part * measured) return "";
  return str(estimate.text(), ", measured ", measured / (1 << 20),
             " MiB: ", 100 * (estimate.total() / measured - 1), " % off\n");
}
inline std::string too_far(const TrainConfig& config) {
  return too_far(config, measured_bytes(config));
}

}  // namespace shoal::testing
