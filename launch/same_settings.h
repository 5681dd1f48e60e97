// Ranks that were started with different settings would train replicas that part silently.
#pragma once

#include <functional>
#include <string>

#include "launch/train_config.h"
#include "parallel/communicator.h"

namespace shoal {

/// The value of an environment variable of this rank; "" when it is not set.
using VariableReader = std::function<std::string(const char* name)>;
std::string environment_variable(const char* name);

/// Throws UsageError on every rank when the settings (run.threads excepted), the environment variables that
/// change bits, or the kernels' instruction sets of two ranks differ; it names the first differing key of
/// each such rank. Collective; blocks.
void require_same_settings(const TrainConfig& config, Communicator& world,
                           const VariableReader& read = environment_variable);

}  // namespace shoal
