// Attention of a library behind the kernels of bf16_attention.cu, which ask it first.
#pragma once

#include <cstdint>

#include "core/ops/attention.h"

namespace shoal::cuda {

enum class AttentionKernels : uint8_t { own, cudnn };
/// What a value of SHOAL_ATTENTION means: own | cudnn | auto, which is own. Null is auto. Throws UsageError.
AttentionKernels attention_kernels_named(const char* name);
/// Of this process: that of SHOAL_ATTENTION. Tests may set it while no kernel runs.
AttentionKernels& attention_kernels();

/// Each puts its work into the current stream and returns true, or does nothing and returns false when the
/// library does not take the call. Null: the program was built without the library.
struct LibraryAttention {
  bool (*forward)(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) = nullptr;
  bool (*backward)(const AttentionBackward& args, const AttentionSpec& spec) = nullptr;
};
/// Registers the functions; returns true, for use in an initialiser.
bool set_library_attention(const LibraryAttention& functions);

/// Asks the library, when it is the choice. Throws UsageError when it is chosen and not part of the program.
bool attention_fwd_by_library(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y,
                              const Tensor& lse);
bool attention_bwd_by_library(const AttentionBackward& args, const AttentionSpec& spec);

}  // namespace shoal::cuda
