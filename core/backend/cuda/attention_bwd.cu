// Backward of attention without tensor cores, for every type and head size: as bf16_attention_bwd.cu, with a
// warp for a few keys, or for a few rows of queries of the heads that share a key head. A warp goes through
// the rows of the other kind 32 at a time: a lane makes p and ds of one of them, then the sums of some
// columns.
#include "core/backend/cuda/attention.h"

namespace shoal::cuda {
namespace {

constexpr int kMostWarps = 4, kRows = 4, kLanes = static_cast<int>(kWarp);
constexpr size_t kUsualShared = size_t{96} << 10, kMostShared = size_t{227} << 10;

/// Rows of a warp: keys (kOfKeys) or queries. "Others" are the rows of the other kind that belong to a row.
template <class T, bool kOfKeys>
struct OwnRows {
  using C = Compute<T>;
  static constexpr int kArrays = kOfKeys ? 4 : 3;
  C *scores_row, *values_row;    // [kRows, head_size]: keys and values, or queries and dy
  C *scores_sums, *values_sums;  // the same: dk or dq, without the scale; dv
  C *p, *ds;                     // [kRows, 32]
  int row[kRows], head[kRows];   // head: of the group, of queries
  Range others[kRows];
  C lse[kRows], delta[kRows], slope[kRows];  // of queries
  int count;

  static constexpr size_t elements(int64_t head_size) {
    return static_cast<size_t>(kRows) * static_cast<size_t>(kArrays * head_size + 2 * kLanes);
  }
  SHOAL_DEVICE OwnRows(C* shared, int head_size)
      : scores_row(shared),
        values_row(scores_row + kRows * head_size),
        scores_sums(values_row + kRows * head_size),
        values_sums(scores_sums + (kOfKeys ? kRows * head_size : 0)),
        p(values_sums + kRows * head_size),
        ds(p + kRows * kLanes) {}
};

/// Rows [first, first + own.count): keys, or queries r / heads of head r % heads.
template <class T, class S, bool kOfKeys>
SHOAL_DEVICE void start_rows(const AttentionArgs<T, S>& a, const AttentionGradients<T>& gradients, int b,
                             int g, int first, OwnRows<T, kOfKeys>& own) {
  using C = Compute<T>;
  SHOAL_UNROLL
  for (int r = 0; r < kRows; r++) {
    const int row = first + (r < own.count ? r : 0);
    own.row[r] = kOfKeys ? row : row / a.heads;
    own.head[r] = kOfKeys ? 0 : row % a.heads;
    own.others[r] = kOfKeys ? a.sight.queries_of(b, own.row[r]) : a.sight.keys_of(b, own.row[r]);
    const int head = g * a.heads + own.head[r];
    if (!kOfKeys) {
      own.lse[r] = a.lse[a.stat_of(b, own.row[r], head)];
      own.delta[r] = gradients.delta[a.stat_of(b, own.row[r], head)];
      own.slope[r] = a.slope_of(head);
    }
    const int offset = own.head[r] * a.head_size;
    const T* scores = (kOfKeys ? a.k : a.q).at(b, own.row[r], g) + offset;
    const T* values = (kOfKeys ? a.v : gradients.dy).at(b, own.row[r], g) + offset;
    for (int c = static_cast<int>(threadIdx.x) % kLanes; c < a.head_size; c += kLanes) {
      own.scores_row[r * a.head_size + c] = static_cast<C>(scores[c]);
      own.values_row[r * a.head_size + c] = static_cast<C>(values[c]);
      own.scores_sums[r * a.head_size + c] = 0;
      if (kOfKeys) own.values_sums[r * a.head_size + c] = 0;
    }
  }
  __syncwarp();
}

/// p and ds of the other row of this lane, at `other`; head: of the group, of queries that are the others.
template <int N, class T, class S, bool kOfKeys>
SHOAL_DEVICE void score_gradients(const AttentionArgs<T, S>& a, const AttentionGradients<T>& gradients, int b,
                                  int g, int head, int other, bool there, OwnRows<T, kOfKeys>& own) {
  using C = Compute<T>;
  C scores[kRows] = {}, values[kRows] = {}, lse = 0, delta = 0, slope = 0;
  if (there) {
    const T* scores_row = (kOfKeys ? a.q : a.k).at(b, other, g) + head * a.head_size;
    const T* values_row = (kOfKeys ? gradients.dy : a.v).at(b, other, g) + head * a.head_size;
    for (int c = 0; c < a.head_size; c += N) {
      const auto score = load<N>(scores_row + c), value = load<N>(values_row + c);
      SHOAL_UNROLL
      for (int i = 0; i < N * kRows; i++) {
        const int at = i % kRows * a.head_size + c + i / kRows;
        scores[i % kRows] += own.scores_row[at] * score.v[i / kRows];
        values[i % kRows] += own.values_row[at] * value.v[i / kRows];
      }
    }
    if (kOfKeys) {
      const int64_t stat = a.stat_of(b, other, g * a.heads + head);
      lse = a.lse[stat];
      delta = gradients.delta[stat];
      slope = a.slope_of(g * a.heads + head);
    }
  }
  SHOAL_UNROLL
  for (int r = 0; r < kRows; r++) {
    const int distance = kOfKeys ? a.sight.distance(other, own.row[r]) : a.sight.distance(own.row[r], other);
    const C bias = (kOfKeys ? slope : own.slope[r]) * static_cast<C>(distance);
    const bool seen = there && own.others[r].has(other);
    const C p = seen ? fast_exp(scores[r] * a.scale + bias - (kOfKeys ? lse : own.lse[r])) : C(0);
    own.p[r * kLanes + static_cast<int>(threadIdx.x) % kLanes] = p;
    own.ds[r * kLanes + static_cast<int>(threadIdx.x) % kLanes] =
        seen ? p * (values[r] - (kOfKeys ? delta : own.delta[r])) : C(0);
  }
}

/// Others [first, last), at most 32.
template <int N, class T, class S, bool kOfKeys>
SHOAL_DEVICE void add_others(const AttentionArgs<T, S>& a, const AttentionGradients<T>& gradients, int b,
                             int g, int head, int first, int last, OwnRows<T, kOfKeys>& own) {
  using C = Compute<T>;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  score_gradients<N>(a, gradients, b, g, head, first + lane, first + lane < last, own);
  __syncwarp();
  const HeadRows<const T>&scores_rows = kOfKeys ? a.q : a.k, &values_rows = gradients.dy;
  for (int c = lane; c < a.head_size; c += kLanes) {
    C scores_sums[kRows] = {}, values_sums[kRows] = {};
    const T* scores = scores_rows.at(b, first, g) + head * a.head_size + c;
    const T* values = values_rows.at(b, first, g) + head * a.head_size + c;
    for (int j = 0; j < last - first; j++) {
      const auto score = static_cast<C>(scores[j * scores_rows.row]);
      SHOAL_UNROLL
      for (int r = 0; r < kRows; r++) scores_sums[r] += own.ds[r * kLanes + j] * score;
      if (!kOfKeys) continue;
      const auto value = static_cast<C>(values[j * values_rows.row]);
      SHOAL_UNROLL
      for (int r = 0; r < kRows; r++) values_sums[r] += own.p[r * kLanes + j] * value;
    }
    SHOAL_UNROLL
    for (int r = 0; r < kRows; r++) {
      own.scores_sums[r * a.head_size + c] += scores_sums[r];
      if (kOfKeys) own.values_sums[r * a.head_size + c] += values_sums[r];
    }
  }
  __syncwarp();  // p and ds are read
}

template <class T, class S, bool kOfKeys>
SHOAL_DEVICE void finish_rows(const AttentionArgs<T, S>& a, const AttentionGradients<T>& gradients, int b,
                              int g, const OwnRows<T, kOfKeys>& own) {
  SHOAL_UNROLL
  for (int r = 0; r < kRows; r++) {
    if (r >= own.count) break;
    T* scores = (kOfKeys ? gradients.dk : gradients.dq).at(b, own.row[r], g) + own.head[r] * a.head_size;
    T* values = gradients.dv.at(b, own.row[r], g);
    for (int c = static_cast<int>(threadIdx.x) % kLanes; c < a.head_size; c += kLanes) {
      scores[c] = own.scores_sums[r * a.head_size + c] * a.scale;
      if (kOfKeys) values[c] = own.values_sums[r * a.head_size + c];
    }
  }
}

template <int N, bool kOfKeys, class T, class S>
__global__ void __launch_bounds__(kMostWarps* kLanes, 1)
    attention_bwd_rows_kernel(AttentionArgs<T, S> a, AttentionGradients<T> gradients) {
  using C = Compute<T>;
  SHOAL_DYNAMIC_SHARED(C, shared);
  OwnRows<T, kOfKeys> own(shared + threadIdx.x / kWarp * own.elements(a.head_size), a.head_size);
  const int group_rows = kOfKeys ? a.sight.num_keys : a.sight.num_queries * a.heads;
  const int chunks = (group_rows + kRows - 1) / kRows, count = chunks * a.batch * a.groups;
  const int step = static_cast<int>(gridDim.x * (blockDim.x / kWarp));
  for (int i = static_cast<int>(blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp); i < count;
       i += step) {
    const int g = i % a.groups, b = i / a.groups % a.batch, chunk = i / a.groups / a.batch;
    // The first keys and the last queries have most to do: they go first.
    const int first = (kOfKeys ? chunk : chunks - 1 - chunk) * kRows;
    own.count = smaller_of(kRows, group_rows - first);
    start_rows(a, gradients, b, g, first, own);
    const int last = first + own.count - 1;
    const Range others{
        kOfKeys ? a.sight.queries_of(b, first).first : a.sight.keys_of(b, first / a.heads).first,
        kOfKeys ? a.sight.queries_of(b, last).last : a.sight.keys_of(b, last / a.heads).last};
    for (int head = 0; head < (kOfKeys ? a.heads : 1); head++) {
      for (int other = others.first; other < others.last; other += kLanes) {
        add_others<N>(a, gradients, b, g, head, other, smaller_of(others.last, other + kLanes), own);
      }
    }
    finish_rows(a, gradients, b, g, own);
  }
}

template <bool kOfKeys, class T, class S>
void launch_rows(Device device, const AttentionArgs<T, S>& a, const AttentionGradients<T>& gradients) {
  using C = Compute<T>;
  const size_t warp_bytes = OwnRows<T, kOfKeys>::elements(a.head_size) * sizeof(C);
  SHOAL_CHECK(warp_bytes <= kMostShared, "attention: the head size ", a.head_size,
              " is too large for the gradient in ", dtype_of<C>, " on a GPU; expected at most ",
              (kMostShared / sizeof(C) / kRows - 2 * kLanes) / 4);
  const auto warps = static_cast<int>(std::clamp<size_t>(kUsualShared / warp_bytes, 1, kMostWarps));
  const LaunchShape one = launch_shape(device, 1, warps * kLanes);
  const int64_t block_warps = one.block / kWarp;
  const int64_t group_rows = kOfKeys ? a.sight.num_keys : int64_t{a.sight.num_queries} * a.heads;
  const int64_t count = (group_rows + kRows - 1) / kRows * a.batch * a.groups;
  SHOAL_CHECK(count < INT32_MAX / 2, "attention: ", a.batch, " sequences of ", a.sight.num_queries,
              " tokens with ", a.groups * a.heads, " heads are too many for one launch; use fewer");
  const LaunchShape shape =
      launch_shape(device, (count + block_warps - 1) / block_warps, static_cast<int>(one.block), 1,
                   static_cast<size_t>(block_warps) * warp_bytes);
  constexpr int kN = kPack<T>;
  const bool packs = all_aligned({a.q.data, a.k.data, a.v.data, gradients.dy.data}) && a.head_size % kN == 0;
  if (packs) {
    SHOAL_LAUNCH((attention_bwd_rows_kernel<kN, kOfKeys, T, S>), shape, a, gradients);
  } else {
    SHOAL_LAUNCH((attention_bwd_rows_kernel<1, kOfKeys, T, S>), shape, a, gradients);
  }
}

/// A warp per row of `width` columns.
template <class T>
__global__ void delta_kernel(const T* dy, const T* y, int64_t num_rows, int width, Compute<T>* delta) {
  using C = Compute<T>;
  const int64_t per_block = blockDim.x / kWarp, first = blockIdx.x * per_block + threadIdx.x / kWarp;
  for (int64_t row = first; row < num_rows; row += gridDim.x * per_block) {
    C sum = 0;
    for (int c = static_cast<int>(threadIdx.x) % kLanes; c < width; c += kLanes) {
      sum += static_cast<C>(dy[row * width + c]) * static_cast<C>(y[row * width + c]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) delta[row] = sum;
  }
}

}  // namespace

template <class T, class S>
void attention_bwd_by_rows(Device device, const AttentionArgs<T, S>& a,
                           const AttentionGradients<T>& gradients) {
  launch_rows<true>(device, a, gradients);
  launch_rows<false>(device, a, gradients);
}

template <class T>
Tensor attention_delta(const Tensor& dy, const Tensor& y, int64_t head_size) {
  SHOAL_CHECK(dy.dtype() == y.dtype() && dy.numel() == y.numel(), "attention_bwd: expected dy like y, ",
              y.shape(), " ", y.dtype(), ", got ", dy.shape(), " ", dy.dtype());
  const Device device = y.device();
  const int64_t num_rows = y.numel() / head_size;
  const Tensor delta = Tensor::empty({num_rows}, dtype_of<Compute<T>>, device);
  SHOAL_LAUNCH((delta_kernel<T>),
               launch_shape(device, (num_rows + kMostWarps - 1) / kMostWarps, kMostWarps * kLanes),
               dy.data<T>(), y.data<T>(), num_rows, static_cast<int>(head_size), delta.data<Compute<T>>());
  return delta;
}

template void attention_bwd_by_rows(Device, const AttentionArgs<BFloat16>&,
                                    const AttentionGradients<BFloat16>&);
template void attention_bwd_by_rows(Device, const AttentionArgs<BFloat16, PartSight>&,
                                    const AttentionGradients<BFloat16>&);
template Tensor attention_delta<BFloat16>(const Tensor&, const Tensor&, int64_t);

namespace {

void attention_bwd_impl(const AttentionBackward& args, const AttentionSpec& spec) {
  const Tensor bounds = document_bounds(spec, args.qkv.device());
  dispatch_float(args.qkv.dtype(), "attention_bwd", [&]<class T>() {
    const Tensor delta = attention_delta<T>(args.dy, args.y, spec.head_size);
    attention_bwd_by_rows(args.qkv.device(), attention_args<T>(args.qkv, spec, args.y, args.lse, bounds),
                          attention_gradients<T>(args, spec, delta));
  });
}

void attention_part_bwd_impl(const AttentionPartBackward& args, const AttentionSpec& spec,
                             const AttentionPart& part) {
  const Tensor bounds = document_bounds(spec, args.qkv.device());
  dispatch_float(args.qkv.dtype(), "attention_part_bwd", [&]<class T>() {
    const Tensor delta = attention_delta<T>(args.dy, args.y, spec.head_size);
    attention_bwd_by_rows(args.qkv.device(),
                          part_args<T>({args.qkv, args.kv, args.y, args.lse}, spec, part, bounds),
                          part_gradients<T>(args, spec, part, delta));
  });
}

[[maybe_unused]] const bool added[] = {
    attention_bwd.add(DeviceType::cuda, &attention_bwd_impl),
    attention_part_bwd.add(DeviceType::cuda, &attention_part_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
