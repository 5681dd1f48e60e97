#include "core/backend/cuda/cudnn_graph.h"

#include <algorithm>
#include <array>

#include "core/backend/cuda/cudnn_library.h"

namespace shoal::cuda {

namespace {

// Releases from 9.19 on call these two deprecated, older ones need them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
constexpr cudnnBackendAttributeName_t kGraphHandle = CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
                                      kPlanHandle = CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
#pragma GCC diagnostic pop

const CudnnLibrary& library() {
  std::string why;
  const CudnnLibrary* found = cudnn_library(&why);
  SHOAL_CHECK(found != nullptr, "cuDNN: ", why, "; install it, or leave SHOAL_ATTENTION unset");
  return *found;
}

}  // namespace

int64_t cudnn_alignment(cudnnDataType_t type) {
  return type == CUDNN_DATA_BFLOAT16 ? 16 : 4;
}

void check_cudnn(cudnnStatus_t status, const std::string& what) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  std::array<char, 1024> text{};
  library().last_error_string(text.data(), text.size());
  throw CudnnError(status,
                   str("cuDNN: ", what, ": ", library().error_string(status), ' ', text.data(),
                       "; SHOAL_ATTENTION=own does without cuDNN, CUDNN_LOGLEVEL_DBG=2 makes it say more"));
}

CudnnObject::CudnnObject(cudnnBackendDescriptorType_t type) {
  cudnnBackendDescriptor_t made = nullptr;
  check_cudnn(library().create_descriptor(type, &made), str("object of type ", static_cast<int>(type)));
  object_.reset(made, [](cudnnBackendDescriptor_t object) { library().destroy_descriptor(object); });
}

CudnnObject& CudnnObject::set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                              int64_t count, const void* values) {
  check_cudnn(library().set_attribute(get(), name, type, count, values),
              str("attribute ", static_cast<int>(name)));
  return *this;
}

CudnnObject& CudnnObject::set(cudnnBackendAttributeName_t name, const std::vector<CudnnObject>& objects) {
  std::vector<cudnnBackendDescriptor_t> pointers;
  for (const CudnnObject& object : objects) pointers.push_back(object.get());
  return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(pointers.size()), pointers.data());
}

CudnnObject& CudnnObject::finalize(const std::string& what) {
  check_cudnn(library().finalize(get()), what);
  return *this;
}

namespace {

int64_t number_of(const CudnnObject& object, cudnnBackendAttributeName_t name, const char* what) {
  int64_t value = 0, count = 0;
  check_cudnn(library().get_attribute(object.get(), name, CUDNN_TYPE_INT64, 1, &count, &value), what);
  return value;
}

}  // namespace

bool CudnnEngine::deterministic() const {
  CudnnObject engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t to = engine.get();
  int64_t count = 0;
  check_cudnn(library().get_attribute(config_.get(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                      CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &to),
              "engine of a configuration");
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes{};
  check_cudnn(library().get_attribute(engine.get(), CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                      CUDNN_TYPE_NUMERICAL_NOTE, std::ssize(notes), &count, notes.data()),
              "notes of an engine");
  const auto end = notes.begin() + std::min<int64_t>(count, std::ssize(notes));
  return std::find(notes.begin(), end, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) == end;
}

int64_t CudnnEngine::workspace_bytes() const {
  return number_of(config_, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, "workspace of an engine");
}

CudnnObject CudnnEngine::plan(const CudnnTarget& target, const std::string& what) const {
  CudnnObject plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config_);
  if (target.handle != nullptr) plan.set(kPlanHandle, target.handle);
  if (target.described != nullptr) plan.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, *target.described);
  return plan.finalize("plan of " + what);
}

CudnnObject CudnnGraph::tensor(int64_t id, cudnnDataType_t type, const std::vector<int64_t>& sizes,
                               const std::vector<int64_t>& strides) {
  CudnnObject tensor(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, std::vector{id})
      .set(CUDNN_ATTR_TENSOR_DATA_TYPE, type)
      .set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes)
      .set(CUDNN_ATTR_TENSOR_STRIDES, strides)
      .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, std::vector{cudnn_alignment(type)});
  return tensor;
}

CudnnObject CudnnGraph::real(int64_t id, cudnnDataType_t type, const std::vector<int64_t>& sizes,
                             const std::vector<int64_t>& strides) {
  return tensor(id, type, sizes, strides).finalize("tensor of " + name_);
}

CudnnObject CudnnGraph::host_scalar(int64_t id, int64_t dims) {
  constexpr bool kYes = true;
  const std::vector<int64_t> one(static_cast<size_t>(dims), 1);
  return tensor(id, CUDNN_DATA_FLOAT, one, one)
      .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &kYes)
      .finalize("number of " + name_);
}

CudnnObject CudnnGraph::inner(cudnnDataType_t type, const std::vector<int64_t>& sizes,
                              const std::vector<int64_t>& strides) {
  constexpr bool kYes = true;
  return tensor(next_inner_id_++, type, sizes, strides)
      .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &kYes)
      .finalize("inner tensor of " + name_);
}

void CudnnGraph::matmul(const CudnnObject& a, const CudnnObject& b, const CudnnObject& c) {
  CudnnObject how(CUDNN_BACKEND_MATMUL_DESCRIPTOR), operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  how.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT).finalize("matmul");
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, a)
      .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, b)
      .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, c)
      .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
  add(operation.finalize("matmul of " + name_));
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
  add(operation.finalize("pointwise operation of " + name_));
}

void CudnnGraph::reduce(cudnnReduceTensorOp_t op, const CudnnObject& x, const CudnnObject& y) {
  CudnnObject how(CUDNN_BACKEND_REDUCTION_DESCRIPTOR),
      operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  how.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op)
      .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, how.finalize("reduction"))
      .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x)
      .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
  add(operation.finalize("reduction of " + name_));
}

void CudnnGraph::reshape(const CudnnObject& x, const CudnnObject& y) {
  CudnnObject operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x).set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
  add(operation.finalize("reshape of " + name_));
}

std::vector<CudnnEngine> CudnnGraph::engines(const CudnnTarget& target) const {
  CudnnObject graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operations_);
  if (target.handle != nullptr) graph.set(kGraphHandle, target.handle);
  graph.finalize(name_);
  constexpr cudnnBackendHeurMode_t kMode = CUDNN_HEUR_MODE_A;
  CudnnObject choice(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  choice.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
      .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &kMode);
  if (target.described != nullptr) choice.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *target.described);
  choice.finalize("engines for " + name_);

  const auto results = [&](int64_t room, cudnnBackendDescriptor_t* to) {
    int64_t count = 0;
    check_cudnn(library().get_attribute(choice.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                        CUDNN_TYPE_BACKEND_DESCRIPTOR, room, &count, to),
                "engines for " + name_);
    return count;
  };
  std::vector<CudnnEngine> engines;
  std::vector<cudnnBackendDescriptor_t> pointers;
  const int64_t candidates = results(0, nullptr);
  for (int64_t i = 0; i < candidates; i++) {
    const CudnnObject config(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    pointers.push_back(config.get());
    engines.emplace_back(config);
  }
  const int64_t count = candidates == 0 ? 0 : results(candidates, pointers.data());
  engines.erase(engines.begin() + std::min(count, candidates), engines.end());
  return engines;
}

int64_t plan_workspace_bytes(const CudnnObject& plan) {
  return number_of(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, "workspace of a plan");
}

void execute(cudnnHandle_t handle, const CudnnObject& plan, const std::vector<int64_t>& ids,
             const std::vector<void*>& pointers, void* workspace, const std::string& what) {
  CudnnObject pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, ids)
      .set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, std::ssize(pointers), pointers.data())
      .set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace)
      .finalize("pointers of " + what);
  check_cudnn(library().execute(handle, plan.get(), pack.get()), what);
}

}  // namespace shoal::cuda
