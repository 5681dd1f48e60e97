#include "core/backend/cuda/error.h"

#include <cuda_runtime_api.h>

#include <array>

#include "core/base/error.h"

namespace shoal::cuda {

namespace {

constexpr size_t kNamed = 4;
struct Recent {
  std::array<const char*, kNamed> names{};
  size_t count = 0;
};
Recent& recent() {
  static thread_local Recent mine;
  return mine;
}

}  // namespace

void note_kernel(const char* name) {
  Recent& r = recent();
  r.names[r.count++ % kNamed] = name;
}

std::string recent_kernels() {
  const Recent& r = recent();
  std::string list;
  for (size_t i = 0; i < kNamed && i < r.count; i++) {
    list += str(i == 0 ? "" : ", ", r.names[(r.count - 1 - i) % kNamed]);
  }
  return list;
}

namespace {

[[noreturn]] void fail(const std::string& what, int status) {
  const auto error = static_cast<cudaError_t>(status);
  cudaGetLastError();  // an error that does not stay is reported once
  const std::string kernels = recent_kernels();
  throw Error(
      str("cuda: ", what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ')',
          kernels.empty() ? "" : "; it may come from a kernel launched before: ", kernels,
          kernels.empty() ? "" : ", ...; with CUDA_LAUNCH_BLOCKING=1 the call after the right one fails"));
}

}  // namespace

void check_call(int status, const char* call) {
  if (status != cudaSuccess) fail(std::string(call, std::string_view(call).find('(')), status);
}

void check_launch(const char* kernel, int status) {
  if (status != cudaSuccess) fail(str("kernel ", kernel, " cannot be launched"), status);
}

}  // namespace shoal::cuda
