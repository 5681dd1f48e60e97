// What `shoal layout` prints: both grids, what each rank holds, and what ranks need and send.
#pragma once

#include <string>

#include "launch/train_config.h"

namespace shoal {

/// For a legal layout. vocab_size: the tokenizer's. ranks_per_node = 0: all ranks are taken to be on one
/// node. Nothing of the model is allocated; the time grows with the square of the number of ranks (512: about
/// a second).
std::string layout_page(const TrainConfig& config, const ParallelLayout& layout, int64_t vocab_size);

}  // namespace shoal
