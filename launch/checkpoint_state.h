// What the checkpoint writer and reader both need to know about the tensors that they are given.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launch/checkpoint.h"
#include "launch/checkpoint_box.h"

namespace shoal {

/// Text datasets of the first shard live below this group; tensor names must not.
inline constexpr const char* kMetaGroup = "meta";

/// What a rank holds of a tensor: values of a box.
struct StatePiece {
  Box box;
  Tensor value;
};
std::vector<StatePiece> pieces_of(const StateTensor& tensor);

/// "" or what is wrong with the arguments: names (characters, twice, one inside the other), pieces that
/// do not fit the values, replica numbers.
std::string state_problem(const std::vector<StateTensor>& state);

/// Equal on all ranks when they pass the same names, dtypes and global shapes in the same order.
uint32_t state_signature(const std::vector<StateTensor>& state);

}  // namespace shoal
