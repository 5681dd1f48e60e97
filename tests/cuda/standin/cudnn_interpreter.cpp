#include "tests/cuda/standin/cudnn_interpreter.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/base/error.h"
#include "core/tensor/types.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

namespace {

using Values = std::vector<double>;  // in the order of indices

constexpr cudnnBackendAttributeName_t kMatmulIn[] = {CUDNN_ATTR_OPERATION_MATMUL_ADESC,
                                                     CUDNN_ATTR_OPERATION_MATMUL_BDESC};
constexpr cudnnBackendAttributeName_t kPointwiseIn[] = {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
                                                        CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
                                                        CUDNN_ATTR_OPERATION_POINTWISE_TDESC};
constexpr cudnnBackendAttributeName_t kReductionIn[] = {CUDNN_ATTR_OPERATION_REDUCTION_XDESC};
constexpr cudnnBackendAttributeName_t kReshapeIn[] = {CUDNN_ATTR_OPERATION_RESHAPE_XDESC};

struct Names {
  std::span<const cudnnBackendAttributeName_t> inputs;
  cudnnBackendAttributeName_t output;
};
Names names_of(const Descriptor& operation) {
  switch (operation.type) {
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      return {kMatmulIn, CUDNN_ATTR_OPERATION_MATMUL_CDESC};
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      return {kPointwiseIn, CUDNN_ATTR_OPERATION_POINTWISE_YDESC};
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
      return {kReductionIn, CUDNN_ATTR_OPERATION_REDUCTION_YDESC};
    default:
      return {kReshapeIn, CUDNN_ATTR_OPERATION_RESHAPE_YDESC};
  }
}
std::vector<TensorInfo> inputs_of(const Descriptor& operation) {
  std::vector<TensorInfo> out;
  for (const auto name : names_of(operation).inputs) {
    if (operation.has(name)) out.emplace_back(operation.object(name));
  }
  return out;
}
TensorInfo output_of(const Descriptor& operation) {
  return TensorInfo(operation.object(names_of(operation).output));
}

/// Calls body(index) for every index of sizes, in order.
template <class Body>
void for_each_index(const std::vector<int64_t>& sizes, const Body& body) {
  std::vector<int64_t> index(sizes.size(), 0);
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  for (int64_t i = 0; i < count; i++) {
    body(index);
    for (size_t d = sizes.size(); d-- > 0;) {
      if (++index[d] < sizes[d]) break;
      index[d] = 0;
    }
  }
}
int64_t offset_of(const TensorInfo& t, const std::vector<int64_t>& index) {
  int64_t offset = 0;
  for (size_t d = 0; d < index.size(); d++) offset += index[d] * t.strides[d];
  return offset;
}
/// Where the element for an index of a larger tensor is: sizes of 1 serve all, fewer heads serve equal
/// groups.
int64_t position_in(const TensorInfo& t, const std::vector<int64_t>& index,
                    const std::vector<int64_t>& larger) {
  int64_t position = 0;
  for (size_t d = 0; d < index.size(); d++) {
    const int64_t ratio = larger[d] / t.sizes[d];
    position = position * t.sizes[d] + index[d] / ratio;
  }
  return position;
}
bool spreads_over(const TensorInfo& t, const std::vector<int64_t>& larger, bool groups) {
  if (t.sizes.size() != larger.size()) return false;
  for (size_t d = 0; d < larger.size(); d++) {
    if (t.sizes[d] == larger[d] || t.sizes[d] == 1) continue;
    if (!groups || d != 1 || larger[d] % t.sizes[d] != 0) return false;
  }
  return true;
}

double rounded(double value, cudnnDataType_t type) {
  if (type == CUDNN_DATA_BFLOAT16) return static_cast<float>(BFloat16(static_cast<float>(value)));
  return value;
}

class Run {
 public:
  Run(const std::map<int64_t, void*>& pointers, const std::map<int64_t, float>& numbers)
      : pointers_(pointers), numbers_(numbers) {}

  void operation(const Descriptor& op) {
    const TensorInfo y = output_of(op);
    switch (op.type) {
      case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        return store(y, matmul(op, y));
      case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
        return store(y, pointwise(op, y));
      case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        return store(y, reduction(op, y));
      default:
        return store(y, reshape(op, y));
    }
  }

 private:
  Values load(const TensorInfo& t) const {
    if (t.host) return {numbers_.at(t.id)};
    if (t.inner) return inner_.at(t.id);
    return read(t, pointers_.at(t.id));
  }
  static Values read(const TensorInfo& t, const void* data) {
    Values out;
    const auto size = bytes_of(t.type);
    for_each_index(t.sizes, [&](const auto& index) {
      const char* at = static_cast<const char*>(data) + offset_of(t, index) * static_cast<int64_t>(size);
      check_device_range(at, size, "tensor of a cuDNN graph");
      will_read(at, size);
      if (t.type == CUDNN_DATA_BFLOAT16) {
        out.push_back(static_cast<float>(*reinterpret_cast<const BFloat16*>(at)));
      } else {
        out.push_back(*reinterpret_cast<const float*>(at));
      }
    });
    return out;
  }
  void store(const TensorInfo& t, Values values) {
    for (double& value : values) value = rounded(value, t.type);
    if (t.inner) {
      inner_[t.id] = std::move(values);
      return;
    }
    const auto size = bytes_of(t.type);
    size_t i = 0;
    for_each_index(t.sizes, [&](const auto& index) {
      char* at = static_cast<char*>(pointers_.at(t.id)) + offset_of(t, index) * static_cast<int64_t>(size);
      check_device_range(at, size, "result of a cuDNN graph");
      will_write(at, size);
      if (t.type == CUDNN_DATA_BFLOAT16) {
        *reinterpret_cast<BFloat16*>(at) = static_cast<float>(values[i++]);
      } else {
        *reinterpret_cast<float*>(at) = static_cast<float>(values[i++]);
      }
    });
  }

  Values matmul(const Descriptor& op, const TensorInfo& c) const {
    const std::vector<TensorInfo> in = inputs_of(op);
    const Values a = load(in[0]), b = load(in[1]);
    const int64_t m = c.sizes[2], n = c.sizes[3], k = in[0].sizes[3];
    Values out;
    for_each_index({c.sizes[0], c.sizes[1], m, n}, [&](const auto& i) {
      const auto batch = [&](const TensorInfo& t) {
        return (i[0] / (c.sizes[0] / t.sizes[0]) * t.sizes[1] + i[1] / (c.sizes[1] / t.sizes[1])) *
               t.sizes[2] * t.sizes[3];
      };
      const double* row = a.data() + batch(in[0]) + i[2] * k;
      const double* column = b.data() + batch(in[1]) + i[3];
      double sum = 0;
      for (int64_t j = 0; j < k; j++) sum += row[j] * column[j * n];
      out.push_back(sum);
    });
    return out;
  }

  Values pointwise(const Descriptor& op, const TensorInfo& y) const {
    const Descriptor& how = op.object(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR);
    const auto mode = how.value<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE);
    Values out;
    if (mode == CUDNN_POINTWISE_GEN_INDEX) {
      const auto axis = static_cast<size_t>(how.value<int64_t>(CUDNN_ATTR_POINTWISE_AXIS));
      for_each_index(y.sizes, [&](const auto& i) { out.push_back(static_cast<double>(i[axis])); });
      return out;
    }
    const std::vector<TensorInfo> in = inputs_of(op);
    std::vector<Values> values;
    for (const TensorInfo& t : in) values.push_back(load(t));
    for_each_index(y.sizes, [&](const auto& i) {
      double v[3] = {};
      for (size_t j = 0; j < in.size(); j++)
        v[j] = values[j][static_cast<size_t>(position_in(in[j], i, y.sizes))];
      out.push_back(apply(mode, v[0], v[1], v[2]));
    });
    return out;
  }
  static double apply(cudnnPointwiseMode_t mode, double x, double b, double t) {
    switch (mode) {
      case CUDNN_POINTWISE_MUL:
        return x * b;
      case CUDNN_POINTWISE_ADD:
        return x + b;
      case CUDNN_POINTWISE_SUB:
        return x - b;
      case CUDNN_POINTWISE_DIV:
        return x / b;
      case CUDNN_POINTWISE_EXP:
        return std::exp(x);
      case CUDNN_POINTWISE_LOG:
        return std::log(x);
      case CUDNN_POINTWISE_CMP_GE:
        return x >= b ? 1 : 0;
      case CUDNN_POINTWISE_BINARY_SELECT:
        return t != 0 ? x : b;
      default:
        throw Error(str("stand-in of cuDNN: pointwise mode ", static_cast<int>(mode), " is not known"));
    }
  }

  Values reduction(const Descriptor& op, const TensorInfo& y) const {
    const TensorInfo x = inputs_of(op)[0];
    const Values values = load(x);
    const bool max =
        op.object(CUDNN_ATTR_OPERATION_REDUCTION_DESC)
            .value<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR) == CUDNN_REDUCE_TENSOR_MAX;
    Values out(static_cast<size_t>(y.count()), max ? -HUGE_VAL : 0);
    size_t i = 0;
    for_each_index(x.sizes, [&](const auto& index) {
      double& to = out[static_cast<size_t>(position_in(y, index, x.sizes))];
      const double value = values[i++];
      to = max ? (value > to || std::isnan(value) ? value : to) : to + value;
    });
    return out;
  }

  /// The same memory with other sizes and strides.
  Values reshape(const Descriptor& op, const TensorInfo& y) const {
    const TensorInfo x = inputs_of(op)[0];
    if (!x.inner) {
      TensorInfo view = y;
      view.type = x.type;
      return read(view, pointers_.at(x.id));
    }
    std::map<int64_t, double> memory;
    const Values values = load(x);
    size_t i = 0;
    for_each_index(x.sizes, [&](const auto& index) { memory[offset_of(x, index)] = values[i++]; });
    Values out;
    for_each_index(y.sizes, [&](const auto& index) { out.push_back(memory.at(offset_of(y, index))); });
    return out;
  }

  const std::map<int64_t, void*>& pointers_;
  const std::map<int64_t, float>& numbers_;
  std::map<int64_t, Values> inner_;
};

}  // namespace

size_t bytes_of(cudnnDataType_t type) {
  return type == CUDNN_DATA_BFLOAT16 ? 2 : type == CUDNN_DATA_BOOLEAN ? 1 : 4;
}

TensorInfo::TensorInfo(const Descriptor& tensor)
    : id(tensor.value<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID)),
      type(tensor.value<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)),
      sizes(tensor.values<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS)),
      strides(tensor.values<int64_t>(CUDNN_ATTR_TENSOR_STRIDES)),
      inner(tensor.flag(CUDNN_ATTR_TENSOR_IS_VIRTUAL)),
      host(tensor.flag(CUDNN_ATTR_TENSOR_IS_BY_VALUE)),
      alignment(tensor.value<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT)) {}

int64_t TensorInfo::count() const {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

cudnnStatus_t check_operation(const Descriptor& op) {
  const Names names = names_of(op);
  if (!op.has(names.inputs[0]) || !op.has(names.output)) return CUDNN_STATUS_BAD_PARAM;
  const std::vector<TensorInfo> in = inputs_of(op);
  const TensorInfo y = output_of(op);
  if (y.host || y.sizes.size() != 4) return CUDNN_STATUS_BAD_PARAM;
  bool fits = true;
  if (op.type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
    if (in.size() != 2 || !op.has(CUDNN_ATTR_OPERATION_MATMUL_DESC)) return CUDNN_STATUS_BAD_PARAM;
    const std::vector<int64_t>&a = in[0].sizes, &b = in[1].sizes, &c = y.sizes;
    if (a.size() != 4 || b.size() != 4) return CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH;
    fits = a[2] == c[2] && b[3] == c[3] && a[3] == b[2] && a[0] == c[0] && b[0] == c[0] && a[1] == c[1] &&
           c[1] % b[1] == 0;
  } else if (op.type == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
    if (!op.has(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)) return CUDNN_STATUS_BAD_PARAM;
    for (const TensorInfo& t : in) fits = fits && spreads_over(t, y.sizes, false);
    const bool select =
        op.object(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR)
            .value<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE) == CUDNN_POINTWISE_BINARY_SELECT;
    if (select && (in.size() != 3 || in[2].type != CUDNN_DATA_BOOLEAN)) return CUDNN_STATUS_BAD_PARAM;
  } else if (op.type == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
    if (!op.has(CUDNN_ATTR_OPERATION_REDUCTION_DESC)) return CUDNN_STATUS_BAD_PARAM;
    fits = spreads_over(y, in[0].sizes, true);
  } else {
    fits = in[0].count() == y.count();
  }
  return fits ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH;
}

cudnnStatus_t check_graph(const Descriptor& graph) {
  std::set<int64_t> written;
  std::map<int64_t, TensorInfo> known;
  const auto same_as_before = [&](const TensorInfo& t) {
    const TensorInfo& first = known.emplace(t.id, t).first->second;
    return first.sizes == t.sizes && first.strides == t.strides && first.type == t.type &&
           first.inner == t.inner;
  };
  for (const Object& op : graph.attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).objects) {
    for (const TensorInfo& t : inputs_of(*op)) {
      if (!same_as_before(t)) return CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES;
      if (t.inner && !written.contains(t.id)) return CUDNN_STATUS_BAD_PARAM;
    }
    const TensorInfo y = output_of(*op);
    if (!same_as_before(y) || !written.insert(y.id).second) return CUDNN_STATUS_BAD_PARAM_DUPLICATED_ENTRIES;
  }
  return CUDNN_STATUS_SUCCESS;
}

std::map<int64_t, TensorInfo> tensors_of(const Descriptor& graph) {
  std::map<int64_t, TensorInfo> out;
  for (const Object& op : graph.attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).objects) {
    for (const TensorInfo& t : inputs_of(*op)) out.emplace(t.id, t);
    const TensorInfo y = output_of(*op);
    out.emplace(y.id, y);
  }
  return out;
}

void interpret(const Descriptor& graph, const std::map<int64_t, void*>& pointers,
               const std::map<int64_t, float>& numbers) {
  Run run(pointers, numbers);
  for (const Object& op : graph.attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).objects) run.operation(*op);
}

}  // namespace shoal::standin
