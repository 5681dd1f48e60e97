// bench_step: some steps of a config's model on random tokens.
#include <algorithm>

#include "core/base/random.h"
#include "core/ops/machine.h"
#include "launch/bench.h"
#include "launch/engine_options.h"
#include "launch/memory.h"
#include "launch/profile.h"
#include "parallel/device_world.h"

namespace shoal {

namespace {

constexpr int kWarmUp = 2;          // the first steps touch memory for the first time
constexpr double kStepSeconds = 4;  // of all measured steps together

}  // namespace

ModelBatch random_batch(int64_t rows, int64_t seq, int64_t vocab, uint64_t seed, Device device) {
  const RandomStream random(seed, "bench");
  std::vector<int32_t> tokens, positions;
  for (int64_t i = 0; i < rows * seq; i++) {
    tokens.push_back(
        static_cast<int32_t>(random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(vocab))));
    positions.push_back(static_cast<int32_t>(i % seq));
  }
  ModelBatch batch;
  batch.batch = rows;
  batch.seq = seq;
  const Shape shape{rows * seq};
  batch.tokens_T = batch.labels_T = Tensor::from(tokens, shape, device);
  batch.positions_T = Tensor::from(positions, shape, device);
  return batch;
}

ProfileSummary bench_step(const LoadedConfig& loaded, const BenchOptions& options,
                          const std::shared_ptr<Communicator>& world) {
  const TrainConfig& config = loaded.config;
  const ParallelLayout layout = layout_of(config, world->size());
  const int64_t vocab = expected_vocab(config, /*prepared=*/false).size;
  const Mesh mesh(device_world(world, device_of(config)), layout);
  const Ceilings ceilings = measure_ceilings(config.run.dtype(), *world);
  TrainEngine engine(engine_options(config, vocab), mesh);
  const int64_t micro = micro_batch_of(config, layout),
                count = config.data.global_batch / (micro * layout.dp);
  std::vector<ModelBatch> batches;
  for (int64_t i = 0; i < count; i++) {
    const auto stream = static_cast<uint64_t>(mesh.coords()[Axis::dp].index * count + i);
    batches.push_back(cut_sequences(
        random_batch(micro, config.data.seq_len, vocab, stream, device_of(config)), mesh.coords()[Axis::cp]));
  }
  // Small, so that the routers stay as balanced as they begin.
  constexpr double kLearningRate = 1e-6;
  double seconds = 0;
  for (int i = 0; i < kWarmUp; i++) {
    const double begin = now_seconds();
    engine.step(batches, kLearningRate);
    seconds = now_seconds() - begin;
  }
  const auto fit = static_cast<int64_t>(kStepSeconds / std::max(seconds, 1e-6));
  const int64_t steps = world->min(std::clamp<int64_t>(fit, 2, options.max_steps));
  const int64_t offset = clock_offset_ns(*world);
  Profiler profiler(kProfileEvents);
  for (int64_t step = 1; step <= steps; step++) {
    profiler.start(step);
    engine.step(batches, kLearningRate);
    profiler.stop();
  }
  ProfileSummary summary = summarize_profile(profiler, ceilings, mesh, offset);
  summary.tokens_per_step = static_cast<double>(config.data.global_batch * config.data.seq_len);
  summary.model_flops_per_token = engine.model().facts().flops_per_token();
  return summary;
}

}  // namespace shoal
