// Kernels of the optimizers: one pass over flat memory, on the calling thread (an optimizer cuts its
// parameters into blocks and gives them to the threads). No gradients here.
#pragma once

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// AdamW with decoupled decay (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2). All tensors f32, or all
/// f64.
///   g = grad_scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
///   p = p - lr * weight_decay * p - lr * (m / bias_correction1) / (sqrt(v / bias_correction2) + eps)
struct AdamwStep {
  Tensor param, grad, m, v;
  double learning_rate, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  // 1 - beta^t
  double grad_scale;
};
inline constinit Kernel<void(const AdamwStep&)> adamw_step("adamw_step", [](const AdamwStep& s) {
  return Cost{.bytes = 2 * bytes_of(s.param, s.m, s.v) + bytes_of(s.grad)};
});

/// g = grad_scale * grad + weight_decay * p;  b = momentum * b + g;  p = p - lr * (nesterov ? g + momentum *
/// b : b). momentum may be undefined (plain SGD).
struct SgdStep {
  Tensor param, grad, momentum;
  double learning_rate, momentum_factor, weight_decay, grad_scale;
  bool nesterov;
};
inline constinit Kernel<void(const SgdStep&)> sgd_step("sgd_step", [](const SgdStep& s) {
  return Cost{.bytes = 2 * bytes_of(s.param, s.momentum) + bytes_of(s.grad)};
});

/// Lion (Chen et al., arXiv:2302.06675, algorithm 2). All tensors f32, or all f64.
///   g = grad_scale * grad;  c = b1 m + (1 - b1) g;  p = p - lr * (sign(c) + weight_decay * p)
///   m = b2 m + (1 - b2) g
struct LionStep {
  Tensor param, grad, m;
  double learning_rate, beta1, beta2, weight_decay, grad_scale;
};
inline constinit Kernel<void(const LionStep&)> lion_step("lion_step", [](const LionStep& s) {
  return Cost{.bytes = 2 * bytes_of(s.param, s.m) + bytes_of(s.grad)};
});

}  // namespace shoal
