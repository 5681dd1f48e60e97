// A stand-in of cuDNN on the CPU: those of its functions that core/backend/cuda/cudnn_library.h lists, with
// the prototypes of the real header. It keeps descriptors and their attributes, refuses what the library
// refuses as far as that is known (tests/cuda/cudnn asks the library), and interprets graphs when their turn
// in the stream comes. Three engines take each graph: one that is not deterministic, one whose plan cannot be
// made, and one that works.
#include "tests/cuda/standin/cudnn.h"

#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "tests/cuda/standin/cudnn_interpreter.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

namespace {

enum EngineIndex : int64_t { kNondeterministic, kNoPlan, kWorks, kNumEngines };

struct State {
  std::mutex mutex;
  std::set<const cudnnContext*> handles;
  std::map<std::string, cudnnStatus_t> failures;
  CudnnCounts counts;
};
State& state() {
  static auto* shared = new State;  // leaked: threads that end late still destroy their handles
  return *shared;
}

cudnnStatus_t planted_failure(const char* function) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().failures.find(function);
  if (found == state().failures.end()) return CUDNN_STATUS_SUCCESS;
  const cudnnStatus_t status = found->second;
  state().failures.erase(found);
  return status;
}
bool is_handle(cudnnHandle_t handle) {
  const std::lock_guard lock(state().mutex);
  return state().handles.contains(handle);
}

/// What a cudnnBackendDescriptor_t points to.
using Box = std::shared_ptr<Descriptor>;
Descriptor& descriptor_of(cudnnBackendDescriptor_t object) {
  return **static_cast<Box*>(object);
}

size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    default:
      return 4;  // enumerations
  }
}
template <class T>
void put(Descriptor& to, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T value) {
  Attribute a{type, 1, std::vector<char>(sizeof value), {}};
  std::memcpy(a.bytes.data(), &value, sizeof value);
  to.attributes[name] = a;
}
void put(Descriptor& to, cudnnBackendAttributeName_t name, Object object) {
  to.attributes[name] = {CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, {}, {std::move(object)}};
}

cudnnStatus_t check_tensor(const Descriptor& d) {
  for (const auto name :
       {CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_ATTR_TENSOR_DIMENSIONS,
        CUDNN_ATTR_TENSOR_STRIDES, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT}) {
    if (!d.has(name)) return CUDNN_STATUS_BAD_PARAM;
  }
  const TensorInfo t(d);
  if (t.sizes.size() != t.strides.size() || t.sizes.size() > CUDNN_DIM_MAX) return CUDNN_STATUS_BAD_PARAM;
  for (size_t i = 0; i < t.sizes.size(); i++) {
    if (t.sizes[i] < 1 || t.strides[i] < 1) return CUDNN_STATUS_BAD_PARAM;
  }
  const bool aligned = t.alignment > 0 && t.alignment % static_cast<int64_t>(bytes_of(t.type)) == 0;
  return aligned && !(t.inner && t.host) ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

int64_t products_of(const Descriptor& graph) {
  return std::ranges::count_if(
      graph.attributes.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).objects,
      [](const Object& op) { return op->type == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR; });
}
constexpr int64_t kBackwardProducts = 5;

/// What the library's fused engines take on every GPU: rows of multiples of 16 bytes, backward up to 128
/// elements.
bool engines_take(const Descriptor& graph) {
  const int64_t products = products_of(graph);
  if (products != 2 && products != kBackwardProducts) return false;
  const int64_t largest = products == 2 ? INT64_MAX : 128;
  for (const auto& [id, t] : tensors_of(graph)) {
    if (t.inner || t.type != CUDNN_DATA_BFLOAT16) continue;
    const bool columns = t.strides[2] == 1;
    const int64_t size = t.sizes[columns ? 2 : 3];
    if ((t.strides[3] != 1 && !columns) || size % 8 != 0 || size > largest) return false;
  }
  return true;
}
int64_t workspace_of(const Descriptor& graph) {
  if (products_of(graph) != kBackwardProducts) return 256;
  int64_t largest = 0;  // scores
  for (const auto& [id, t] : tensors_of(graph)) largest = std::max(largest, t.count());
  return 2 * largest;
}

Object config_for(const Object& graph, int64_t index) {
  const auto engine = std::make_shared<Descriptor>(Descriptor{CUDNN_BACKEND_ENGINE_DESCRIPTOR, true, {}});
  put(*engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph);
  put(*engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, index);
  put(*engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
      index == kNondeterministic ? CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC : CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
  const auto config = std::make_shared<Descriptor>(Descriptor{CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, true, {}});
  put(*config, CUDNN_ATTR_ENGINECFG_ENGINE, engine);
  put(*config, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, workspace_of(*graph));
  return config;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
constexpr cudnnBackendAttributeName_t kGraphHandle = CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
                                      kPlanHandle = CUDNN_ATTR_EXECUTION_PLAN_HANDLE;
#pragma GCC diagnostic pop

cudnnStatus_t finalize_plan(Descriptor& plan) {
  if (!plan.has(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) || !plan.has(kPlanHandle))
    return CUDNN_STATUS_BAD_PARAM;
  if (!is_handle(plan.value<cudnnHandle_t>(kPlanHandle))) return CUDNN_STATUS_NOT_INITIALIZED;
  const Descriptor& config = plan.object(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  if (config.object(CUDNN_ATTR_ENGINECFG_ENGINE).value<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX) == kNoPlan)
    return CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH;
  put(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
      config.value<int64_t>(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE));
  const std::lock_guard lock(state().mutex);
  state().counts.plans++;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t check_finalize(Descriptor& d) {
  switch (d.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      return check_tensor(d);
    case CUDNN_BACKEND_MATMUL_DESCRIPTOR:
      return d.has(CUDNN_ATTR_MATMUL_COMP_TYPE) ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
    case CUDNN_BACKEND_POINTWISE_DESCRIPTOR:
      return d.has(CUDNN_ATTR_POINTWISE_MODE) && d.has(CUDNN_ATTR_POINTWISE_MATH_PREC)
                 ? CUDNN_STATUS_SUCCESS
                 : CUDNN_STATUS_BAD_PARAM;
    case CUDNN_BACKEND_REDUCTION_DESCRIPTOR:
      return d.has(CUDNN_ATTR_REDUCTION_OPERATOR) && d.has(CUDNN_ATTR_REDUCTION_COMP_TYPE)
                 ? CUDNN_STATUS_SUCCESS
                 : CUDNN_STATUS_BAD_PARAM;
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      if (!d.has(CUDNN_ATTR_OPERATIONGRAPH_OPS) || !d.has(kGraphHandle)) return CUDNN_STATUS_BAD_PARAM;
      return check_graph(d);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      return d.has(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) && d.has(CUDNN_ATTR_ENGINEHEUR_MODE)
                 ? CUDNN_STATUS_SUCCESS
                 : CUDNN_STATUS_BAD_PARAM;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      return finalize_plan(d);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
      return d.has(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS) && d.has(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS) &&
                     d.attributes.at(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS).count ==
                         d.attributes.at(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS).count
                 ? CUDNN_STATUS_SUCCESS
                 : CUDNN_STATUS_BAD_PARAM;
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      return check_operation(d);
    default:
      return CUDNN_STATUS_NOT_SUPPORTED;
  }
}

struct Memory {
  std::map<int64_t, void*> pointers;
  std::map<int64_t, float> numbers;
};
/// What the pack says of the graph's tensors that lie in memory.
cudnnStatus_t memory_of(const Descriptor& graph, const Descriptor& pack, Memory& out) {
  const auto ids = pack.values<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = pack.values<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  std::map<int64_t, void*> given;
  for (size_t i = 0; i < ids.size(); i++) given[ids[i]] = pointers[i];
  for (const auto& [id, t] : tensors_of(graph)) {
    if (t.inner) continue;
    const auto found = given.find(id);
    if (found == given.end() || found->second == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (reinterpret_cast<uintptr_t>(found->second) % static_cast<uintptr_t>(t.alignment) != 0)
      return CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
    if (t.host == in_arena(found->second)) return CUDNN_STATUS_BAD_PARAM;
    if (t.host) {
      out.numbers[id] = *static_cast<const float*>(found->second);
    } else {
      out.pointers[id] = found->second;
    }
  }
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

CudnnCounts take_cudnn_counts() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().counts, {});
}

void fail_next_cudnn_call(const std::string& function, int status) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = static_cast<cudnnStatus_t>(status);
}

}  // namespace shoal::standin

using namespace shoal::standin;  // NOLINT: the functions below belong to no namespace

extern "C" {

size_t cudnnGetVersion() {
  return CUDNN_VERSION;
}

const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_BAD_PARAM:
      return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER:
      return "CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER";
    case CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH:
      return "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH";
    case CUDNN_STATUS_EXECUTION_FAILED:
      return "CUDNN_STATUS_EXECUTION_FAILED";
    default:
      return "another cudnnStatus_t";
  }
}

void cudnnGetLastErrorString(char* message, size_t max_size) {
  if (max_size > 0) message[0] = '\0';
}

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  if (const auto planted = planted_failure("cudnnCreate"); planted != CUDNN_STATUS_SUCCESS) return planted;
  *handle = new cudnnContext;
  const std::lock_guard lock(state().mutex);
  state().handles.insert(*handle);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  const std::lock_guard lock(state().mutex);
  if (state().handles.erase(handle) == 0) return CUDNN_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  if (!is_handle(handle)) return CUDNN_STATUS_NOT_INITIALIZED;
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* object) {
  *object = new Box(std::make_shared<Descriptor>(Descriptor{type, false, {}}));
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t object) {
  delete static_cast<Box*>(object);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t object, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  Descriptor& d = descriptor_of(object);
  if (d.finalized || count < 1 || values == nullptr) return CUDNN_STATUS_BAD_PARAM;
  Attribute a{type, count, {}, {}};
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (int64_t i = 0; i < count; i++) {
      const Box& box = *static_cast<Box*>(static_cast<const cudnnBackendDescriptor_t*>(values)[i]);
      if (!box->finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
      a.objects.push_back(box);
    }
  } else {
    const auto* bytes = static_cast<const char*>(values);
    a.bytes.assign(bytes, bytes + static_cast<size_t>(count) * size_of(type));
  }
  d.attributes[name] = a;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t object, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t* count,
                                       void* values) {
  const Descriptor& d = descriptor_of(object);
  if (!d.finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  const auto fill = [&](int64_t i, const Object& with) {
    descriptor_of(static_cast<cudnnBackendDescriptor_t*>(values)[i]) = *with;
  };
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    const Object& graph = d.attributes.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH).objects[0];
    *count = engines_take(*graph) ? int64_t{kNumEngines} : 0;
    for (int64_t i = 0; i < std::min(room, *count); i++) fill(i, config_for(graph, i));
    return CUDNN_STATUS_SUCCESS;
  }
  if (!d.has(name) || d.attributes.at(name).type != type || room < 1) return CUDNN_STATUS_BAD_PARAM;
  const Attribute& a = d.attributes.at(name);
  *count = a.count;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    fill(0, a.objects[0]);
  } else {
    std::memcpy(values, a.bytes.data(), std::min(a.bytes.size(), static_cast<size_t>(room) * size_of(type)));
  }
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t object) {
  if (const auto planted = planted_failure("cudnnBackendFinalize"); planted != CUDNN_STATUS_SUCCESS)
    return planted;
  Descriptor& d = descriptor_of(object);
  if (d.finalized) return CUDNN_STATUS_BAD_PARAM;
  const cudnnStatus_t status = check_finalize(d);
  d.finalized = status == CUDNN_STATUS_SUCCESS;
  return status;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan_object,
                                  cudnnBackendDescriptor_t pack_object) {
  if (const auto planted = planted_failure("cudnnBackendExecute"); planted != CUDNN_STATUS_SUCCESS)
    return planted;
  if (!is_handle(handle)) return CUDNN_STATUS_NOT_INITIALIZED;
  const Box plan = *static_cast<Box*>(plan_object);
  const Descriptor& pack = descriptor_of(pack_object);
  if (!plan->finalized || !pack.finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
  const Descriptor& engine =
      plan->object(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG).object(CUDNN_ATTR_ENGINECFG_ENGINE);
  if (engine.value<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX) != kWorks) return CUDNN_STATUS_EXECUTION_FAILED;
  const Object graph = engine.attributes.at(CUDNN_ATTR_ENGINE_OPERATION_GRAPH).objects[0];
  Memory memory;
  if (const auto status = memory_of(*graph, pack, memory); status != CUDNN_STATUS_SUCCESS) return status;
  const auto needed = static_cast<size_t>(plan->value<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE));
  void* workspace = pack.has(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)
                        ? pack.value<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)
                        : nullptr;
  if (needed > 0 && workspace == nullptr) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
  {
    const std::lock_guard lock(state().mutex);
    state().counts.executions++;
  }
  enqueue(handle->stream, "cudnnBackendExecute", [graph, memory, workspace, needed] {
    check_device_range(workspace, needed, "workspace of a cuDNN plan");
    will_write(workspace, needed);
    std::memset(workspace, 0xA5, needed);
    interpret(*graph, memory.pointers, memory.numbers);
    std::memset(workspace, 0x5A, needed);  // whoever had part of it finds that out
  });
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
