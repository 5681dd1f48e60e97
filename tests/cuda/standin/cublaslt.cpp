// A stand-in of cublasLt on the CPU: those of its functions that core/backend/cuda/cublas.cpp calls, with the
// prototypes of the real header. It refuses what the documentation of cublasLt forbids, and calculates with
// plain loops when its turn in the stream comes. Long sums are made of two parts, as split-K algorithms do.
#include "tests/cuda/standin/cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "tests/cuda/standin/cublaslt_problem.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/streams.h"

struct cublasLtContext {};

namespace shoal::standin {

namespace {

struct State {
  std::mutex mutex;
  std::set<const cublasLtContext*> handles;
  std::map<std::string, cublasStatus_t> failures;
  std::vector<ProductCall> calls;
};
State& state() {
  static auto* shared = new State;  // leaked: threads that end late still destroy their handles
  return *shared;
}

/// What the test wants this call to return instead of success.
cublasStatus_t planted_status(const char* function) {
  if (planted_failure(function) != 0) return CUBLAS_STATUS_EXECUTION_FAILED;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto found = s.failures.find(function);
  if (found == s.failures.end()) return CUBLAS_STATUS_SUCCESS;
  const cublasStatus_t status = found->second;
  s.failures.erase(found);
  return status;
}

bool is_handle(cublasLtHandle_t handle) {
  const std::lock_guard lock(state().mutex);
  return state().handles.contains(handle);
}

bool is_aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

/// Copies an attribute into the struct of kind T when its size is right.
template <class T, class Opaque, class Set>
cublasStatus_t set_attribute(Opaque* object, Kind kind, const void* value, const Set& set) {
  if (object == nullptr || value == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  T contents = read<T>(object);
  if (contents.kind != kind || !set(contents)) return CUBLAS_STATUS_INVALID_VALUE;
  write(object, contents);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
bool take(T& to, const void* value, size_t bytes) {
  if (bytes != sizeof to) return false;
  std::memcpy(&to, value, bytes);
  return true;
}

}  // namespace

std::vector<ProductCall> take_product_calls() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().calls, {});
}

void set_compute_capability(int value) {
  compute_capability() = value;
}

void fail_next_call(const std::string& function, int status) {
  const std::lock_guard lock(state().mutex);
  state().failures[function] = static_cast<cublasStatus_t>(status);
}

}  // namespace shoal::standin

using namespace shoal::standin;  // NOLINT: the functions below belong to no namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  if (const cublasStatus_t planted = planted_status("cublasLtCreate"); planted != CUBLAS_STATUS_SUCCESS)
    return planted;
  *handle = new cublasLtContext;
  const std::lock_guard lock(state().mutex);
  state().handles.insert(*handle);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  const std::lock_guard lock(state().mutex);
  if (state().handles.erase(handle) == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
      return "another cublasStatus_t";
  }
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t columns,
                                                 int64_t ld) {
  if (size < sizeof(cublasLtMatrixLayoutOpaque_t)) return CUBLAS_STATUS_ALLOC_FAILED;
  write(layout, Layout{Kind::layout, type, rows, columns, ld});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t how, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  if (size < sizeof(cublasLtMatmulDescOpaque_t)) return CUBLAS_STATUS_ALLOC_FAILED;
  write(how, How{Kind::how, compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, 0, 0, nullptr, nullptr});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t how, cublasLtMatmulDescAttributes_t which,
                                              const void* value, size_t bytes) {
  return set_attribute<How>(how, Kind::how, value, [&](How& h) {
    switch (which) {
      case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(h.transpose_a, value, bytes);
      case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(h.transpose_b, value, bytes);
      case CUBLASLT_MATMUL_DESC_A_SCALE_MODE:
        return take(h.scale_mode_a, value, bytes);
      case CUBLASLT_MATMUL_DESC_B_SCALE_MODE:
        return take(h.scale_mode_b, value, bytes);
      case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER:
        return take(h.scale_a, value, bytes);
      case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER:
        return take(h.scale_b, value, bytes);
      default:
        return false;
    }
  });
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size) {
  if (size < sizeof(cublasLtMatmulPreferenceOpaque_t)) return CUBLAS_STATUS_ALLOC_FAILED;
  write(preference, Preference{Kind::preference, 0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}});
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t which,
                                                    const void* value, size_t bytes) {
  return set_attribute<Preference>(preference, Kind::preference, value, [&](Preference& p) {
    switch (which) {
      case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return take(p.max_workspace, value, bytes);
      case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return take(p.reductions, value, bytes);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return take(p.alignment[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
      default:
        return false;
    }
  });
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t how,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
  if (const cublasStatus_t planted = planted_status("cublasLtMatmulAlgoGetHeuristic");
      planted != CUBLAS_STATUS_SUCCESS)
    return planted;
  if (!is_handle(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  Problem p;
  const cublasStatus_t status = understand(how, a, b, c, d, p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto prefer = read<Preference>(preference);
  if (wanted < 1 || prefer.kind != Kind::preference) return CUBLAS_STATUS_INVALID_VALUE;
  if (is_fp8(p.a.type) && *std::ranges::min_element(prefer.alignment) < 16)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  // Long sums are split when that is allowed, and everything wants to be read as wide as it lies.
  constexpr uint64_t kLongSum = 64;
  const bool may_split = (prefer.reductions & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) != 0 &&
                         workspace_for(p, 2) <= prefer.max_workspace;
  const uint32_t parts = may_split && p.k >= kLongSum ? 2 : 1;
  results[0] = {};
  const uint32_t alignment = std::min(16U, *std::ranges::min_element(prefer.alignment));
  write(&results[0].algo, algorithm_for(p, alignment, parts));
  results[0].workspaceSize = workspace_for(p, parts);
  results[0].state = CUBLAS_STATUS_SUCCESS;
  results[0].wavesCount = 1;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t how,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (const cublasStatus_t planted = planted_status("cublasLtMatmulAlgoCheck");
      planted != CUBLAS_STATUS_SUCCESS)
    return planted;
  if (!is_handle(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  Problem p;
  const cublasStatus_t status = understand(how, a, b, c, d, p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const auto chosen = read<Algorithm>(algorithm);
  if (!fits(chosen, p)) return CUBLAS_STATUS_INVALID_VALUE;
  result->workspaceSize = workspace_for(p, chosen.parts);
  result->state = CUBLAS_STATUS_SUCCESS;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t how, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  if (const cublasStatus_t planted = planted_status("cublasLtMatmul"); planted != CUBLAS_STATUS_SUCCESS)
    return planted;
  if (!is_handle(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
  Problem p;
  const cublasStatus_t status = understand(how, a_layout, b_layout, c_layout, d_layout, p);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (alpha == nullptr || beta == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  if (algorithm == nullptr) return CUBLAS_STATUS_INVALID_VALUE;  // the library would ask itself, at each call
  const auto chosen = read<Algorithm>(algorithm);
  const size_t needed = workspace_for(p, chosen.parts);
  if (!fits(chosen, p) || workspace_bytes < needed || (needed > 0 && workspace == nullptr) ||
      !is_aligned(workspace, 16))
    return CUBLAS_STATUS_INVALID_VALUE;
  for (const void* data : {a, b, c, static_cast<const void*>(d)}) {
    if (!is_aligned(data, chosen.alignment)) return CUBLAS_STATUS_INVALID_VALUE;
  }
  const bool f64 = p.how.scale == CUDA_R_64F;
  const auto scalar = [f64](const void* from) {
    return f64 ? *static_cast<const double*>(from) : double{*static_cast<const float*>(from)};
  };
  const Work work{p, chosen.parts, scalar(alpha), scalar(beta), a, b, c, d, workspace};
  {
    const std::lock_guard lock(state().mutex);
    state().calls.push_back({p.m, p.n, p.k, stream, workspace_bytes, p.a.type, p.b.type});
  }
  enqueue(stream, "cublasLtMatmul", [work] { calculate(work); });
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
