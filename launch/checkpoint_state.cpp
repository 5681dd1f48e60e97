#include "launch/checkpoint_state.h"

#include <algorithm>
#include <set>

#include "launch/checkpoint_format.h"
#include "launch/crc32c.h"

namespace shoal {

namespace {

std::string tensor_problem(const StateTensor& tensor) {
  if (!is_tensor_name(tensor.name)) return "expected a name of [A-Za-z0-9._-]+ parts separated by '/'";
  if (tensor.name.starts_with(str(kMetaGroup, "/")) || tensor.name == kMetaGroup)
    return str("the group '", kMetaGroup, "' is reserved");
  if (!tensor.value.defined()) return "the value is undefined";
  const int dims = tensor.global_shape.dims();
  if (tensor.shard_dim < -1 || tensor.shard_dim >= dims)
    return str("expected shard_dim -1..", dims - 1, ", got ", tensor.shard_dim);
  Shape expected = tensor.global_shape;
  if (tensor.shard_dim >= 0) {
    const auto [begin, end] = tensor.shard;
    if (begin < 0 || begin > end || end > tensor.global_shape[tensor.shard_dim])
      return str("shard [", begin, ", ", end, ") is no part of dimension ", tensor.shard_dim, " of ",
                 tensor.global_shape);
    expected.set(tensor.shard_dim, end - begin);
  }
  if (!(tensor.value.shape() == expected))
    return str("expected a value of shape ", expected, ", got ", tensor.value.shape());
  if (tensor.replica_count < 1 || tensor.replica_index < 0 || tensor.replica_index >= tensor.replica_count)
    return str("replica ", tensor.replica_index, " of ", tensor.replica_count);
  return "";
}

}  // namespace

Box box_of(const StateTensor& tensor) {
  Box box{tensor.global_shape, tensor.global_shape};
  for (int d = 0; d < box.start.dims(); d++) box.start.set(d, 0);
  if (tensor.shard_dim >= 0) {
    box.start.set(tensor.shard_dim, tensor.shard.begin);
    box.extent.set(tensor.shard_dim, tensor.shard.end - tensor.shard.begin);
  }
  return box;
}

std::string state_problem(const std::vector<StateTensor>& state) {
  std::set<std::string> names;
  for (const StateTensor& tensor : state) {
    const std::string problem = tensor_problem(tensor);
    if (!problem.empty()) return "tensor '" + tensor.name + "': " + problem;
    if (!names.insert(tensor.name).second) return "tensor '" + tensor.name + "': the name is used twice";
  }
  // A dataset cannot be a group as well.
  for (const std::string& name : names)
    for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1))
      if (names.contains(name.substr(0, slash)))
        return "tensor '" + name + "': '" + name.substr(0, slash) + "' is a tensor, not a group";
  return "";
}

uint32_t state_signature(const std::vector<StateTensor>& state) {
  uint32_t signature = 0;
  for (const StateTensor& tensor : state) {
    const std::string text = str(tensor.name, ' ', tensor.value.dtype(), ' ', tensor.global_shape, '\n');
    signature = crc32c(text.data(), text.size(), signature);
  }
  return signature;
}

}  // namespace shoal
