// CPU kernels of core/ops/elementwise.h and core/autograd/accumulate.h.
#include "core/ops/elementwise.h"

#include <cmath>

#include "core/autograd/accumulate.h"
#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/functors/vector_math.inc"

using cpu::Compute;

// to = f(a, b) elementwise; `to` may be a or b.
template <class T, class F>
void map2(const T* a, const T* b, T* to, int64_t n, const F& f) {
  using C = Compute<T>;
  cpu::parallel_blocks(n, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) to[i] = f(static_cast<C>(a[i]), static_cast<C>(b[i]));
  });
}

template <class From, class To, class F>
void map1(const From* from, To* to, int64_t n, const F& f) {
  using C = Compute<From>;
  cpu::parallel_blocks(n, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; i++) to[i] = static_cast<Compute<To>>(f(static_cast<C>(from[i])));
  });
}

void add_impl(const Tensor& x, const Tensor& y, const Tensor& out) {
  dispatch_storage(x.dtype(), "add", [&]<class T>() {
    map2(x.data<T>(), y.data<T>(), out.data<T>(), x.numel(), [](auto a, auto b) { return a + b; });
  });
}

void mul_impl(const Tensor& x, const Tensor& y, const Tensor& out) {
  dispatch_storage(x.dtype(), "mul", [&]<class T>() {
    map2(x.data<T>(), y.data<T>(), out.data<T>(), x.numel(), [](auto a, auto b) { return a * b; });
  });
}

void scale_impl(const Tensor& x, double factor, const Tensor& out) {
  dispatch_storage(x.dtype(), "scale", [&]<class T>() {
    const auto c = static_cast<Compute<T>>(factor);
    map1(x.data<T>(), out.data<T>(), x.numel(), [c](auto a) { return a * c; });
  });
}

void axpby_impl(double a, const Tensor& x, double b, const Tensor& y, const Tensor& out) {
  dispatch_float(x.dtype(), "axpby", [&]<class T>() {
    const T ca = static_cast<T>(a), cb = static_cast<T>(b);
    map2(x.data<T>(), y.data<T>(), out.data<T>(), x.numel(), [=](T u, T v) { return ca * u + cb * v; });
  });
}

void scale_by_impl(const Tensor& x, const Tensor& factor) {
  const double value = factor.item();
  if (value != 1) scale_impl(x, value, x);
}

void sigmoid_impl(const Tensor& x, const Tensor& out) {
  dispatch_float(x.dtype(), "sigmoid", [&]<class T>() {
    map1(x.data<T>(), out.data<T>(), x.numel(), [](T a) { return T(1) / (T(1) + fast_exp(-a)); });
  });
}

void sigmoid_bwd_impl(const Tensor& dy, const Tensor& y, const Tensor& dx) {
  dispatch_float(y.dtype(), "sigmoid", [&]<class T>() {
    map2(dy.data<T>(), y.data<T>(), dx.data<T>(), y.numel(), [](T d, T s) { return d * s * (T(1) - s); });
  });
}

void scale_rows_impl(const Tensor& x, const Tensor& scale, const Tensor& out) {
  dispatch_storage(x.dtype(), "scale_rows", [&]<class T>() {
    const int64_t width = x.row_size();
    const T* from = x.data<T>();
    const auto* factor = scale.data<Compute<T>>();
    T* to = out.data<T>();
    cpu::parallel_rows(x.num_rows(), width, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const Compute<T> c = factor[r];
#pragma omp simd
        for (int64_t d = r * width; d < (r + 1) * width; d++) {
          to[d] = static_cast<Compute<T>>(from[d]) * c;
        }
      }
    });
  });
}

template <class T>
void scale_rows_bwd_rows(const T* dy, const T* x, const Compute<T>* scale, T* dx, Compute<T>* dscale,
                         int64_t begin, int64_t end, int64_t width) {
  using C = Compute<T>;
  for (int64_t r = begin; r < end; r++) {
    const T *dy_row = dy + r * width, *x_row = x + r * width;
    if (dscale != nullptr) {
      C dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < width; d++) dot += static_cast<C>(dy_row[d]) * static_cast<C>(x_row[d]);
      dscale[r] = dot;
    }
    if (dx != nullptr) {
      const C c = scale[r];
      T* dx_row = dx + r * width;
#pragma omp simd
      for (int64_t d = 0; d < width; d++) dx_row[d] = static_cast<C>(dy_row[d]) * c;
    }
  }
}

void scale_rows_bwd_impl(const Tensor& dy, const Tensor& x, const Tensor& scale, const Tensor& dx,
                         const Tensor& dscale) {
  dispatch_storage(dy.dtype(), "scale_rows", [&]<class T>() {
    const int64_t width = x.row_size();
    const T *dy_data = dy.data<T>(), *x_data = x.data<T>();
    const auto* scale_data = scale.data<Compute<T>>();
    T* dx_data = dx.defined() ? dx.data<T>() : nullptr;
    Compute<T>* dscale_data = dscale.defined() ? dscale.data<Compute<T>>() : nullptr;
    cpu::parallel_rows(x.num_rows(), width, [=](int64_t begin, int64_t end) {
      scale_rows_bwd_rows(dy_data, x_data, scale_data, dx_data, dscale_data, begin, end, width);
    });
  });
}

template <class T>
double sum_range(const T* x, int64_t begin, int64_t end) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = begin; i < end; i++) total += static_cast<double>(static_cast<Compute<T>>(x[i]));
  return total;
}

void sum_impl(const Tensor& x, const Tensor& out) {
  dispatch_storage(x.dtype(), "sum", [&]<class T>() {
    const T* data = x.data<T>();
    const double total =
        cpu::ordered_sum<double>(x.numel(), [=](int64_t b, int64_t e) { return sum_range(data, b, e); });
    out.data<T>()[0] = static_cast<Compute<T>>(total);
  });
}

template <class T>
double squares_range(const T* x, int64_t begin, int64_t end) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = begin; i < end; i++) {
    const auto v = static_cast<double>(static_cast<Compute<T>>(x[i]));
    total += v * v;
  }
  return total;
}

void add_squares_impl(const Tensor& x, const Tensor& sum) {
  dispatch_storage(x.dtype(), "add_squares", [&]<class T>() {
    const T* data = x.data<T>();
    sum.data<double>()[0] +=
        cpu::ordered_sum<double>(x.numel(), [=](int64_t b, int64_t e) { return squares_range(data, b, e); });
  });
}

void inverse_row_norms_impl(const Tensor& x, double eps, const Tensor& out) {
  dispatch_float(x.dtype(), "inverse_row_norms", [&]<class T>() {
    const int64_t width = x.row_size();
    for (int64_t r = 0; r < x.num_rows(); r++) {
      const T* row = x.data<T>() + r * width;
      const double squares =
          cpu::ordered_sum<double>(width, [=](int64_t b, int64_t e) { return squares_range(row, b, e); });
      const double norm = std::sqrt(squares) + eps;
      out.data<T>()[r] = static_cast<T>(norm == 0 ? 0 : 1 / norm);
    }
  });
}

// x - x is 0 for a finite x and NaN otherwise.
template <class T>
int64_t not_finite_range(const T* x, int64_t begin, int64_t end) {
  int64_t count = 0;
#pragma omp simd reduction(+ : count)
  for (int64_t i = begin; i < end; i++) {
    const auto v = static_cast<Compute<T>>(x[i]);
    count += (v - v == 0) ? 0 : 1;
  }
  return count;
}

void count_not_finite_impl(const Tensor& x, const Tensor& count) {
  dispatch_storage(x.dtype(), "count_not_finite", [&]<class T>() {
    const T* data = x.data<T>();
    count.data<int64_t>()[0] += cpu::ordered_sum<int64_t>(
        x.numel(), [=](int64_t b, int64_t e) { return not_finite_range(data, b, e); });
  });
}

void cast_impl(const Tensor& x, const Tensor& out) {
  dispatch_storage(x.dtype(), "cast", [&]<class From>() {
    dispatch_storage(out.dtype(), "cast", [&]<class To>() {
      map1(x.data<From>(), out.data<To>(), x.numel(), [](auto a) { return static_cast<Compute<To>>(a); });
    });
  });
}

void fill_impl(const Tensor& out, double value) {
  dispatch_storage(out.dtype(), "fill", [&]<class T>() {
    const T v = static_cast<T>(static_cast<Compute<T>>(value));
    T* to = out.data<T>();
    cpu::parallel_blocks(out.numel(), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) to[i] = v;
    });
  });
}

void accumulate_impl(const Tensor& to, const Tensor& from) {
  SHOAL_CHECK(to.numel() == from.numel(), "accumulate: expected ", to.numel(), " elements like ", to.shape(),
              ", got ", from.shape());
  if (to.dtype() == DType::f32 && from.dtype() == DType::bf16) {
    float* sum = to.data<float>();
    const BFloat16* add = from.data<BFloat16>();
    cpu::parallel_blocks(to.numel(), [=](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; i++) sum[i] += static_cast<float>(add[i]);
    });
    return;
  }
  if (to.dtype() == DType::f64 && from.dtype() == DType::f32) {
    double* sum = to.data<double>();
    const float* add = from.data<float>();
    for (int64_t i = 0; i < to.numel(); i++) sum[i] += static_cast<double>(add[i]);
    return;
  }
  if (to.dtype() == DType::i64) {
    int64_t* sum = to.data<int64_t>();
    const int64_t* add = from.data<int64_t>();
    for (int64_t i = 0; i < to.numel(); i++) sum[i] += add[i];
    return;
  }
  add_impl(to, from, to);
}

const bool added[] = {
    add_fwd.add(DeviceType::cpu, &add_impl, kIsaLevel),
    mul_fwd.add(DeviceType::cpu, &mul_impl, kIsaLevel),
    scale_fwd.add(DeviceType::cpu, &scale_impl, kIsaLevel),
    sigmoid_fwd.add(DeviceType::cpu, &sigmoid_impl, kIsaLevel),
    sigmoid_bwd.add(DeviceType::cpu, &sigmoid_bwd_impl, kIsaLevel),
    scale_rows_fwd.add(DeviceType::cpu, &scale_rows_impl, kIsaLevel),
    scale_rows_bwd.add(DeviceType::cpu, &scale_rows_bwd_impl, kIsaLevel),
    sum_fwd.add(DeviceType::cpu, &sum_impl, kIsaLevel),
    cast_fwd.add(DeviceType::cpu, &cast_impl, kIsaLevel),
    fill.add(DeviceType::cpu, &fill_impl, kIsaLevel),
    axpby.add(DeviceType::cpu, &axpby_impl, kIsaLevel),
    inverse_row_norms.add(DeviceType::cpu, &inverse_row_norms_impl, kIsaLevel),
    scale_by.add(DeviceType::cpu, &scale_by_impl, kIsaLevel),
    add_squares.add(DeviceType::cpu, &add_squares_impl, kIsaLevel),
    count_not_finite.add(DeviceType::cpu, &count_not_finite_impl, kIsaLevel),
    accumulate.add(DeviceType::cpu, &accumulate_impl, kIsaLevel),
};

SHOAL_KERNELS_END
