// evaluate_model: held-out loss under any layout.
#include <algorithm>
#include <limits>

#include "launch/trainer.h"

namespace shoal {

namespace {

/// This rank's share of samples [first, first + count). Every rank makes the same number of passes, empty
/// ones if need be: its experts may be needed by the others.
std::vector<ModelBatch> eval_batches(const BatchLoader& loader, const TrainConfig& config,
                                     const TrainEngine& engine, int64_t micro_batch, int64_t first,
                                     int64_t count) {
  const AxisCoords& coords = engine.mesh().coords();
  const AxisCoord dp = coords[Axis::dp];
  const ShardRange mine = shard_range(count, dp);
  const int64_t largest = shard_range(count, AxisCoord{0, dp.size}).end;
  std::vector<ModelBatch> batches;
  for (int64_t at = 0; at < largest; at += micro_batch) {
    const int64_t begin = std::min(mine.begin + at, mine.end), end = std::min(begin + micro_batch, mine.end);
    batches.push_back(to_model_batch(loader.batch(first + begin, end - begin),
                                     config.data.loader.mask_documents, coords[Axis::cp], engine.device()));
  }
  return batches;
}

}  // namespace

EvalMetrics evaluate_model(TrainEngine& engine, const TrainData& data, const TrainConfig& config,
                           int64_t step) {
  if (data.validation == nullptr) {
    throw UsageError(
        "evaluation: there is no held-out data; set data.split.val_fraction or data.split.val_documents");
  }
  const AxisCoord dp = engine.mesh().coords()[Axis::dp];
  const int64_t micro_batch = micro_batch_of(config, engine.mesh().layout());
  const int64_t all = data.validation->samples_per_epoch();
  const int64_t samples = config.eval.samples == 0 ? all : std::min(all, config.eval.samples);
  EvalMetrics metrics;
  metrics.step = step;
  double loss = 0;
  for (int64_t first = 0; first < samples; first += micro_batch * dp.size) {
    const int64_t count = std::min(micro_batch * dp.size, samples - first);
    const TrainEngine::LossSum sum =
        engine.evaluate(eval_batches(*data.validation, config, engine, micro_batch, first, count));
    loss += sum.loss;
    metrics.tokens += sum.labels;
  }
  metrics.loss = metrics.tokens > 0 ? loss / static_cast<double>(metrics.tokens)
                                    : std::numeric_limits<double>::quiet_NaN();
  return metrics;
}

}  // namespace shoal
