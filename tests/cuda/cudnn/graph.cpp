#include "tests/cuda/cudnn/graph.h"

#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "core/base/error.h"

namespace shoal::testing {

namespace {

std::string last_message() {
  std::array<char, 1024> text{};
  cudnnGetLastErrorString(text.data(), text.size());
  return text.data();
}

void check(cudnnStatus_t status, const std::string& what) {
  if (status != CUDNN_STATUS_SUCCESS)
    throw std::runtime_error(str(what, ": ", cudnnGetErrorString(status), " ", last_message()));
}

std::string as_json(const GpuProperties& gpu) {
  const nlohmann::json json = {{"deviceName", gpu.name},
                               {"deviceVer", gpu.version},
                               {"multiProcessorCount", gpu.multiprocessors},
                               {"maxSharedMemoryPerBlockOptin", gpu.shared_bytes},
                               {"maxSharedMemoryPerBlock", 48 << 10},
                               {"reservedSharedMemoryPerBlock", 1024},
                               {"maxGridSize", {2147483647, 65535, 65535}},
                               {"maxBlockSize", {1024, 1024, 64}},
                               {"regsPerBlock", 65536},
                               {"maxRegistersPerSM", 65536},
                               {"warpSize", 32},
                               {"maxCtasPerSM", 32},
                               {"maxThreadsPerBlock", 1024},
                               {"maxThreadsPerSM", 2048},
                               {"totalGlobalMem", int64_t{80} << 30},
                               {"l2CacheSize", 50 << 20},
                               {"smClockRateKHz", 1'900'000},
                               {"memClockRateKHz", 3'000'000},
                               {"driverVer", 13000},
                               {"cudaDeviceId", 0},
                               {"pciDeviceId", 1},
                               {"isTccDriver", 0},
                               {"supportCoopLaunch", 1}};
  return json.dump();
}

}  // namespace

CudnnObject::CudnnObject(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t made = nullptr;
  check(cudnnBackendCreateDescriptor(type, &made), str("object of type ", static_cast<int>(type)));
  object_.reset(made, [](cudnnBackendDescriptor_t object) { cudnnBackendDestroyDescriptor(object); });
}

CudnnObject& CudnnObject::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                              int64_t count, const void* values) {
  check(cudnnBackendSetAttribute(get(), name, type, count, values),
        str("attribute ", static_cast<int>(name)));
  return *this;
}

CudnnObject& CudnnObject::set(cudnnBackendAttributeName_t name, const std::vector<CudnnObject>& objects) {
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (const CudnnObject& object : objects) pointers.push_back(object.get());
  return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(pointers.size()), pointers.data());
}

CudnnObject& CudnnObject::finalize(const char* what) {
  check(cudnnBackendFinalize(get()), what);
  return *this;
}

CudnnObject CudnnGraph::tensor(cudnnDataType_t type, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& strides, TensorKind kind) {
  constexpr bool kYes = true;
  CudnnObject tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, std::vector{next_id_++})
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, type)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes)
      .set(CUDNN_ATTR_TENSOR_STRIDES, strides)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, std::vector{int64_t{16}});
  if (kind == TensorKind::inner) tensor.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &kYes);
  if (kind == TensorKind::host_scalar)
    tensor.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &kYes);
  return tensor.finalize("tensor");
}

void CudnnGraph::matmul(const CudnnObject& a, const CudnnObject& b, const CudnnObject& c) {
  CudnnObject how(CUDNN_BACKEND_MATMUL_DESCRIPTOR), operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT).finalize("matmul");
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)
      .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)
      .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, c)
      .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
  add(operation.finalize("matmul operation"));
}

void CudnnGraph::pointwise(const Pointwise& p) {
  CudnnObject how(CUDNN_BACKEND_POINTWISE_DESCRIPTOR),
      operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  how.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &p.mode)
      .set(CUDNN_ATTR_POINTWISE_MATH_PREC, p.compute);
  if (p.axis >= 0) how.set(CUDNN_ATTR_POINTWISE_AXIS, std::vector{p.axis});
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how.finalize("pointwise"))
      .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, p.x)
      .set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, p.y);
  if (p.b != nullptr) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, *p.b);
  if (p.t != nullptr) operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, *p.t);
  add(operation.finalize("pointwise operation"));
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t op, const CudnnObject& x, const CudnnObject& y) {
  CudnnObject how(CUDNN_BACKEND_REDUCTION_DESCRIPTOR),
      operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  how.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op)
      .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how.finalize("reduction"))
      .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
  add(operation.finalize("reduction operation"));
}

int64_t CudnnGraph::engines(const GpuProperties& gpu, int built) {
  const std::string json = as_json(gpu);
  CudnnObject device(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, std::ssize(json), json.data())
      .finalize("device properties");
  CudnnObject graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operations_).finalize("graph");
  constexpr cudnnBackendHeurMode_t kMode = CUDNN_HEUR_MODE_A;
  CudnnObject choice(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  choice.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &kMode)
      .set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device)
      .finalize("choice of engines");

  int64_t candidates = 0, count = 0;
  const auto engines_of = [&](int64_t room, int64_t* written, cudnnBackendDescriptor_t* to) {
    check(cudnnBackendGetAttribute(choice.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                   room, written, to),
          "engines");
  };
  engines_of(0, &candidates, nullptr);
  std::vector<CudnnObject> configs;
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (int64_t i = 0; i < candidates; i++) {
    configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    pointers.push_back(configs.back().get());
  }
  if (candidates > 0) engines_of(candidates, &count, pointers.data());
  for (int64_t i = 0; i < std::min<int64_t>(count, built); i++) {
    CudnnObject plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[static_cast<size_t>(i)])
        .set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
    const cudnnStatus_t status = cudnnBackendFinalize(plan.get());
    if (status != CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER) check(status, "execution plan");
  }
  return count;
}

}  // namespace shoal::testing
