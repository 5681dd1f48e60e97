// CPU kernels of core/ops/norm.h. Rows are independent; the column sums of the weight gradients go through
// partial sums of fixed blocks of rows, added in ascending order.
#include "core/ops/norm.h"

#include <cmath>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

using cpu::Compute;

template <class T>
T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

/// X: stored type of x; S: of the residual and the sum; Y: of y. Arithmetic is in C.
template <class X, class S, class Y>
struct ForwardArgs {
  using C = Compute<S>;
  using Stream = S;
  explicit ForwardArgs(const NormForward& a)
      : x(a.x.data<X>()),
        residual(data_or_null<S>(a.residual)),
        weight(a.weight.data<C>()),
        bias(data_or_null<C>(a.bias)),
        y(a.y.data<Y>()),
        sum(data_or_null<S>(a.sum)),
        mean(data_or_null<C>(a.mean_T)),
        rstd(a.rstd_T.data<C>()),
        width(a.x.row_size()),
        eps(static_cast<C>(a.eps)) {}
  const X* x;
  const S* residual;
  const C *weight, *bias;
  Y* y;
  S* sum;
  C *mean, *rstd;
  int64_t width;
  C eps;

  /// Calls body(row) with the row to normalise: x, or x + residual, which is written first.
  template <class Body>
  void with_row(int64_t r, const Body& body) const {
    const X* a = x + r * width;
    if (residual == nullptr) return body(a);
    const S* b = residual + r * width;
    S* to = sum + r * width;
#pragma omp simd
    for (int64_t d = 0; d < width; d++) to[d] = static_cast<C>(a[d]) + static_cast<C>(b[d]);
    body(static_cast<const S*>(to));
  }
};

template <class Args>
void rms_norm_row(const Args& a, int64_t r) {
  using C = typename Args::C;
  a.with_row(r, [&](const auto* x) {
    C squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < a.width; d++) squares += static_cast<C>(x[d]) * static_cast<C>(x[d]);
    const C rstd = C(1) / std::sqrt(squares / static_cast<C>(a.width) + a.eps);
    a.rstd[r] = rstd;
    auto* y = a.y + r * a.width;
    const C* weight = a.weight;
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) y[d] = static_cast<C>(x[d]) * rstd * weight[d];
  });
}

template <class Args>
void layer_norm_row(const Args& a, int64_t r) {
  using C = typename Args::C;
  a.with_row(r, [&](const auto* x) {
    C total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t d = 0; d < a.width; d++) total += static_cast<C>(x[d]);
    const C mean = total / static_cast<C>(a.width);
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < a.width; d++) {
      squares += (static_cast<C>(x[d]) - mean) * (static_cast<C>(x[d]) - mean);
    }
    const C rstd = C(1) / std::sqrt(squares / static_cast<C>(a.width) + a.eps);
    a.mean[r] = mean;
    a.rstd[r] = rstd;
    auto* y = a.y + r * a.width;
    const C *weight = a.weight, *bias = a.bias;
    if (bias == nullptr) {
#pragma omp simd
      for (int64_t d = 0; d < a.width; d++) {
        y[d] = (static_cast<C>(x[d]) - mean) * rstd * weight[d];
      }
    } else {
#pragma omp simd
      for (int64_t d = 0; d < a.width; d++) {
        y[d] = (static_cast<C>(x[d]) - mean) * rstd * weight[d] + bias[d];
      }
    }
  });
}

template <class S, class Y>
struct BackwardArgs {
  using C = Compute<S>;
  explicit BackwardArgs(const NormBackward& a)
      : dy(a.dy.data<Y>()),
        dsum(data_or_null<S>(a.dsum)),
        x(a.x.data<S>()),
        weight(a.weight.data<C>()),
        mean(data_or_null<C>(a.mean_T)),
        rstd(a.rstd_T.data<C>()),
        dx(data_or_null<S>(a.dx)),
        dx_low(data_or_null<BFloat16>(a.dx_low)),
        width(a.x.row_size()) {}
  const Y* dy;
  const S *dsum, *x;
  const C *weight, *mean, *rstd;
  S* dx;  // may be dy
  BFloat16* dx_low;
  int64_t width;
};

// With g = dy * weight and xhat = (x - mean) * rstd:
//   rms_norm:   dx = rstd * (g - xhat * mean(g * xhat))
//   layer_norm: dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
// dweight and dbias are null or one row of sums.
template <bool kLayer, class S, class Y>
void norm_bwd_row(const BackwardArgs<S, Y>& a, int64_t r, Compute<S>* dweight, Compute<S>* dbias) {
  using C = Compute<S>;
  const Y* dy = a.dy + r * a.width;
  const S* x = a.x + r * a.width;
  const C* weight = a.weight;
  const C rstd = a.rstd[r];
  const C mean = kLayer ? a.mean[r] : C(0);
  if (dweight != nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) {
      dweight[d] += static_cast<C>(dy[d]) * ((static_cast<C>(x[d]) - mean) * rstd);
    }
  }
  if (dbias != nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) dbias[d] += static_cast<C>(dy[d]);
  }
  if (a.dx == nullptr) return;
  C g_sum = 0, gx_sum = 0;
#pragma omp simd reduction(+ : g_sum, gx_sum)
  for (int64_t d = 0; d < a.width; d++) {
    const C g = static_cast<C>(dy[d]) * weight[d];
    g_sum += g;
    gx_sum += g * ((static_cast<C>(x[d]) - mean) * rstd);
  }
  const C g_mean = kLayer ? g_sum / static_cast<C>(a.width) : C(0);
  const C gx_mean = gx_sum / static_cast<C>(a.width);
  S* dx = a.dx + r * a.width;
  const auto gradient = [&](int64_t d) {
    return rstd *
           (static_cast<C>(dy[d]) * weight[d] - g_mean - (static_cast<C>(x[d]) - mean) * rstd * gx_mean);
  };
  if (a.dsum == nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) dx[d] = gradient(d);
  } else {
    const S* dsum = a.dsum + r * a.width;
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) dx[d] = gradient(d) + static_cast<C>(dsum[d]);
  }
  if (a.dx_low != nullptr) {
    BFloat16* low = a.dx_low + r * a.width;
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) low[d] = static_cast<float>(static_cast<C>(dx[d]));
  }
}

constexpr int64_t kMaxRowBlocks = 32;
constexpr int64_t kMinRowsPerBlock = 16;

template <bool kLayer, class S, class Y>
void norm_bwd(const NormBackward& args) {
  using C = Compute<S>;
  const BackwardArgs<S, Y> a(args);
  const int64_t num_rows = args.x.num_rows(), width = a.width;
  const bool want_weight = args.dweight.defined(), want_bias = args.dbias.defined();
  if (!want_weight && !want_bias) {
    cpu::parallel_rows(num_rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        norm_bwd_row<kLayer>(a, r, static_cast<C*>(nullptr), static_cast<C*>(nullptr));
    });
    return;
  }
  const int64_t block = std::max(kMinRowsPerBlock, (num_rows + kMaxRowBlocks - 1) / kMaxRowBlocks);
  const int64_t num_blocks = (num_rows + block - 1) / block;
  // Block b: a row of weight sums, then a row of bias sums.
  const Tensor partial = Tensor::empty({num_blocks, 2, width}, dtype_of<C>);
  C* partial_data = partial.data<C>();
  parallel_for(num_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
      C* sums = partial_data + b * 2 * width;
      std::fill(sums, sums + 2 * width, C(0));
      for (int64_t r = b * block; r < std::min(num_rows, (b + 1) * block); r++) {
        norm_bwd_row<kLayer>(a, r, want_weight ? sums : nullptr, want_bias ? sums + width : nullptr);
      }
    }
  });
  const auto add_up = [&](const Tensor& to, int64_t offset) {
    if (!to.defined()) return;
    C* out = to.data<C>();
    for (int64_t b = 0; b < num_blocks; b++) {
      const C* sums = partial_data + b * 2 * width + offset;
#pragma omp simd
      for (int64_t d = 0; d < width; d++) out[d] += sums[d];
    }
  };
  add_up(args.dweight, 0);
  add_up(args.dbias, width);
}

/// Calls run<X, S, Y>() for the dtypes of x, the residual stream and y that norm.h allows.
template <class Run>
void with_types(DType x, DType stream, DType y, const Run& run) {
  if (x == y) {
    dispatch_storage(x, "norm", [&]<class T>() {
      if (stream == x) return run.template operator()<T, T, T>();
      if constexpr (std::is_same_v<T, BFloat16>) run.template operator()<BFloat16, float, BFloat16>();
    });
  } else {
    run.template operator()<float, float, BFloat16>();
  }
}

template <bool kLayer>
void norm_fwd(const NormForward& args) {
  const DType stream = args.residual.defined() ? args.residual.dtype() : args.x.dtype();
  with_types(args.x.dtype(), stream, args.y.dtype(), [&]<class X, class S, class Y>() {
    const ForwardArgs<X, S, Y> a(args);
    cpu::parallel_rows(args.x.num_rows(), a.width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) kLayer ? layer_norm_row(a, r) : rms_norm_row(a, r);
    });
  });
}

/// x of a backward is the stream.
template <bool kLayer>
void norm_bwd_any(const NormBackward& args) {
  if (args.x.dtype() != args.dy.dtype()) return norm_bwd<kLayer, float, BFloat16>(args);
  dispatch_storage(args.x.dtype(), "norm", [&]<class T>() { norm_bwd<kLayer, T, T>(args); });
}

const bool added[] = {
    rms_norm_fwd.add(DeviceType::cpu, &norm_fwd<false>, kIsaLevel),
    rms_norm_bwd.add(DeviceType::cpu, &norm_bwd_any<false>, kIsaLevel),
    layer_norm_fwd.add(DeviceType::cpu, &norm_fwd<true>, kIsaLevel),
    layer_norm_bwd.add(DeviceType::cpu, &norm_bwd_any<true>, kIsaLevel),
};

SHOAL_KERNELS_END
