// From an experiment to what its engine is built from.
#pragma once

#include "launch/engine.h"
#include "launch/train_config.h"

namespace shoal {

/// Where `run.device` puts tensors.
Device device_of(const TrainConfig& config);
/// The same, chosen among the devices of this host by the rank's place on it. Throws UsageError when this
/// program was built without such devices, or the machine has none.
Device open_device(const TrainConfig& config);
/// `vocab_size`: the tokenizer's.
EngineOptions engine_options(const TrainConfig& config, int64_t vocab_size);

}  // namespace shoal
