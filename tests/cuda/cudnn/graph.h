// Operation graphs of cuDNN, and what its engines say to them for a GPU that is not there: cuDNN takes the
// properties of a device as text, so that graphs can be checked, and kernels be generated, without one.
#pragma once

#include <cudnn.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace shoal::testing {

/// What cuDNN is told of a GPU; what it does not need to choose an engine is the same for all.
struct GpuProperties {
  const char* name;
  int version;  // 900: sm_90
  int multiprocessors;
  int shared_bytes;  // of a block, at most
};
inline constexpr GpuProperties kA100{"NVIDIA A100-SXM4-80GB", 800, 108, 166912};
inline constexpr GpuProperties kH200{"NVIDIA H200", 900, 132, 232448};
inline constexpr GpuProperties kB200{"NVIDIA B200", 1000, 148, 232448};

/// One object of cuDNN's C interface. Every failure throws std::runtime_error with cuDNN's message.
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
  CudnnObject& set(cudnnBackendAttributeName_t name, const std::vector<CudnnObject>& objects);
  CudnnObject& set(cudnnBackendAttributeName_t name, const CudnnObject& object) {
    return set(name, std::vector<CudnnObject>{object});
  }
  CudnnObject& finalize(const char* what);
  cudnnBackendDescriptor_t get() const { return object_.get(); }

 private:
  std::shared_ptr<std::remove_pointer_t<cudnnBackendDescriptor_t>> object_;
};

enum class TensorKind : uint8_t { real, inner, host_scalar };  // inner: never in memory

class CudnnGraph {
 public:
  CudnnObject tensor(cudnnDataType_t type, const std::vector<int64_t>& sizes,
                     const std::vector<int64_t>& strides, TensorKind kind = TensorKind::real);
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
  void add(CudnnObject operation) { operations_.push_back(std::move(operation)); }

  /// How many engines take the graph on that GPU. The first `built` of them generate their kernels, which may
  /// fail only where the kernel would be loaded onto the GPU; else std::runtime_error.
  int64_t engines(const GpuProperties& gpu, int built);

 private:
  int64_t next_id_ = 1;
  std::vector<CudnnObject> operations_;
};

}  // namespace shoal::testing
