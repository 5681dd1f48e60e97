// CUDA kernels of core/ops/elementwise.h and core/autograd/accumulate.h.
#include "core/ops/elementwise.h"

#include <cmath>

#include "core/autograd/accumulate.h"
#include "core/backend/cuda/map.h"
#include "core/backend/cuda/sum.h"

namespace shoal::cuda {
namespace {

#include "core/backend/functors/vector_math.inc"

// to[i] = f(from[i]); `to` may be `from`.
template <class From, class To, class F>
struct Unary {
  static constexpr int kPack = std::min(cuda::kPack<From>, cuda::kPack<To>);
  const From* from;
  To* to;
  F f;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    const auto x = load<N>(from + i);
    Pack<Compute<To>, N> y;
    for (int j = 0; j < N; j++) y.v[j] = static_cast<Compute<To>>(f(x.v[j]));
    store<N>(to + i, y);
  }
};

// to[i] = f(a[i], b[i]); `to` may be a or b.
template <class A, class B, class F>
struct Binary {
  static constexpr int kPack = std::min(cuda::kPack<A>, cuda::kPack<B>);
  const A* a;
  const B* b;
  A* to;
  F f;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    const auto x = load<N>(a + i);
    const auto y = load<N>(b + i);
    Pack<Compute<A>, N> z;
    for (int j = 0; j < N; j++) z.v[j] = f(x.v[j], static_cast<Compute<A>>(y.v[j]));
    store<N>(to + i, z);
  }
};

template <class From, class To, class F>
void unary(const Tensor& x, const Tensor& out, const F& f) {
  const From* from = x.data<From>();
  To* to = out.data<To>();
  map(x.device(), x.numel(), all_aligned({from, to}), Unary<From, To, F>{from, to, f});
}

template <class A, class B, class F>
void binary(const Tensor& x, const Tensor& y, const Tensor& out, const F& f) {
  const A* a = x.data<A>();
  const B* b = y.data<B>();
  A* to = out.data<A>();
  map(x.device(), x.numel(), all_aligned({a, b, to}), Binary<A, B, F>{a, b, to, f});
}

struct Add {
  template <class C>
  SHOAL_DEVICE C operator()(C a, C b) const {
    return a + b;
  }
};
struct Multiply {
  template <class C>
  SHOAL_DEVICE C operator()(C a, C b) const {
    return a * b;
  }
};
template <class C>
struct Scale {
  C factor;
  SHOAL_DEVICE C operator()(C a) const { return a * factor; }
};
struct Sigmoid {
  template <class C>
  SHOAL_DEVICE C operator()(C a) const {
    return C(1) / (C(1) + fast_exp(-a));
  }
};
struct SigmoidGradient {
  template <class C>
  SHOAL_DEVICE C operator()(C dy, C y) const {
    return dy * y * (C(1) - y);
  }
};
struct Same {
  template <class C>
  SHOAL_DEVICE C operator()(C a) const {
    return a;
  }
};

void add_impl(const Tensor& x, const Tensor& y, const Tensor& out) {
  dispatch_storage(x.dtype(), "add", [&]<class T>() { binary<T, T>(x, y, out, Add{}); });
}

void mul_impl(const Tensor& x, const Tensor& y, const Tensor& out) {
  dispatch_storage(x.dtype(), "mul", [&]<class T>() { binary<T, T>(x, y, out, Multiply{}); });
}

void scale_impl(const Tensor& x, double factor, const Tensor& out) {
  dispatch_storage(x.dtype(), "scale", [&]<class T>() {
    unary<T, T>(x, out, Scale<Compute<T>>{static_cast<Compute<T>>(factor)});
  });
}

template <class C>
struct Combine {
  C a, b;
  SHOAL_DEVICE C operator()(C x, C y) const { return a * x + b * y; }
};

void axpby_impl(double a, const Tensor& x, double b, const Tensor& y, const Tensor& out) {
  dispatch_float(x.dtype(), "axpby", [&]<class T>() {
    binary<T, T>(x, y, out, Combine<T>{static_cast<T>(a), static_cast<T>(b)});
  });
}

// x[i] *= factor[0], unless that is 1.
template <class T, class F>
struct ScaleBy {
  static constexpr int kPack = cuda::kPack<T>;
  T* x;
  const F* factor;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    const auto by = static_cast<Compute<T>>(load<1>(factor).v[0]);
    if (by == Compute<T>(1)) return;
    auto values = load<N>(x + i);
    for (int j = 0; j < N; j++) values.v[j] *= by;
    store<N>(x + i, values);
  }
};

void scale_by_impl(const Tensor& x, const Tensor& factor) {
  dispatch_storage(x.dtype(), "scale_by", [&]<class T>() {
    dispatch_storage(factor.dtype(), "scale_by", [&]<class F>() {
      T* to = x.data<T>();
      map(x.device(), x.numel(), all_aligned({to}), ScaleBy<T, F>{to, factor.data<F>()});
    });
  });
}

void sigmoid_impl(const Tensor& x, const Tensor& out) {
  dispatch_float(x.dtype(), "sigmoid", [&]<class T>() { unary<T, T>(x, out, Sigmoid{}); });
}

void sigmoid_bwd_impl(const Tensor& dy, const Tensor& y, const Tensor& dx) {
  dispatch_float(y.dtype(), "sigmoid", [&]<class T>() { binary<T, T>(dy, y, dx, SigmoidGradient{}); });
}

void cast_impl(const Tensor& x, const Tensor& out) {
  dispatch_storage(x.dtype(), "cast", [&]<class From>() {
    dispatch_storage(out.dtype(), "cast", [&]<class To>() { unary<From, To>(x, out, Same{}); });
  });
}

void accumulate_impl(const Tensor& to, const Tensor& from) {
  SHOAL_CHECK(to.numel() == from.numel(), "accumulate: expected ", to.numel(), " elements like ", to.shape(),
              ", got ", from.shape());
  if (to.dtype() == DType::f32 && from.dtype() == DType::bf16) {
    return binary<float, BFloat16>(to, from, to, Add{});
  }
  if (to.dtype() == DType::f64 && from.dtype() == DType::f32)
    return binary<double, float>(to, from, to, Add{});
  if (to.dtype() == DType::i64) return binary<int64_t, int64_t>(to, from, to, Add{});
  add_impl(to, from, to);
}

template <class T>
struct Fill {
  static constexpr int kPack = cuda::kPack<T>;
  T* to;
  Compute<T> value;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    Pack<Compute<T>, N> values;
    for (int j = 0; j < N; j++) values.v[j] = value;
    store<N>(to + i, values);
  }
};

void fill_impl(const Tensor& out, double value) {
  dispatch_storage(out.dtype(), "fill", [&]<class T>() {
    T* to = out.data<T>();
    map(out.device(), out.numel(), all_aligned({to}), Fill<T>{to, static_cast<Compute<T>>(value)});
  });
}

template <class T>
struct ScaleRows {
  static constexpr int kPack = cuda::kPack<T>;
  const T* x;
  const Compute<T>* scale;
  T* to;
  int64_t width;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const int64_t i = row * width + column;
    auto values = load<N>(x + i);
    for (int j = 0; j < N; j++) values.v[j] *= scale[row];
    store<N>(to + i, values);
  }
};

template <class T>
void scale_rows(const Tensor& x, const Tensor& scale, const Tensor& out) {
  const T* from = x.data<T>();
  T* to = out.data<T>();
  map_rows(x.device(), x.num_rows(), x.row_size(), all_aligned({from, to}),
           ScaleRows<T>{from, scale.data<Compute<T>>(), to, x.row_size()});
}

void scale_rows_impl(const Tensor& x, const Tensor& scale, const Tensor& out) {
  dispatch_storage(x.dtype(), "scale_rows", [&]<class T>() { scale_rows<T>(x, scale, out); });
}

// dot[r] = sum over the columns of a[r, :] * b[r, :]; a row at a time per block.
template <class T, int N>
__global__ void row_dots_kernel(const T* a, const T* b, int64_t num_rows, int64_t width, Compute<T>* dot) {
  using Sums = BlockSums<Compute<T>, 1>;
  SHOAL_SHARED(Compute<T>, scratch, Sums::kScratch);
  Sums block_sums(scratch);
  for (int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
    Compute<T> sum[1] = {0};
    for (int64_t d = int64_t{threadIdx.x} * N; d < width; d += int64_t{blockDim.x} * N) {
      const auto x = load<N>(a + row * width + d), y = load<N>(b + row * width + d);
      for (int j = 0; j < N; j++) sum[0] += x.v[j] * y.v[j];
    }
    block_sums(sum);
    if (threadIdx.x == 0) dot[row] = sum[0];
  }
}

template <class T>
void row_dots(const Tensor& a, const Tensor& b, const Tensor& dot) {
  constexpr int kMostThreads = 512;
  const int64_t num_rows = a.num_rows(), width = a.row_size();
  const T *x = a.data<T>(), *y = b.data<T>();
  auto* to = dot.data<Compute<T>>();
  const LaunchShape shape = launch_shape(a.device(), num_rows, threads_for(width / kPack<T>, kMostThreads));
  if (all_aligned({x, y}) && width % kPack<T> == 0) {
    SHOAL_LAUNCH((row_dots_kernel<T, kPack<T>>), shape, x, y, num_rows, width, to);
  } else {
    SHOAL_LAUNCH((row_dots_kernel<T, 1>), shape, x, y, num_rows, width, to);
  }
}

void scale_rows_bwd_impl(const Tensor& dy, const Tensor& x, const Tensor& scale, const Tensor& dx,
                         const Tensor& dscale) {
  dispatch_storage(dy.dtype(), "scale_rows", [&]<class T>() {
    if (dscale.defined()) row_dots<T>(dy, x, dscale);
    if (dx.defined()) scale_rows<T>(dy, scale, dx);
  });
}

// Sums over all elements, in double: of the values, of their squares, of 1 for each that is not finite.
struct Value {
  SHOAL_DEVICE double operator()(double v) const { return v; }
};
struct Square {
  SHOAL_DEVICE double operator()(double v) const { return v * v; }
};
struct NotFinite {
  SHOAL_DEVICE double operator()(double v) const { return v - v == 0 ? 0 : 1; }
};

constexpr int kSumThreads = 256;
constexpr int64_t kMaxPartials = 1056;  // 8 blocks for each of the 132 processors of an H200
using Sum = BlockSums<double, 1>;

template <class T, int N, class F>
__global__ void partial_sums_kernel(const T* x, int64_t count, F f, double* partials) {
  SHOAL_SHARED(double, scratch, Sum::kScratch);
  Sum block_sums(scratch);
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
                stride = int64_t{gridDim.x} * blockDim.x;
  const int64_t packs = count / N;
  double sum[1] = {0};
  for (int64_t i = first; i < packs; i += stride) {
    const auto values = load<N>(x + i * N);
    for (int j = 0; j < N; j++) sum[0] += f(static_cast<double>(values.v[j]));
  }
  for (int64_t i = packs * N + first; i < count; i += stride)
    sum[0] += f(static_cast<double>(load<1>(x + i).v[0]));
  block_sums(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum[0];
}

// One block. out = the sum, or out += the sum.
template <bool kAdd, class T>
__global__ void total_kernel(const double* partials, int64_t count, T* out) {
  SHOAL_SHARED(double, scratch, Sum::kScratch);
  Sum block_sums(scratch);
  double sum[1] = {0};
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum[0] += partials[i];
  block_sums(sum);
  if (threadIdx.x != 0) return;
  const auto total = static_cast<Compute<T>>(sum[0]);
  out[0] = T(kAdd ? static_cast<Compute<T>>(out[0]) + total : total);
}

template <bool kAdd, class F, class Out>
void sum_all(const Tensor& x, Out* out) {
  const int64_t count = x.numel();
  dispatch_storage(x.dtype(), "sum", [&]<class T>() {
    const T* from = x.data<T>();
    const int64_t per_block = int64_t{kSumThreads} * kPack<T> * 4;
    const LaunchShape shape =
        launch_shape(x.device(), std::min((count + per_block - 1) / per_block, kMaxPartials), kSumThreads);
    const Tensor partials = Tensor::empty({std::max(1U, shape.grid_x)}, DType::f64, x.device());
    double* partial = partials.data<double>();
    if (all_aligned({from})) {
      SHOAL_LAUNCH((partial_sums_kernel<T, kPack<T>, F>), shape, from, count, F{}, partial);
    } else {
      SHOAL_LAUNCH((partial_sums_kernel<T, 1, F>), shape, from, count, F{}, partial);
    }
    SHOAL_LAUNCH((total_kernel<kAdd, Out>), launch_shape(x.device(), 1, kSumThreads), partial,
                 int64_t{shape.grid_x}, out);
  });
}

// partials[row, chunk] = the sum of squares of a chunk of a row, which a block has.
template <class T, int N>
__global__ void row_squares_kernel(const T* x, int64_t num_rows, int64_t width, int64_t num_chunks,
                                   double* partials) {
  SHOAL_SHARED(double, scratch, Sum::kScratch);
  Sum block_sums(scratch);
  const int64_t packs = width / N, each = (packs + num_chunks - 1) / num_chunks;
  for (int64_t part = blockIdx.x; part < num_rows * num_chunks; part += gridDim.x) {
    const T* row = x + part / num_chunks * width;
    const int64_t first = part % num_chunks * each, left = packs - first, count = left < each ? left : each;
    double sum[1] = {0};
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      const auto values = load<N>(row + (first + i) * N);
      for (int j = 0; j < N; j++) sum[0] += Square{}(static_cast<double>(values.v[j]));
    }
    block_sums(sum);
    if (threadIdx.x == 0) partials[part] = sum[0];
  }
}

template <class T>
struct InverseNorms {
  static constexpr int kPack = 1;
  const double* partials;
  int64_t num_chunks;
  double eps;
  T* out;
  template <int N>
  SHOAL_DEVICE void at(int64_t row) const {
    double squares = 0;
    for (int64_t c = 0; c < num_chunks; c++) squares += partials[row * num_chunks + c];
    const double norm = sqrt(squares) + eps;
    out[row] = static_cast<T>(norm == 0 ? 0 : 1 / norm);
  }
};

void inverse_row_norms_impl(const Tensor& x, double eps, const Tensor& out) {
  constexpr int64_t kMostChunks = 64;
  const int64_t num_rows = x.num_rows(), width = x.row_size();
  dispatch_float(x.dtype(), "inverse_row_norms", [&]<class T>() {
    const T* from = x.data<T>();
    const int64_t per_block = int64_t{kSumThreads} * kPack<T> * 4;
    const int64_t chunks = std::clamp<int64_t>((width + per_block - 1) / per_block, 1, kMostChunks);
    const Tensor partials = Tensor::empty({num_rows, chunks}, DType::f64, x.device());
    double* partial = partials.data<double>();
    const LaunchShape shape = launch_shape(x.device(), num_rows * chunks, kSumThreads);
    if (all_aligned({from}) && width % kPack<T> == 0) {
      SHOAL_LAUNCH((row_squares_kernel<T, kPack<T>>), shape, from, num_rows, width, chunks, partial);
    } else {
      SHOAL_LAUNCH((row_squares_kernel<T, 1>), shape, from, num_rows, width, chunks, partial);
    }
    map(x.device(), num_rows, false, InverseNorms<T>{partial, chunks, eps, out.data<T>()});
  });
}

void sum_impl(const Tensor& x, const Tensor& out) {
  dispatch_storage(out.dtype(), "sum", [&]<class Out>() { sum_all<false, Value>(x, out.data<Out>()); });
}

void add_squares_impl(const Tensor& x, const Tensor& sum) {
  sum_all<true, Square>(x, sum.data<double>());
}

void count_not_finite_impl(const Tensor& x, const Tensor& count) {
  sum_all<true, NotFinite>(x, count.data<int64_t>());
}

[[maybe_unused]] const bool added[] = {
    add_fwd.add(DeviceType::cuda, &add_impl),
    mul_fwd.add(DeviceType::cuda, &mul_impl),
    scale_fwd.add(DeviceType::cuda, &scale_impl),
    sigmoid_fwd.add(DeviceType::cuda, &sigmoid_impl),
    sigmoid_bwd.add(DeviceType::cuda, &sigmoid_bwd_impl),
    scale_rows_fwd.add(DeviceType::cuda, &scale_rows_impl),
    scale_rows_bwd.add(DeviceType::cuda, &scale_rows_bwd_impl),
    sum_fwd.add(DeviceType::cuda, &sum_impl),
    cast_fwd.add(DeviceType::cuda, &cast_impl),
    fill.add(DeviceType::cuda, &fill_impl),
    axpby.add(DeviceType::cuda, &axpby_impl),
    inverse_row_norms.add(DeviceType::cuda, &inverse_row_norms_impl),
    scale_by.add(DeviceType::cuda, &scale_by_impl),
    add_squares.add(DeviceType::cuda, &add_squares_impl),
    count_not_finite.add(DeviceType::cuda, &count_not_finite_impl),
    accumulate.add(DeviceType::cuda, &accumulate_impl),
};

}  // namespace

void add_sum(const Tensor& x, const Tensor& out) {
  sum_all<true, Value>(x, out.data<double>());
}

}  // namespace shoal::cuda
