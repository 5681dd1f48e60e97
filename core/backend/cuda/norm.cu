// CUDA kernels of core/ops/norm.h. A block works on one row at a time. The column sums of the weight
// gradients go through one partial row per block, which a second kernel adds in ascending order.
#include "core/ops/norm.h"

#include <cmath>

#include "core/backend/cuda/block.h"

namespace shoal::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int64_t kMaxPartials = 264;  // blocks of a backward: 2 for each of the 132 processors of an H200
constexpr size_t kMaxSharedSums = size_t{96} << 10;  // larger rows of sums lie in device memory

/// X: stored type of x; S: of the residual and the sum; Y: of y. Arithmetic is in C.
template <class XType, class SType, class YType>
struct Forward {
  using X = XType;
  using S = SType;
  using Y = YType;
  using C = Compute<S>;
  static constexpr int kPack = std::min({cuda::kPack<X>, cuda::kPack<S>, cuda::kPack<Y>});
  const X* x;
  const S* residual;  // null: none
  const C *weight, *bias;
  Y* y;
  S* sum;
  C *mean, *rstd;
  int64_t num_rows, width;
  C eps;

  /// N elements of the row to normalise: x, or x + residual, which is written.
  template <int N>
  SHOAL_DEVICE Pack<C, N> first(int64_t i) const {
    const auto values = load<N>(x + i);
    Pack<C, N> out;
    if (residual == nullptr) {
      for (int j = 0; j < N; j++) out.v[j] = values.v[j];
      return out;
    }
    const auto more = load<N>(residual + i);
    for (int j = 0; j < N; j++) out.v[j] = static_cast<C>(values.v[j]) + more.v[j];
    store<N>(sum + i, out);
    return load<N>(sum + i);  // as it was rounded
  }
  /// The same once more, by the thread that read it first.
  template <int N>
  SHOAL_DEVICE Pack<C, N> again(int64_t i) const {
    if (residual != nullptr) return load<N>(sum + i);
    const auto values = load<N>(x + i);
    Pack<C, N> out;
    for (int j = 0; j < N; j++) out.v[j] = values.v[j];
    return out;
  }
};

template <bool kLayer, int N, class Args>
__global__ void norm_fwd_kernel(Args a) {
  using C = typename Args::C;
  using Sums = BlockSums<C, 1>;
  SHOAL_SHARED(C, scratch, Sums::kScratch);
  Sums block_sums(scratch);
  const int64_t start = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  const C width = static_cast<C>(a.width);
  for (int64_t row = blockIdx.x; row < a.num_rows; row += gridDim.x) {
    const int64_t at = row * a.width;
    C mean = 0, total[1] = {0};
    for (int64_t d = start; d < a.width; d += step) {
      const auto x = a.template first<N>(at + d);
      for (int j = 0; j < N; j++) total[0] += kLayer ? x.v[j] : x.v[j] * x.v[j];
    }
    block_sums(total);
    if constexpr (kLayer) {
      mean = total[0] / width;
      total[0] = 0;
      for (int64_t d = start; d < a.width; d += step) {
        const auto x = a.template again<N>(at + d);
        for (int j = 0; j < N; j++) total[0] += (x.v[j] - mean) * (x.v[j] - mean);
      }
      block_sums(total);
    }
    const C rstd = C(1) / std::sqrt(total[0] / width + a.eps);
    if (threadIdx.x == 0) {
      a.rstd[row] = rstd;
      if (kLayer) a.mean[row] = mean;
    }
    for (int64_t d = start; d < a.width; d += step) {
      const auto x = a.template again<N>(at + d);
      const auto weight = load<N>(a.weight + d);
      Pack<Compute<typename Args::Y>, N> y;
      for (int j = 0; j < N; j++) y.v[j] = (x.v[j] - mean) * rstd * weight.v[j];
      if (kLayer && a.bias != nullptr) {
        const auto bias = load<N>(a.bias + d);
        for (int j = 0; j < N; j++) y.v[j] += bias.v[j];
      }
      store<N>(a.y + at + d, y);
    }
  }
}

template <bool kLayer, class X, class S, class Y>
void norm_fwd_typed(const NormForward& args) {
  using Args = Forward<X, S, Y>;
  using C = typename Args::C;
  const Args a{args.x.data<X>(),
               data_or_null<S>(args.residual),
               args.weight.data<C>(),
               data_or_null<C>(args.bias),
               args.y.data<Y>(),
               data_or_null<S>(args.sum),
               data_or_null<C>(args.mean_T),
               args.rstd_T.data<C>(),
               args.x.num_rows(),
               args.x.row_size(),
               static_cast<C>(args.eps)};
  const LaunchShape shape =
      launch_shape(args.x.device(), a.num_rows, threads_for(a.width / Args::kPack, kMostThreads));
  if (all_aligned({a.x, a.residual, a.weight, a.bias, a.y, a.sum}) && a.width % Args::kPack == 0) {
    SHOAL_LAUNCH((norm_fwd_kernel<kLayer, Args::kPack, Args>), shape, a);
  } else {
    SHOAL_LAUNCH((norm_fwd_kernel<kLayer, 1, Args>), shape, a);
  }
}

template <class SType, class YType>
struct Backward {
  using S = SType;
  using Y = YType;
  using C = Compute<S>;
  static constexpr int kPack = std::min(cuda::kPack<S>, cuda::kPack<Y>);
  const Y* dy;
  const S *dsum, *x;
  const C *weight, *mean, *rstd;
  S* dx;  // may be dy
  BFloat16* dx_low;
  int64_t num_rows, width;
  // Sums of the weight gradients: rows [num_sums, width] per block; the first is dweight's, when it is
  // wanted.
  C* partials;
  int num_sums;
  bool want_weight, want_bias, shared_sums;
};

// With g = dy * weight and xhat = (x - mean) * rstd:
//   rms_norm:   dx = rstd * (g - xhat * mean(g * xhat))
//   layer_norm: dx = rstd * (g - mean(g) - xhat * mean(g * xhat))
// Every thread has its own columns, in sums too.
template <bool kLayer, int N, class Args>
SHOAL_DEVICE void norm_bwd_row(const Args& a, int64_t row, typename Args::C* sums,
                               BlockSums<typename Args::C, 2>& block_sums) {
  using C = typename Args::C;
  const int64_t at = row * a.width, start = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  const C rstd = a.rstd[row], mean = kLayer ? a.mean[row] : C(0), width = static_cast<C>(a.width);
  C* bias_sums = sums + (a.want_weight ? a.width : 0);
  C total[2] = {0, 0};  // of g, of g * xhat
  for (int64_t d = start; d < a.width; d += step) {
    const auto x = load<N>(a.x + at + d);
    const auto dy = load<N>(a.dy + at + d);
    const auto weight = load<N>(a.weight + d);
    for (int j = 0; j < N; j++) {
      const C grad = dy.v[j], xhat = (x.v[j] - mean) * rstd;
      if (a.want_weight) sums[d + j] += grad * xhat;
      if (a.want_bias) bias_sums[d + j] += grad;
      total[0] += grad * weight.v[j];
      total[1] += grad * weight.v[j] * xhat;
    }
  }
  if (a.dx == nullptr) return;
  block_sums(total);
  const C g_mean = kLayer ? total[0] / width : C(0), gx_mean = total[1] / width;
  for (int64_t d = start; d < a.width; d += step) {
    const auto x = load<N>(a.x + at + d);
    const auto dy = load<N>(a.dy + at + d);
    const auto weight = load<N>(a.weight + d);
    Pack<C, N> dx;
    for (int j = 0; j < N; j++) {
      dx.v[j] = rstd * (dy.v[j] * weight.v[j] - g_mean - (x.v[j] - mean) * rstd * gx_mean);
    }
    if (a.dsum != nullptr) {
      const auto more = load<N>(a.dsum + at + d);
      for (int j = 0; j < N; j++) dx.v[j] += more.v[j];
    }
    store<N>(a.dx + at + d, dx);
    if (a.dx_low == nullptr) continue;
    Pack<float, N> low;
    for (int j = 0; j < N; j++) low.v[j] = static_cast<float>(dx.v[j]);
    store<N>(a.dx_low + at + d, low);
  }
}

template <bool kLayer, int N, class Args>
__global__ void norm_bwd_kernel(Args a) {
  using C = typename Args::C;
  using Sums = BlockSums<C, 2>;
  SHOAL_SHARED(C, scratch, Sums::kScratch);
  SHOAL_DYNAMIC_SHARED(C, shared_sums);
  Sums block_sums(scratch);
  C* partial = a.partials + int64_t{blockIdx.x} * a.num_sums * a.width;
  C* sums = a.shared_sums ? shared_sums : partial;
  const int64_t start = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  const auto each_sum = [&](auto&& visit) {
    for (int s = 0; s < a.num_sums; s++) {
      for (int64_t d = start; d < a.width; d += step) {
        for (int j = 0; j < N; j++) visit(s * a.width + d + j);
      }
    }
  };
  each_sum([&](int64_t i) { sums[i] = 0; });
  for (int64_t row = blockIdx.x; row < a.num_rows; row += gridDim.x) {
    norm_bwd_row<kLayer, N>(a, row, sums, block_sums);
  }
  if (a.shared_sums) each_sum([&](int64_t i) { partial[i] = sums[i]; });
}

// to[d] += sum over b of partials[b * stride + d]: a column per lane, and the warps of a block share the
// partial rows: warp w adds the rows w, w + warps, ... in order; then these sums are added in order.
template <class C>
__global__ void add_partials_kernel(const C* partials, int64_t num_partials, int64_t stride, int64_t width,
                                    C* to) {
  SHOAL_SHARED(C, sums, kMaxWarps * kWarp);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  for (int64_t first = int64_t{blockIdx.x} * kWarp; first < width; first += int64_t{gridDim.x} * kWarp) {
    const int64_t d = first + lane;
    C sum = 0;
    for (int64_t b = warp; b < num_partials && d < width; b += num_warps) sum += partials[b * stride + d];
    sums[warp * kWarp + lane] = sum;
    __syncthreads();
    if (warp == 0 && d < width) {
      C total = to[d];
      for (unsigned w = 0; w < num_warps; w++) total += sums[w * kWarp + lane];
      to[d] = total;
    }
    __syncthreads();
  }
}

template <class C>
void add_partials(const C* partials, int64_t num_partials, int64_t stride, const Tensor& to) {
  constexpr int kThreads = 512;
  const int64_t width = to.numel();
  SHOAL_LAUNCH((add_partials_kernel<C>), launch_shape(to.device(), (width + kWarp - 1) / kWarp, kThreads),
               partials, num_partials, stride, width, to.data<C>());
}

template <bool kLayer, class S, class Y>
void norm_bwd_typed(const NormBackward& args) {
  using Args = Backward<S, Y>;
  using C = typename Args::C;
  const int64_t num_rows = args.x.num_rows(), width = args.x.row_size();
  const bool want_weight = args.dweight.defined(), want_bias = args.dbias.defined();
  const int num_sums = (want_weight ? 1 : 0) + (want_bias ? 1 : 0);
  const size_t sums_bytes = static_cast<size_t>(num_sums * width) * sizeof(C);
  const bool shared_sums = sums_bytes <= kMaxSharedSums;
  // Without weight gradients nothing is summed over rows, and every row may have its block.
  const LaunchShape shape =
      launch_shape(args.x.device(), num_sums == 0 ? num_rows : std::min(num_rows, kMaxPartials),
                   threads_for(width / Args::kPack, kMostThreads), 1, shared_sums ? sums_bytes : 0);
  const Tensor partials =
      Tensor::empty({num_sums == 0 ? 0 : shape.grid_x, num_sums, width}, dtype_of<C>, args.x.device());
  const Args a{args.dy.data<Y>(),
               data_or_null<S>(args.dsum),
               args.x.data<S>(),
               args.weight.data<C>(),
               data_or_null<C>(args.mean_T),
               args.rstd_T.data<C>(),
               data_or_null<S>(args.dx),
               data_or_null<BFloat16>(args.dx_low),
               num_rows,
               width,
               partials.data<C>(),
               num_sums,
               want_weight,
               want_bias,
               shared_sums};
  if (all_aligned({a.dy, a.dsum, a.x, a.weight, a.dx, a.dx_low}) && width % Args::kPack == 0) {
    SHOAL_LAUNCH((norm_bwd_kernel<kLayer, Args::kPack, Args>), shape, a);
  } else {
    SHOAL_LAUNCH((norm_bwd_kernel<kLayer, 1, Args>), shape, a);
  }
  const int64_t stride = num_sums * width;
  if (want_weight) add_partials(a.partials, shape.grid_x, stride, args.dweight);
  if (want_bias) add_partials(a.partials + (want_weight ? width : 0), shape.grid_x, stride, args.dbias);
}

/// Calls run<X, S, Y>() for the dtypes of x, the residual stream and y that norm.h allows.
template <class Run>
void with_types(DType x, DType stream, DType y, const Run& run) {
  if (x != y) return run.template operator()<float, float, BFloat16>();
  dispatch_storage(x, "norm", [&]<class T>() {
    if (stream == x) return run.template operator()<T, T, T>();
    if constexpr (std::is_same_v<T, BFloat16>) run.template operator()<BFloat16, float, BFloat16>();
  });
}

template <bool kLayer>
void norm_fwd(const NormForward& args) {
  const DType stream = args.residual.defined() ? args.residual.dtype() : args.x.dtype();
  with_types(args.x.dtype(), stream, args.y.dtype(),
             [&]<class X, class S, class Y>() { norm_fwd_typed<kLayer, X, S, Y>(args); });
}

/// x of a backward is the stream.
template <bool kLayer>
void norm_bwd(const NormBackward& args) {
  if (args.x.dtype() != args.dy.dtype()) return norm_bwd_typed<kLayer, float, BFloat16>(args);
  dispatch_storage(args.x.dtype(), "norm", [&]<class T>() { norm_bwd_typed<kLayer, T, T>(args); });
}

[[maybe_unused]] const bool added[] = {
    rms_norm_fwd.add(DeviceType::cuda, &norm_fwd<false>),
    rms_norm_bwd.add(DeviceType::cuda, &norm_bwd<false>),
    layer_norm_fwd.add(DeviceType::cuda, &norm_fwd<true>),
    layer_norm_bwd.add(DeviceType::cuda, &norm_bwd<true>),
};

}  // namespace
}  // namespace shoal::cuda
