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

/// y and lse of a part.
inline Tensors part_forward(const Tensor& qkv, const Tensor& kv, const PartCase& p) {
  const Device device = qkv.device();
  const int64_t rows = p.spec.batch * p.part.queries.rows();
  const Tensor y = Tensor::empty({rows, p.spec.heads * p.spec.head_size}, qkv.dtype(), device);
  const Tensor lse = Tensor::empty({rows, p.spec.heads}, stats_dtype(qkv.dtype()), device);
  const auto& kernel = qkv.dtype() == DType::bf16 ? bf16_attention_part_fwd : attention_part_fwd;
  kernel(device, {qkv, kv, y, lse}, on(p.spec, device), p.part);
  return {y, lse};
}

/// dqkv, zeros in keys and values, and dkv.
inline Tensors part_backward(const Tensor& qkv, const Tensor& kv, const Tensor& dy, const PartCase& p) {
  const Device device = qkv.device();
  const Tensors results = part_forward(qkv, kv, p);
  const Tensor dqkv = Tensor::zeros(qkv.shape(), qkv.dtype(), device);
  const Tensor dkv = Tensor::empty(kv.shape(), kv.dtype(), device);
  const auto& kernel = qkv.dtype() == DType::bf16 ? bf16_attention_part_bwd : attention_part_bwd;
  kernel(device, {dy, qkv, kv, results[0], results[1], dqkv, dkv}, on(p.spec, device), p.part);
  return {dqkv, dkv};
}

}  // namespace shoal::testing
