#include "launch/checkpoint_state.h"

#include <algorithm>
#include <set>

#include "launch/checkpoint_format.h"
#include "launch/crc32c.h"

namespace shoal {

namespace {

std::string box_problem(const Box& box, const Shape& global_shape) {
  const int dims = global_shape.dims();
  if (box.start.dims() != dims || box.extent.dims() != dims)
    return str("expected a box of ", dims, " dimensions, got ", box_text(box));
  for (int d = 0; d < dims; d++) {
    if (box.start[d] < 0 || box.extent[d] < 0 || box.start[d] + box.extent[d] > global_shape[d])
      return str("box ", box_text(box), " is no part of ", global_shape);
  }
  return "";
}

std::string tensor_problem(const StateTensor& tensor) {
  if (!is_tensor_name(tensor.name)) return "expected a name of [A-Za-z0-9._-]+ parts separated by '/'";
  if (tensor.name.starts_with(str(kMetaGroup, "/")) || tensor.name == kMetaGroup)
    return str("the group '", kMetaGroup, "' is reserved");
  if (!tensor.value.defined()) return "the value is undefined";
  int64_t elements = 0;
  for (const Box& box : tensor.is_flat ? tensor.boxes : std::vector{tensor.box}) {
    if (std::string problem = box_problem(box, tensor.global_shape); !problem.empty()) return problem;
    elements += box.numel();
  }
  const Shape shape = tensor.is_flat ? Shape{elements} : tensor.box.extent;
  if (!(tensor.value.shape() == shape))
    return str("expected a value of shape ", shape, ", got ", tensor.value.shape());
  if (tensor.replica_count < 1 || tensor.replica_index < 0 || tensor.replica_index >= tensor.replica_count)
    return str("replica ", tensor.replica_index, " of ", tensor.replica_count);
  return "";
}

}  // namespace

std::vector<StatePiece> pieces_of(const StateTensor& tensor) {
  if (!tensor.is_flat) return {{tensor.box, tensor.value}};
  std::vector<StatePiece> pieces;
  int64_t begin = 0;
  for (const Box& box : tensor.boxes) {
    pieces.push_back({box, tensor.value.flat(begin, box.numel())});
    begin += box.numel();
  }
  return pieces;
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
