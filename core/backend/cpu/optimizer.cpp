// CPU kernels of core/ops/optimizer.h.
#include "core/ops/optimizer.h"

#include <cmath>

#include "core/backend/cpu/isa.h"

// clang-format off
SHOAL_KERNELS_BEGIN
// clang-format on

void adamw_step_impl(const AdamwStep& s) {
  dispatch_float(s.param.dtype(), "adamw_step", [&]<class T>() {
    T* p = s.param.data<T>();
    const T* g = s.grad.data<T>();
    T* m = s.m.data<T>();
    T* v = s.v.data<T>();
    const T b1 = static_cast<T>(s.beta1), b2 = static_cast<T>(s.beta2), eps = static_cast<T>(s.eps);
    const T one_minus_b1 = static_cast<T>(1 - s.beta1), one_minus_b2 = static_cast<T>(1 - s.beta2);
    const T keep = static_cast<T>(1 - s.learning_rate * s.weight_decay);
    const T step = static_cast<T>(s.learning_rate / s.bias_correction1);
    const T inverse_bc2 = static_cast<T>(1 / s.bias_correction2), grad_scale = static_cast<T>(s.grad_scale);
    const int64_t n = s.param.numel();
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
      const T grad = grad_scale * g[i];
      m[i] = b1 * m[i] + one_minus_b1 * grad;
      v[i] = b2 * v[i] + one_minus_b2 * grad * grad;
      p[i] = keep * p[i] - step * m[i] / (std::sqrt(v[i] * inverse_bc2) + eps);
    }
  });
}

void sgd_step_impl(const SgdStep& s) {
  dispatch_float(s.param.dtype(), "sgd_step", [&]<class T>() {
    T* p = s.param.data<T>();
    const T* grad = s.grad.data<T>();
    const T lr = static_cast<T>(s.learning_rate), factor = static_cast<T>(s.momentum_factor);
    const T decay = static_cast<T>(s.weight_decay), grad_scale = static_cast<T>(s.grad_scale);
    T* b = s.momentum.defined() ? s.momentum.data<T>() : nullptr;
    const int64_t n = s.param.numel();
    if (b == nullptr) {
      for (int64_t i = 0; i < n; i++) p[i] -= lr * (grad_scale * grad[i] + decay * p[i]);
      return;
    }
    for (int64_t i = 0; i < n; i++) {
      const T g = grad_scale * grad[i] + decay * p[i];
      b[i] = factor * b[i] + g;
      p[i] -= lr * (s.nesterov ? g + factor * b[i] : b[i]);
    }
  });
}

void lion_step_impl(const LionStep& s) {
  dispatch_float(s.param.dtype(), "lion_step", [&]<class T>() {
    T* p = s.param.data<T>();
    T* m = s.m.data<T>();
    const T* grad = s.grad.data<T>();
    const T b1 = static_cast<T>(s.beta1), b2 = static_cast<T>(s.beta2), one = 1;
    const T lr = static_cast<T>(s.learning_rate), decay = static_cast<T>(s.weight_decay);
    const T grad_scale = static_cast<T>(s.grad_scale);
    const int64_t n = s.param.numel();
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
      const T g = grad_scale * grad[i], c = b1 * m[i] + (one - b1) * g;
      const T sign = (c > 0 ? one : T(0)) - (c < 0 ? one : T(0));
      p[i] -= lr * (sign + decay * p[i]);
      m[i] = b2 * m[i] + (one - b2) * g;
    }
  });
}

[[maybe_unused]] const bool added[] = {
    adamw_step.add(DeviceType::cpu, &adamw_step_impl, kIsaLevel),
    sgd_step.add(DeviceType::cpu, &sgd_step_impl, kIsaLevel),
    lion_step.add(DeviceType::cpu, &lion_step_impl, kIsaLevel),
};

// clang-format off
SHOAL_KERNELS_END
// clang-format on
