// Calls of the attention kernels, for tests of their results on the CPU and on the emulated device.
#pragma once

#include "core/ops/attention.h"
#include "tests/cuda/support.h"
#include "tests/support/attention_cases.h"

namespace shoal::testing {

inline AttentionSpec on(const AttentionSpec& spec, Device device) {
  AttentionSpec moved = spec;
  if (spec.document_BS) moved.document_BS = spec.document_BS.to(device);
  if (spec.alibi_slopes_H) moved.alibi_slopes_H = spec.alibi_slopes_H.to(device);
  return moved;
}

/// y and lse.
inline Tensors forward(const Tensor& qkv, const AttentionSpec& spec) {
  const Device device = qkv.device();
  const Tensor y = Tensor::empty({spec.batch * spec.seq, spec.heads * spec.head_size}, qkv.dtype(), device);
  const Tensor lse = Tensor::empty({spec.batch * spec.seq, spec.heads}, stats_dtype(qkv.dtype()), device);
  const auto& kernel = qkv.dtype() == DType::bf16 ? bf16_attention_fwd : attention_fwd;
  kernel(device, qkv, on(spec, device), y, lse);
  return {y, lse};
}

/// dqkv, for y and lse that the same device has computed.
inline Tensors backward(const Tensor& qkv, const Tensor& dy, const AttentionSpec& spec) {
  const Device device = qkv.device();
  const Tensors results = forward(qkv, spec);
  const Tensor dqkv = Tensor::empty(qkv.shape(), qkv.dtype(), device);
  const auto& kernel = qkv.dtype() == DType::bf16 ? bf16_attention_bwd : attention_bwd;
  kernel(device, {.dy = dy, .qkv = qkv, .y = results[0], .lse = results[1], .dqkv = dqkv}, on(spec, device));
  return {dqkv};
}

}  // namespace shoal::testing
