#include "launch/engine_options.h"

#include "parallel/bootstrap.h"

namespace shoal {

Device device_of(const TrainConfig& config) {
  return Device{config.run.device == "cuda" ? DeviceType::cuda : DeviceType::cpu, 0};
}

Device open_device(const TrainConfig& config) {
  const Device device = device_of(config);
  device_runtime(device.type).select(launch_info().local_rank);
  return device;
}

EngineOptions engine_options(const TrainConfig& config, int64_t vocab_size) {
  EngineOptions options;
  options.model = config.model;
  options.optimizer = config.optim.optimizer;
  options.dispatcher = config.parallel.dispatcher;
  options.vocab_size = vocab_size;
  options.seq_len = config.data.seq_len;
  options.seed = static_cast<uint64_t>(config.run.seed);
  options.clip_norm = config.optim.clip_norm;
  options.bucket_mb = config.parallel.bucket_mb;
  options.zero = static_cast<ZeroStage>(config.parallel.zero);
  options.rank_invariant = config.run.rank_invariant();
  options.dtype = config.run.dtype();
  options.bf16 = config.run.bf16();
  options.device = device_of(config);
  return options;
}

}  // namespace shoal
