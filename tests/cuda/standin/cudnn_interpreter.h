// Descriptors of the stand-in of cuDNN, and graphs of them, which it interprets operation by operation.
#pragma once

#include <cudnn.h>

#include <map>
#include <memory>
#include <span>
#include <vector>

struct cudnnContext {
  cudaStream_t stream = nullptr;
};

namespace shoal::standin {

struct Descriptor;
struct Attribute {
  cudnnBackendAttributeType_t type;
  int64_t count;
  std::vector<char> bytes;
  std::vector<std::shared_ptr<const Descriptor>> objects;  // of CUDNN_TYPE_BACKEND_DESCRIPTOR
};

/// One object: its attributes, and whether it was finalised.
struct Descriptor {
  cudnnBackendDescriptorType_t type;
  bool finalized = false;
  std::map<cudnnBackendAttributeName_t, Attribute> attributes;

  bool has(cudnnBackendAttributeName_t name) const { return attributes.contains(name); }
  template <class T>
  std::vector<T> values(cudnnBackendAttributeName_t name) const {
    const Attribute& a = attributes.at(name);
    const auto* first = reinterpret_cast<const T*>(a.bytes.data());
    return std::vector<T>(first, first + a.count);
  }
  template <class T>
  T value(cudnnBackendAttributeName_t name) const {
    return values<T>(name)[0];
  }
  bool flag(cudnnBackendAttributeName_t name) const { return has(name) && value<bool>(name); }
  const Descriptor& object(cudnnBackendAttributeName_t name) const { return *attributes.at(name).objects[0]; }
};
using Object = std::shared_ptr<const Descriptor>;

struct TensorInfo {
  explicit TensorInfo(const Descriptor& tensor);
  int64_t id;
  cudnnDataType_t type;
  std::vector<int64_t> sizes, strides;
  bool inner, host;
  int64_t alignment;
  int64_t count() const;
};
size_t bytes_of(cudnnDataType_t type);

/// Whether the operation's tensors fit together.
cudnnStatus_t check_operation(const Descriptor& operation);
/// Whether they make a graph: each operation's inputs are there before it, nothing is written twice.
cudnnStatus_t check_graph(const Descriptor& graph);
/// All tensors of a graph by id.
std::map<int64_t, TensorInfo> tensors_of(const Descriptor& graph);

/// Runs the graph on the given memory; numbers of the host have been read.
void interpret(const Descriptor& graph, const std::map<int64_t, void*>& pointers,
               const std::map<int64_t, float>& numbers);

}  // namespace shoal::standin
