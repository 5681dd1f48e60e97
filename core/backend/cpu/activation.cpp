// CPU kernels of core/ops/activation.h.
#include "core/ops/activation.h"

#include <cmath>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/functors/activation.inc"

using cpu::Compute;

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

template <class A, class T>
void activate_range(const T* x, T* y, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; i++) y[i] = A::value(static_cast<Compute<T>>(x[i]));
}

template <class A, class T>
void activate_bwd_range(const T* dy, const T* x, T* dx, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; i++) {
    dx[i] = static_cast<Compute<T>>(dy[i]) * A::slope(static_cast<Compute<T>>(x[i]));
  }
}

template <class A, class T>
void gated_row(const T* gate, const T* up, T* y, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; i++) {
    y[i] = A::value(static_cast<Compute<T>>(gate[i])) * static_cast<Compute<T>>(up[i]);
  }
}

// dgate may be gate, dup may be up.
template <class A, class T>
void gated_bwd_row(const T* dy, const T* gate, const T* up, T* dgate, T* dup, int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; i++) {
    const auto g = static_cast<Compute<T>>(gate[i]), u = static_cast<Compute<T>>(up[i]);
    const auto d = static_cast<Compute<T>>(dy[i]);
    dgate[i] = d * u * A::slope(g);
    dup[i] = d * A::value(g);
  }
}

void activate_fwd_impl(const Tensor& x, Activation f, const Tensor& y) {
  dispatch_storage(x.dtype(), "activate", [&]<class T>() {
    const T* from = x.data<T>();
    T* to = y.data<T>();
    with_activation(f, [&]<class A>(A) {
      cpu::parallel_blocks(x.numel(), [=](int64_t b, int64_t e) { activate_range<A>(from, to, b, e); });
    });
  });
}

void activate_bwd_impl(const Tensor& dy, const Tensor& x, Activation f, const Tensor& dx) {
  dispatch_storage(x.dtype(), "activate", [&]<class T>() {
    const T *grad = dy.data<T>(), *from = x.data<T>();
    T* to = dx.data<T>();
    with_activation(f, [&]<class A>(A) {
      cpu::parallel_blocks(x.numel(),
                           [=](int64_t b, int64_t e) { activate_bwd_range<A>(grad, from, to, b, e); });
    });
  });
}

void gated_activate_fwd_impl(const Tensor& x, Activation f, const Tensor& y) {
  dispatch_storage(x.dtype(), "gated_activate", [&]<class T>() {
    const int64_t width = x.row_size() / 2;
    const T* from = x.data<T>();
    T* to = y.data<T>();
    with_activation(f, [&]<class A>(A) {
      cpu::parallel_rows(x.num_rows(), width, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
          const T* gate = from + r * 2 * width;
          gated_row<A>(gate, gate + width, to + r * width, width);
        }
      });
    });
  });
}

void gated_activate_bwd_impl(const Tensor& dy, const Tensor& x, Activation f, const Tensor& dx) {
  dispatch_storage(x.dtype(), "gated_activate", [&]<class T>() {
    const int64_t width = x.row_size() / 2;
    const T *grad = dy.data<T>(), *from = x.data<T>();
    T* to = dx.data<T>();
    with_activation(f, [&]<class A>(A) {
      cpu::parallel_rows(x.num_rows(), width, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
          const T* gate = from + r * 2 * width;
          T* dgate = to + r * 2 * width;
          gated_bwd_row<A>(grad + r * width, gate, gate + width, dgate, dgate + width, width);
        }
      });
    });
  });
}

const bool added[] = {
    activate_fwd.add(DeviceType::cpu, &activate_fwd_impl, kIsaLevel),
    activate_bwd.add(DeviceType::cpu, &activate_bwd_impl, kIsaLevel),
    gated_activate_fwd.add(DeviceType::cpu, &gated_activate_fwd_impl, kIsaLevel),
    gated_activate_bwd.add(DeviceType::cpu, &gated_activate_bwd_impl, kIsaLevel),
};

SHOAL_KERNELS_END
