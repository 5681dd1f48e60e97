// Activation recomputation: keep only the inputs of a piece of the model and run it again in backward.
#pragma once

#include <functional>
#include <vector>

#include "core/tensor/tensor.h"

namespace shoal {

using RecomputeBody = std::function<std::vector<Tensor>(const std::vector<Tensor>& inputs)>;

/// Same values and gradients as body(inputs); saves only `inputs`. body runs a second time in backward, with
/// Tape::replaying() true, so counters and logs inside it must not count again. Parameters may be used
/// inside.
std::vector<Tensor> recompute(RecomputeBody body, const std::vector<Tensor>& inputs);

}  // namespace shoal
