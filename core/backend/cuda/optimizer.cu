// CUDA kernels of core/ops/optimizer.h.
#include "core/ops/optimizer.h"

#include <cmath>

#include "core/backend/cuda/map.h"

namespace shoal::cuda {
namespace {

template <class T>
struct Adamw {
  static constexpr int kPack = cuda::kPack<T>;
  T* param;
  const T* grad;
  T *m, *v;
  T beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
  T keep, step, inverse_correction2, grad_scale;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    auto p = load<N>(param + i), mean = load<N>(m + i), square = load<N>(v + i);
    const auto g = load<N>(grad + i);
    for (int j = 0; j < N; j++) {
      const T scaled = grad_scale * g.v[j];
      mean.v[j] = beta1 * mean.v[j] + one_minus_beta1 * scaled;
      square.v[j] = beta2 * square.v[j] + one_minus_beta2 * scaled * scaled;
      p.v[j] = keep * p.v[j] - step * mean.v[j] / (std::sqrt(square.v[j] * inverse_correction2) + eps);
    }
    store<N>(param + i, p);
    store<N>(m + i, mean);
    store<N>(v + i, square);
  }
};

void adamw_step_impl(const AdamwStep& s) {
  dispatch_float(s.param.dtype(), "adamw_step", [&]<class T>() {
    const Adamw<T> body{s.param.data<T>(),
                        s.grad.data<T>(),
                        s.m.data<T>(),
                        s.v.data<T>(),
                        static_cast<T>(s.beta1),
                        static_cast<T>(s.beta2),
                        static_cast<T>(1 - s.beta1),
                        static_cast<T>(1 - s.beta2),
                        static_cast<T>(s.eps),
                        static_cast<T>(1 - s.learning_rate * s.weight_decay),
                        static_cast<T>(s.learning_rate / s.bias_correction1),
                        static_cast<T>(1 / s.bias_correction2),
                        static_cast<T>(s.grad_scale)};
    map(s.param.device(), s.param.numel(), all_aligned({body.param, body.grad, body.m, body.v}), body);
  });
}

template <class T>
struct Sgd {
  static constexpr int kPack = cuda::kPack<T>;
  T* param;
  const T* grad;
  T* momentum;  // null: plain SGD
  T learning_rate, momentum_factor, decay, grad_scale;
  bool nesterov;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    auto p = load<N>(param + i), g = load<N>(grad + i);
    for (int j = 0; j < N; j++) g.v[j] = grad_scale * g.v[j] + decay * p.v[j];
    if (momentum != nullptr) {
      auto b = load<N>(momentum + i);
      for (int j = 0; j < N; j++) {
        b.v[j] = momentum_factor * b.v[j] + g.v[j];
        g.v[j] = nesterov ? g.v[j] + momentum_factor * b.v[j] : b.v[j];
      }
      store<N>(momentum + i, b);
    }
    for (int j = 0; j < N; j++) p.v[j] -= learning_rate * g.v[j];
    store<N>(param + i, p);
  }
};

void sgd_step_impl(const SgdStep& s) {
  dispatch_float(s.param.dtype(), "sgd_step", [&]<class T>() {
    const Sgd<T> body{s.param.data<T>(),
                      s.grad.data<T>(),
                      data_or_null<T>(s.momentum),
                      static_cast<T>(s.learning_rate),
                      static_cast<T>(s.momentum_factor),
                      static_cast<T>(s.weight_decay),
                      static_cast<T>(s.grad_scale),
                      s.nesterov};
    map(s.param.device(), s.param.numel(), all_aligned({body.param, body.grad, body.momentum}), body);
  });
}

template <class T>
struct Lion {
  static constexpr int kPack = cuda::kPack<T>;
  T* param;
  const T* grad;
  T* m;
  T learning_rate, beta1, beta2, one_minus_beta1, one_minus_beta2, decay, grad_scale;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    auto p = load<N>(param + i), mean = load<N>(m + i);
    const auto gradient = load<N>(grad + i);
    for (int j = 0; j < N; j++) {
      const T g = grad_scale * gradient.v[j], c = beta1 * mean.v[j] + one_minus_beta1 * g;
      const T sign = (c > 0 ? T(1) : T(0)) - (c < 0 ? T(1) : T(0));
      p.v[j] -= learning_rate * (sign + decay * p.v[j]);
      mean.v[j] = beta2 * mean.v[j] + one_minus_beta2 * g;
    }
    store<N>(param + i, p);
    store<N>(m + i, mean);
  }
};

void lion_step_impl(const LionStep& s) {
  dispatch_float(s.param.dtype(), "lion_step", [&]<class T>() {
    const Lion<T> body{s.param.data<T>(),
                       s.grad.data<T>(),
                       s.m.data<T>(),
                       static_cast<T>(s.learning_rate),
                       static_cast<T>(s.beta1),
                       static_cast<T>(s.beta2),
                       T(1) - static_cast<T>(s.beta1),
                       T(1) - static_cast<T>(s.beta2),
                       static_cast<T>(s.weight_decay),
                       static_cast<T>(s.grad_scale)};
    map(s.param.device(), s.param.numel(), all_aligned({body.param, body.grad, body.m}), body);
  });
}

[[maybe_unused]] const bool added[] = {
    adamw_step.add(DeviceType::cuda, &adamw_step_impl),
    sgd_step.add(DeviceType::cuda, &sgd_step_impl),
    lion_step.add(DeviceType::cuda, &lion_step_impl),
};

}  // namespace
}  // namespace shoal::cuda
