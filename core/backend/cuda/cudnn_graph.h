// Operation graphs of cuDNN through its C interface, and the plans that its engines make of them. Engines are
// asked of the device of a handle; or of one that is only described, so that graphs can be checked, and
// kernels be generated, where there is none (tests/cuda/cudnn).
#pragma once

#include <cudnn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"

namespace shoal::cuda {

/// What a function of cuDNN answered instead of success.
class CudnnError : public Error {
 public:
  CudnnError(cudnnStatus_t status, const std::string& message) : Error(message), status_(status) {}
  cudnnStatus_t status() const { return status_; }
  /// The library does not do what it was asked for, as opposed to having failed.
  bool refused() const {
    return status_ == CUDNN_STATUS_BAD_PARAM || status_ / 1000 == CUDNN_STATUS_NOT_SUPPORTED / 1000;
  }

 private:
  cudnnStatus_t status_;
};
/// Throws CudnnError, which names `what`, unless `status` is success.
void check_cudnn(cudnnStatus_t status, const std::string& what);

/// Bytes to whose multiples the pointers of real tensors must point: rows of bf16 are read as wide as it
/// goes.
int64_t cudnn_alignment(cudnnDataType_t type);

/// One object of the interface, shared by its copies.
class CudnnObject {
 public:
  explicit CudnnObject(cudnnBackendDescriptorType_t type);
  CudnnObject& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
                   const void* values);
  CudnnObject& set(cudnnBackendAttributeName_t name, const std::vector<int64_t>& values) {
    return set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(values.size()), values.data());
  }
  CudnnObject& set(cudnnBackendAttributeName_t name, cudnnDataType_t value) {
    return set(name, CUDNN_TYPE_DATA_TYPE, 1, &value);
  }
  CudnnObject& set(cudnnBackendAttributeName_t name, cudnnHandle_t handle) {
    return set(name, CUDNN_TYPE_HANDLE, 1, &handle);
  }
  CudnnObject& set(cudnnBackendAttributeName_t name, const std::vector<CudnnObject>& objects);
  CudnnObject& set(cudnnBackendAttributeName_t name, const CudnnObject& object) {
    return set(name, std::vector<CudnnObject>{object});
  }
  CudnnObject& finalize(const std::string& what);
  cudnnBackendDescriptor_t get() const { return object_.get(); }

 private:
  std::shared_ptr<std::remove_pointer_t<cudnnBackendDescriptor_t>> object_;
};

/// Whose engines: of the handle's device, or of the GPU that `described` (a DEVICEPROP object) describes.
struct CudnnTarget {
  cudnnHandle_t handle = nullptr;
  const CudnnObject* described = nullptr;
};

/// An engine with its settings, for one graph.
class CudnnEngine {
 public:
  explicit CudnnEngine(CudnnObject config) : config_(std::move(config)) {}
  /// It does not say that its bits may differ from time to time.
  bool deterministic() const;
  /// Bytes that its plan is to need.
  int64_t workspace_bytes() const;
  /// Generates its kernels, which takes up to seconds. Throws CudnnError.
  CudnnObject plan(const CudnnTarget& target, const std::string& what) const;

 private:
  CudnnObject config_;
};

class CudnnGraph {
 public:
  /// `name` is what messages call the graph.
  explicit CudnnGraph(std::string name) : name_(std::move(name)) {}

  /// Sizes and strides are in elements. In memory, given by its id when the plan is executed.
  CudnnObject real(int64_t id, cudnnDataType_t type, const std::vector<int64_t>& sizes,
                   const std::vector<int64_t>& strides);
  /// One f32 of the host's memory, given by its id.
  CudnnObject host_scalar(int64_t id, int64_t dims = 4);
  /// Never in memory.
  CudnnObject inner(cudnnDataType_t type, const std::vector<int64_t>& sizes,
                    const std::vector<int64_t>& strides);

  void matmul(const CudnnObject& a, const CudnnObject& b, const CudnnObject& c);
  /// y = mode(x, b) where t, when given, selects. axis: of generated indices.
  struct Pointwise {
    cudnnPointwiseMode_t mode;
    CudnnObject x, y;
    const CudnnObject* b = nullptr;
    const CudnnObject* t = nullptr;
    int64_t axis = -1;
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
  };
  void pointwise(const Pointwise& p);
  void reduce(cudnnReduceTensorOp_t op, const CudnnObject& x, const CudnnObject& y);
  /// y is x with other sizes and strides.
  void reshape(const CudnnObject& x, const CudnnObject& y);
  void add(CudnnObject operation) { operations_.push_back(std::move(operation)); }

  /// The engines that take the graph, the one that is expected to be fastest first. Throws CudnnError.
  std::vector<CudnnEngine> engines(const CudnnTarget& target) const;
  const std::string& name() const { return name_; }

 private:
  CudnnObject tensor(int64_t id, cudnnDataType_t type, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides);

  std::string name_;
  int64_t next_inner_id_ = 1000;  // above those of callers
  std::vector<CudnnObject> operations_;
};

/// Bytes that executing the plan needs besides its tensors.
int64_t plan_workspace_bytes(const CudnnObject& plan);

/// Puts the plan into the stream of the handle. `ids` and `pointers` are of all real tensors and scalars.
void execute(cudnnHandle_t handle, const CudnnObject& plan, const std::vector<int64_t>& ids,
             const std::vector<void*>& pointers, void* workspace, const std::string& what);

}  // namespace shoal::cuda
