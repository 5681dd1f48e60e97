// From an experiment to what its engine is built from.
#pragma once

#include "launch/engine.h"
#include "launch/train_config.h"

namespace shoal {

/// Where `run.device` puts tensors.
Device device_of(const TrainConfig& config);
/// `vocab_size`: the tokenizer's.
EngineOptions engine_options(const TrainConfig& config, int64_t vocab_size);

}  // namespace shoal
