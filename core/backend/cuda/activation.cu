// CUDA kernels of core/ops/activation.h.
#include "core/ops/activation.h"

#include <cmath>

#include "core/backend/cuda/map.h"

namespace shoal::cuda {
namespace {

#include "core/backend/functors/activation.inc"

template <class A, class T>
struct Activate {
  static constexpr int kPack = cuda::kPack<T>;
  const T* x;
  T* y;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    auto values = load<N>(x + i);
    for (int j = 0; j < N; j++) values.v[j] = A::value(values.v[j]);
    store<N>(y + i, values);
  }
};

// dx may be dy or x.
template <class A, class T>
struct ActivateBackward {
  static constexpr int kPack = cuda::kPack<T>;
  const T *dy, *x;
  T* dx;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    auto values = load<N>(dy + i);
    const auto inputs = load<N>(x + i);
    for (int j = 0; j < N; j++) values.v[j] *= A::slope(inputs.v[j]);
    store<N>(dx + i, values);
  }
};

// Rows of x are [gate | up], `width` elements each.
template <class A, class T>
struct Gated {
  static constexpr int kPack = cuda::kPack<T>;
  const T* x;
  T* y;
  int64_t width;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const T* gate = x + row * 2 * width + column;
    auto values = load<N>(gate);
    const auto up = load<N>(gate + width);
    for (int j = 0; j < N; j++) values.v[j] = A::value(values.v[j]) * up.v[j];
    store<N>(y + row * width + column, values);
  }
};

// dx may be x.
template <class A, class T>
struct GatedBackward {
  static constexpr int kPack = cuda::kPack<T>;
  const T *dy, *x;
  T* dx;
  int64_t width;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const int64_t i = row * 2 * width + column;
    auto gate = load<N>(x + i), up = load<N>(x + i + width);
    const auto d = load<N>(dy + row * width + column);
    for (int j = 0; j < N; j++) {
      const auto g = gate.v[j];
      gate.v[j] = d.v[j] * up.v[j] * A::slope(g);
      up.v[j] = d.v[j] * A::value(g);
    }
    store<N>(dx + i, gate);
    store<N>(dx + i + width, up);
  }
};

template <class F>
void with_activation(Activation f, const F& body) {
  switch (f) {
    case Activation::silu:
      return body(Silu{});
    case Activation::gelu:
      return body(Gelu{});
    case Activation::relu:
      return body(Relu{});
  }
}

void activate_fwd_impl(const Tensor& x, Activation f, const Tensor& y) {
  dispatch_storage(x.dtype(), "activate", [&]<class T>() {
    const T* from = x.data<T>();
    T* to = y.data<T>();
    with_activation(f, [&]<class A>(A) {
      map(x.device(), x.numel(), all_aligned({from, to}), Activate<A, T>{from, to});
    });
  });
}

void activate_bwd_impl(const Tensor& dy, const Tensor& x, Activation f, const Tensor& dx) {
  dispatch_storage(x.dtype(), "activate", [&]<class T>() {
    const T *grad = dy.data<T>(), *from = x.data<T>();
    T* to = dx.data<T>();
    with_activation(f, [&]<class A>(A) {
      map(x.device(), x.numel(), all_aligned({grad, from, to}), ActivateBackward<A, T>{grad, from, to});
    });
  });
}

void gated_activate_fwd_impl(const Tensor& x, Activation f, const Tensor& y) {
  dispatch_storage(x.dtype(), "gated_activate", [&]<class T>() {
    const int64_t width = x.row_size() / 2;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    with_activation(f, [&]<class A>(A) {
      map_rows(x.device(), x.num_rows(), width, all_aligned({from, to}), Gated<A, T>{from, to, width});
    });
  });
}

void gated_activate_bwd_impl(const Tensor& dy, const Tensor& x, Activation f, const Tensor& dx) {
  dispatch_storage(x.dtype(), "gated_activate", [&]<class T>() {
    const int64_t width = x.row_size() / 2;
    const T *grad = dy.data<T>(), *from = x.data<T>();
    T* to = dx.data<T>();
    with_activation(f, [&]<class A>(A) {
      map_rows(x.device(), x.num_rows(), width, all_aligned({grad, from, to}),
               GatedBackward<A, T>{grad, from, to, width});
    });
  });
}

[[maybe_unused]] const bool added[] = {
    activate_fwd.add(DeviceType::cuda, &activate_fwd_impl),
    activate_bwd.add(DeviceType::cuda, &activate_bwd_impl),
    gated_activate_fwd.add(DeviceType::cuda, &gated_activate_fwd_impl),
    gated_activate_bwd.add(DeviceType::cuda, &gated_activate_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
