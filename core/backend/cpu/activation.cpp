// CPU kernels of core/ops/activation.h.
#include "core/ops/activation.h"

#include <cmath>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/vector_math.inc"

using cpu::Compute;

// Phi(x) = erfc(-x / sqrt 2) / 2.
inline double normal_cdf(double x) {
  return 0.5 * std::erfc(-x * 0.70710678118654752);
}

// For z >= 0: erfc(z) = t * exp(p(t) - z^2), t = 2 / (2 + z). p is the degree 9 polynomial through the
// Chebyshev points of t in [1/7, 1] (z in [0, 12]), as a polynomial in s = (7 t - 4) / 3; relative error 6e-8
// before rounding, so that the lower tail of Phi, which multiplies a large x, stays accurate.
inline float normal_cdf(float x) {
  const float z = std::fabs(x) * 0.707106781F;
  const float t = 2.0F / (2.0F + z);
  const float s = (7.0F * t - 4.0F) * (1.0F / 3.0F);
  float p = 7.694512202e-05F;
  p = p * s + 6.954939913e-05F;
  p = p * s - 6.808140261e-04F;
  p = p * s - 1.327651614e-04F;
  p = p * s + 4.309440914e-03F;
  p = p * s - 1.788919625e-03F;
  p = p * s - 3.190556053e-02F;
  p = p * s + 1.932652775e-02F;
  p = p * s + 5.856020115e-01F;
  p = p * s - 5.748763576e-01F;
  const float tail = 0.5F * t * fast_exp(p - z * z);
  return x < 0 ? tail : 1.0F - tail;
}

struct Silu {
  template <class T>
  static T value(T x) {
    return x / (T(1) + fast_exp(-x));
  }
  template <class T>
  static T slope(T x) {
    const T s = T(1) / (T(1) + fast_exp(-x));
    return s * (T(1) + x * (T(1) - s));
  }
};
struct Gelu {
  template <class T>
  static T value(T x) {
    return x * normal_cdf(x);
  }
  template <class T>
  static T slope(T x) {
    return normal_cdf(x) + x * T(0.39894228040143268) * fast_exp(T(-0.5) * x * x);
  }
};
struct Relu {
  template <class T>
  static T value(T x) {
    return x > 0 ? x : T(0);
  }
  template <class T>
  static T slope(T x) {
    return x > 0 ? T(1) : T(0);
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
