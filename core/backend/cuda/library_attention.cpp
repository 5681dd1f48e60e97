#include "core/backend/cuda/library_attention.h"

#include <cstdlib>
#include <string_view>

namespace shoal::cuda {

namespace {

constinit LibraryAttention registered;

const LibraryAttention& library() {
  if (registered.forward == nullptr)
    throw UsageError(
        "SHOAL_ATTENTION=cudnn, but this program was built without cudnn.h; install cuDNN and configure "
        "again, or "
        "leave SHOAL_ATTENTION unset");
  return registered;
}

}  // namespace

AttentionKernels attention_kernels_named(const char* name) {
  const std::string_view value = name == nullptr ? "" : name;
  if (value.empty() || value == "auto" || value == "own") return AttentionKernels::own;
  if (value == "cudnn") return AttentionKernels::cudnn;
  throw UsageError(str("SHOAL_ATTENTION: expected auto, own or cudnn, got '", value, "'"));
}

AttentionKernels& attention_kernels() {
  static AttentionKernels kernels = attention_kernels_named(std::getenv("SHOAL_ATTENTION"));
  return kernels;
}

bool set_library_attention(const LibraryAttention& functions) {
  registered = functions;
  return true;
}

bool attention_fwd_by_library(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y,
                              const Tensor& lse) {
  return attention_kernels() == AttentionKernels::cudnn && library().forward(qkv, spec, y, lse);
}

bool attention_bwd_by_library(const AttentionBackward& args, const AttentionSpec& spec) {
  return attention_kernels() == AttentionKernels::cudnn && library().backward(args, spec);
}

}  // namespace shoal::cuda
