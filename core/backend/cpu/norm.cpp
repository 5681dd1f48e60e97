// CPU kernels of core/ops/norm.h. Rows are independent; the column sums of the weight gradients go through
// partial sums of fixed blocks of rows, added in ascending order.
#include "core/ops/norm.h"

#include <cmath>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

template <class T>
const T* data_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}
template <class T>
T* mutable_or_null(const Tensor& t) {
  return t.defined() ? t.data<T>() : nullptr;
}

template <class T>
struct ForwardArgs {
  explicit ForwardArgs(const NormForward& a)
      : x(a.x.data<T>()),
        residual(data_or_null<T>(a.residual)),
        weight(a.weight.data<T>()),
        bias(data_or_null<T>(a.bias)),
        y(a.y.data<T>()),
        sum(mutable_or_null<T>(a.sum)),
        mean(mutable_or_null<T>(a.mean_T)),
        rstd(a.rstd_T.data<T>()),
        width(a.x.row_size()),
        eps(static_cast<T>(a.eps)) {}
  const T *x, *residual, *weight, *bias;
  T *y, *sum, *mean, *rstd;
  int64_t width;
  T eps;

  /// The row to normalise: x, or x + residual, which is written first.
  const T* input_row(int64_t r) const {
    if (residual == nullptr) return x + r * width;
    const T *a = x + r * width, *b = residual + r * width;
    T* to = sum + r * width;
#pragma omp simd
    for (int64_t d = 0; d < width; d++) to[d] = a[d] + b[d];
    return to;
  }
};

template <class T>
void rms_norm_row(const ForwardArgs<T>& a, int64_t r) {
  const T* x = a.input_row(r);
  T squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < a.width; d++) squares += x[d] * x[d];
  const T rstd = T(1) / std::sqrt(squares / static_cast<T>(a.width) + a.eps);
  a.rstd[r] = rstd;
  T* y = a.y + r * a.width;
  const T* weight = a.weight;
#pragma omp simd
  for (int64_t d = 0; d < a.width; d++) y[d] = x[d] * rstd * weight[d];
}

template <class T>
void layer_norm_row(const ForwardArgs<T>& a, int64_t r) {
  const T* x = a.input_row(r);
  T total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t d = 0; d < a.width; d++) total += x[d];
  const T mean = total / static_cast<T>(a.width);
#pragma omp simd reduction(+ : squares)
  for (int64_t d = 0; d < a.width; d++) squares += (x[d] - mean) * (x[d] - mean);
  const T rstd = T(1) / std::sqrt(squares / static_cast<T>(a.width) + a.eps);
  a.mean[r] = mean;
  a.rstd[r] = rstd;
  T* y = a.y + r * a.width;
  const T *weight = a.weight, *bias = a.bias;
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) y[d] = (x[d] - mean) * rstd * weight[d];
  } else {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) y[d] = (x[d] - mean) * rstd * weight[d] + bias[d];
  }
}

template <class T>
struct BackwardArgs {
  explicit BackwardArgs(const NormBackward& a)
      : dy(a.dy.data<T>()),
        dsum(data_or_null<T>(a.dsum)),
        x(a.x.data<T>()),
        weight(a.weight.data<T>()),
        mean(data_or_null<T>(a.mean_T)),
        rstd(a.rstd_T.data<T>()),
        dx(mutable_or_null<T>(a.dx)),
        width(a.x.row_size()) {}
  const T *dy, *dsum, *x, *weight, *mean, *rstd;
  T* dx;  // may be dy
  int64_t width;
};

// With g = dy * weight and xhat = (x - mean) * rstd:
//   rms_norm:   dx = rstd * (g - xhat * mean(g * xhat))
//   layer_norm: dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
// dweight and dbias are null or one row of sums.
template <bool kLayer, class T>
void norm_bwd_row(const BackwardArgs<T>& a, int64_t r, T* dweight, T* dbias) {
  const T *dy = a.dy + r * a.width, *x = a.x + r * a.width, *weight = a.weight;
  const T rstd = a.rstd[r];
  const T mean = kLayer ? a.mean[r] : T(0);
  if (dweight != nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) dweight[d] += dy[d] * ((x[d] - mean) * rstd);
  }
  if (dbias != nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) dbias[d] += dy[d];
  }
  if (a.dx == nullptr) return;
  T g_sum = 0, gx_sum = 0;
#pragma omp simd reduction(+ : g_sum, gx_sum)
  for (int64_t d = 0; d < a.width; d++) {
    const T g = dy[d] * weight[d];
    g_sum += g;
    gx_sum += g * ((x[d] - mean) * rstd);
  }
  const T g_mean = kLayer ? g_sum / static_cast<T>(a.width) : T(0);
  const T gx_mean = gx_sum / static_cast<T>(a.width);
  T* dx = a.dx + r * a.width;
  if (a.dsum == nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) {
      dx[d] = rstd * (dy[d] * weight[d] - g_mean - (x[d] - mean) * rstd * gx_mean);
    }
  } else {
    const T* dsum = a.dsum + r * a.width;
#pragma omp simd
    for (int64_t d = 0; d < a.width; d++) {
      dx[d] = rstd * (dy[d] * weight[d] - g_mean - (x[d] - mean) * rstd * gx_mean) + dsum[d];
    }
  }
}

constexpr int64_t kMaxRowBlocks = 32;
constexpr int64_t kMinRowsPerBlock = 16;

template <bool kLayer, class T>
void norm_bwd(const NormBackward& args) {
  const BackwardArgs<T> a(args);
  const int64_t num_rows = args.x.num_rows(), width = a.width;
  const bool want_weight = args.dweight.defined(), want_bias = args.dbias.defined();
  if (!want_weight && !want_bias) {
    cpu::parallel_rows(num_rows, width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) norm_bwd_row<kLayer, T>(a, r, nullptr, nullptr);
    });
    return;
  }
  const int64_t block = std::max(kMinRowsPerBlock, (num_rows + kMaxRowBlocks - 1) / kMaxRowBlocks);
  const int64_t num_blocks = (num_rows + block - 1) / block;
  // Block b: a row of weight sums, then a row of bias sums.
  const Tensor partial = Tensor::empty({num_blocks, 2, width}, dtype_of<T>);
  T* partial_data = partial.data<T>();
  parallel_for(num_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
      T* sums = partial_data + b * 2 * width;
      std::fill(sums, sums + 2 * width, T(0));
      for (int64_t r = b * block; r < std::min(num_rows, (b + 1) * block); r++) {
        norm_bwd_row<kLayer, T>(a, r, want_weight ? sums : nullptr, want_bias ? sums + width : nullptr);
      }
    }
  });
  const auto add_up = [&](const Tensor& to, int64_t offset) {
    if (!to.defined()) return;
    T* out = to.data<T>();
    for (int64_t b = 0; b < num_blocks; b++) {
      const T* sums = partial_data + b * 2 * width + offset;
#pragma omp simd
      for (int64_t d = 0; d < width; d++) out[d] += sums[d];
    }
  };
  add_up(args.dweight, 0);
  add_up(args.dbias, width);
}

void rms_norm_fwd_impl(const NormForward& args) {
  dispatch_float(args.x.dtype(), "rms_norm", [&]<class T>() {
    const ForwardArgs<T> a(args);
    cpu::parallel_rows(args.x.num_rows(), a.width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) rms_norm_row(a, r);
    });
  });
}

void layer_norm_fwd_impl(const NormForward& args) {
  dispatch_float(args.x.dtype(), "layer_norm", [&]<class T>() {
    const ForwardArgs<T> a(args);
    cpu::parallel_rows(args.x.num_rows(), a.width, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) layer_norm_row(a, r);
    });
  });
}

void rms_norm_bwd_impl(const NormBackward& args) {
  dispatch_float(args.x.dtype(), "rms_norm", [&]<class T>() { norm_bwd<false, T>(args); });
}

void layer_norm_bwd_impl(const NormBackward& args) {
  dispatch_float(args.x.dtype(), "layer_norm", [&]<class T>() { norm_bwd<true, T>(args); });
}

const bool added[] = {
    rms_norm_fwd.add(DeviceType::cpu, &rms_norm_fwd_impl, kIsaLevel),
    rms_norm_bwd.add(DeviceType::cpu, &rms_norm_bwd_impl, kIsaLevel),
    layer_norm_fwd.add(DeviceType::cpu, &layer_norm_fwd_impl, kIsaLevel),
    layer_norm_bwd.add(DeviceType::cpu, &layer_norm_bwd_impl, kIsaLevel),
};

SHOAL_KERNELS_END
