// Attention forward without tensor cores, for every type and head size (online softmax: Dao,
// arXiv:2307.08691, algorithm 1). A warp has up to kRows neighbouring rows of queries, of the heads that
// share a key head, and goes through the keys that any of them sees, 32 at a time: a lane makes the scores of
// one key, then the sums of some columns. When there are few queries and many keys (decoding) the keys are
// cut into parts, whose results a second kernel joins.
#include "core/backend/cuda/attention.h"

namespace shoal::cuda {
namespace {

constexpr int kMostWarps = 4, kRows = 4;
constexpr int64_t kPartKeys = 128;
constexpr int64_t kEnoughWarps = 2112;  // 16 for each of the 132 processors of an H200: then keys are not cut
constexpr size_t kUsualShared = size_t{96} << 10, kMostShared = size_t{227} << 10;

/// Shared memory of a warp, in elements.
template <int kR>
constexpr size_t row_elements(int64_t head_size) {
  return static_cast<size_t>(kR) * static_cast<size_t>(2 * head_size + kWarp);
}

/// Rows r of a group: query r / heads of head r % heads.
template <class T>
struct Parts {
  int count, keys;  // parts of the keys, and their size
  Compute<T>*
      joined;  // [B * S * H, count, head_size + 2]: sums, max and total of each part; null: count is 1
};

/// The running softmax of kR rows of one warp. q and sums are [kR, head_size], weights [kR, 32].
template <class T, int kR>
struct RowState {
  using C = Compute<T>;
  C *q, *sums, *weights;
  C max[kR], total[kR], slope[kR];
  int query[kR], head[kR];  // head: of the group
  Range keys[kR];
  int num_rows;
};

template <class T, class S, int kR>
SHOAL_DEVICE void start_rows(const AttentionArgs<T, S>& a, int b, int g, int first, RowState<T, kR>& rows) {
  using C = Compute<T>;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  SHOAL_UNROLL
  for (int r = 0; r < kR; r++) {
    const int row = first + (r < rows.num_rows ? r : 0);
    rows.query[r] = row / a.heads;
    rows.head[r] = row % a.heads;
    rows.keys[r] = a.sight.keys_of(b, rows.query[r]);
    rows.slope[r] = a.slope_of(g * a.heads + rows.head[r]);
    rows.max[r] = -INFINITY;
    rows.total[r] = 0;
    const T* q = a.q.at(b, rows.query[r], g) + rows.head[r] * a.head_size;
    for (int c = lane; c < a.head_size; c += static_cast<int>(kWarp)) {
      rows.q[r * a.head_size + c] = static_cast<C>(q[c]) * a.scale;
      rows.sums[r * a.head_size + c] = 0;
    }
  }
  __syncwarp();
}

/// Weights of 32 keys from `first` on; scores of this lane's key. Sums so far are to be multiplied by factor.
template <class T, class S, int kR>
SHOAL_DEVICE void weigh(const S& sight, RowState<T, kR>& rows, const Compute<T> (&scores)[kR], int first,
                        Compute<T> (&factor)[kR]) {
  using C = Compute<T>;
  const int lane = static_cast<int>(threadIdx.x % kWarp), key = first + lane;
  SHOAL_UNROLL
  for (int r = 0; r < kR; r++) {
    const bool seen = rows.keys[r].has(key);
    const C score = scores[r] + rows.slope[r] * static_cast<C>(sight.distance(rows.query[r], key));
    const C largest = warp_max(seen ? score : C(-INFINITY)),
            max = largest > rows.max[r] ? largest : rows.max[r];
    const C weight = seen ? fast_exp(score - max) : C(0);
    factor[r] = max == rows.max[r] ? C(1) : fast_exp(rows.max[r] - max);
    rows.max[r] = max;
    rows.total[r] = rows.total[r] * factor[r] + warp_sum(weight);
    rows.weights[r * static_cast<int>(kWarp) + lane] = weight;
  }
}

/// Keys [first, last), at most 32.
template <int N, class T, class S, int kR>
SHOAL_DEVICE void attend_keys(const AttentionArgs<T, S>& a, int b, int g, int first, int last,
                              RowState<T, kR>& rows) {
  using C = Compute<T>;
  const int lane = static_cast<int>(threadIdx.x % kWarp), c_size = a.head_size;
  C scores[kR] = {}, factor[kR];
  if (first + lane < last) {
    const T* k = a.k.at(b, first + lane, g);
    for (int c = 0; c < c_size; c += N) {
      const auto values = load<N>(k + c);
      SHOAL_UNROLL
      for (int j = 0; j < N; j++) {
        SHOAL_UNROLL
        for (int r = 0; r < kR; r++) scores[r] += rows.q[r * c_size + c + j] * values.v[j];
      }
    }
  }
  weigh<T, S, kR>(a.sight, rows, scores, first, factor);
  __syncwarp();
  for (int c = lane; c < c_size; c += static_cast<int>(kWarp)) {
    C sums[kR];
    SHOAL_UNROLL
    for (int r = 0; r < kR; r++) sums[r] = rows.sums[r * c_size + c] * factor[r];
    const T* v = a.v.at(b, first, g) + c;
    for (int key = 0; key < last - first; key++) {
      const auto value = static_cast<C>(v[key * a.v.row]);
      SHOAL_UNROLL
      for (int r = 0; r < kR; r++) sums[r] += rows.weights[r * static_cast<int>(kWarp) + key] * value;
    }
    SHOAL_UNROLL
    for (int r = 0; r < kR; r++) rows.sums[r * c_size + c] = sums[r];
  }
  __syncwarp();  // the weights are read
}

template <class T, class S, int kR>
SHOAL_DEVICE void finish_rows(const AttentionArgs<T, S>& a, int b, int g, int part, const Parts<T>& parts,
                              const RowState<T, kR>& rows) {
  using C = Compute<T>;
  const int lane = static_cast<int>(threadIdx.x % kWarp), c_size = a.head_size;
  SHOAL_UNROLL
  for (int r = 0; r < kR; r++) {
    if (r >= rows.num_rows) break;
    const int64_t stat = a.stat_of(b, rows.query[r], g * a.heads + rows.head[r]);
    if (parts.joined != nullptr) {
      C* to = parts.joined + (stat * parts.count + part) * (c_size + 2);
      for (int c = lane; c < c_size; c += static_cast<int>(kWarp)) to[c] = rows.sums[r * c_size + c];
      if (lane < 2) to[c_size + lane] = lane == 0 ? rows.max[r] : rows.total[r];
      continue;
    }
    T* y = a.y.at(b, rows.query[r], g) + rows.head[r] * c_size;
    const C inverse = rows.total[r] == C(0) ? C(0) : 1 / rows.total[r];  // 0: it saw no key
    for (int c = lane; c < c_size; c += static_cast<int>(kWarp)) y[c] = rows.sums[r * c_size + c] * inverse;
    if (a.lse != nullptr && lane == 0) a.lse[stat] = rows.max[r] + std::log(rows.total[r]);
  }
}

template <int N, int kR, class T, class S>
__global__ void __launch_bounds__(kMostWarps* kWarp, 1)
    attention_rows_kernel(AttentionArgs<T, S> a, Parts<T> parts) {
  using C = Compute<T>;
  SHOAL_DYNAMIC_SHARED(C, shared);
  RowState<T, kR> rows;
  rows.q = shared + threadIdx.x / kWarp * row_elements<kR>(a.head_size);
  rows.sums = rows.q + kR * a.head_size;
  rows.weights = rows.sums + kR * a.head_size;
  const int group_rows = a.sight.num_queries * a.heads, chunks = (group_rows + kR - 1) / kR;
  const unsigned count =
      static_cast<unsigned>(chunks * a.batch * a.groups) * static_cast<unsigned>(parts.count);
  const unsigned step = gridDim.x * (blockDim.x / kWarp);
  for (unsigned i = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; i < count; i += step) {
    const auto part = static_cast<int>(i) % parts.count, place = static_cast<int>(i) / parts.count;
    const int g = place % a.groups, b = place / a.groups % a.batch;
    const int first = (chunks - 1 - place / a.groups / a.batch) * kR;
    rows.num_rows = smaller_of(kR, group_rows - first);
    start_rows(a, b, g, first, rows);
    const Range keys{a.sight.keys_of(b, first / a.heads).first,
                     a.sight.keys_of(b, (first + rows.num_rows - 1) / a.heads).last};
    const int end = smaller_of(keys.last, parts.count > 1 ? (part + 1) * parts.keys : keys.last);
    for (int key = parts.count > 1 ? part * parts.keys : keys.first; key < end;
         key += static_cast<int>(kWarp)) {
      attend_keys<N>(a, b, g, key, smaller_of(end, key + static_cast<int>(kWarp)), rows);
    }
    finish_rows(a, b, g, part, parts, rows);
  }
}

/// A warp per row joins its parts, in order.
template <class T>
__global__ void join_parts_kernel(const Compute<T>* joined, int num_parts, int64_t num_rows, int head_size,
                                  T* y) {
  using C = Compute<T>;
  const int64_t per_block = blockDim.x / kWarp, first = blockIdx.x * per_block + threadIdx.x / kWarp;
  for (int64_t row = first; row < num_rows; row += gridDim.x * per_block) {
    const C* parts = joined + row * num_parts * (head_size + 2);
    C max = -INFINITY, total = 0;
    for (int p = 0; p < num_parts; p++) {
      const C* end = parts + p * (head_size + 2) + head_size;
      max = end[0] > max ? end[0] : max;
    }
    for (int p = 0; p < num_parts; p++) {
      const C* end = parts + p * (head_size + 2) + head_size;
      total += end[1] == C(0) ? C(0) : end[1] * fast_exp(end[0] - max);
    }
    for (int c = static_cast<int>(threadIdx.x % kWarp); c < head_size; c += static_cast<int>(kWarp)) {
      C sum = 0;
      for (int p = 0; p < num_parts; p++) {
        const C* part = parts + p * (head_size + 2);
        sum += part[head_size + 1] == C(0) ? C(0) : part[c] * fast_exp(part[head_size] - max);
      }
      y[row * head_size + c] = sum / total;
    }
  }
}

template <int kR, class T, class S>
void launch_rows(Device device, const AttentionArgs<T, S>& a, const Parts<T>& parts) {
  using C = Compute<T>;
  const size_t warp_bytes = row_elements<kR>(a.head_size) * sizeof(C);
  SHOAL_CHECK(warp_bytes <= kMostShared, "attention: the head size ", a.head_size, " is too large for ",
              dtype_of<C>, " on a GPU; expected at most ", (kMostShared / sizeof(C) / kR - kWarp) / 2);
  const auto warps = static_cast<int>(std::clamp<size_t>(kUsualShared / warp_bytes, 1, kMostWarps));
  LaunchShape shape = launch_shape(device, 1, warps * static_cast<int>(kWarp));
  const int64_t block_warps = shape.block / kWarp;
  const int64_t chunks = (int64_t{a.sight.num_queries} * a.heads + kR - 1) / kR;
  const int64_t count = chunks * a.batch * a.groups * parts.count;
  SHOAL_CHECK(count < INT32_MAX / 2, "attention: ", a.batch, " sequences of ", a.sight.num_queries,
              " tokens with ", a.groups * a.heads, " heads are too many for one launch; use fewer");
  shape = launch_shape(device, (count + block_warps - 1) / block_warps, static_cast<int>(shape.block), 1,
                       static_cast<size_t>(block_warps) * warp_bytes);
  constexpr int kN = kPack<T>;
  const bool packs = all_aligned({a.k.data}) && a.head_size % kN == 0 && a.k.row % kN == 0;
  if (packs) {
    SHOAL_LAUNCH((attention_rows_kernel<kN, kR, T, S>), shape, a, parts);
  } else {
    SHOAL_LAUNCH((attention_rows_kernel<1, kR, T, S>), shape, a, parts);
  }
}

}  // namespace

template <class T, class S>
void attention_fwd_by_rows(Device device, const AttentionArgs<T, S>& a) {
  const int64_t group_rows = int64_t{a.sight.num_queries} * a.heads,
                num_rows = group_rows * a.batch * a.groups;
  if (num_rows == 0) return;
  // Every query sees nearly all keys when it is decoded; the parts do not depend on the launch.
  const bool decoding = a.sight.has_earlier_keys() && a.lse == nullptr;
  const int64_t most_parts =
      decoding && num_rows < kEnoughWarps ? (a.sight.num_keys + kPartKeys - 1) / kPartKeys : 1;
  Tensor joined;
  Parts<T> parts{static_cast<int>(most_parts), static_cast<int>(kPartKeys), nullptr};
  if (most_parts > 1) {
    joined = Tensor::empty({num_rows, most_parts, a.head_size + 2}, dtype_of<Compute<T>>, device);
    parts.joined = joined.data<Compute<T>>();
  }
  if (group_rows == 1) {
    launch_rows<1>(device, a, parts);
  } else {
    launch_rows<kRows>(device, a, parts);
  }
  if (most_parts > 1) {
    SHOAL_LAUNCH((join_parts_kernel<T>), launch_shape(device, (num_rows + kMostWarps - 1) / kMostWarps, 128),
                 parts.joined, parts.count, num_rows, a.head_size, a.y.data);
  }
}

template void attention_fwd_by_rows(Device, const AttentionArgs<BFloat16>&);
template void attention_fwd_by_rows(Device, const AttentionArgs<BFloat16, PartSight>&);

namespace {

void attention_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) {
  const Tensor bounds = document_bounds(spec, qkv.device());
  dispatch_float(qkv.dtype(), "attention", [&]<class T>() {
    attention_fwd_by_rows(qkv.device(), attention_args<T>(qkv, spec, y, lse, bounds));
  });
}

void attention_part_fwd_impl(const AttentionPartForward& args, const AttentionSpec& spec,
                             const AttentionPart& part) {
  const Tensor bounds = document_bounds(spec, args.qkv.device());
  dispatch_float(args.qkv.dtype(), "attention_part", [&]<class T>() {
    attention_fwd_by_rows(args.qkv.device(), part_args<T>(args, spec, part, bounds));
  });
}

void attention_decode_impl(const DecodeArgs& args, const AttentionSpec& spec) {
  dispatch_float(args.qkv.dtype(), "attention_decode", [&]<class T>() {
    attention_fwd_by_rows(args.qkv.device(), append_to_caches<T>(args, spec));
  });
}

[[maybe_unused]] const bool added[] = {
    attention_fwd.add(DeviceType::cuda, &attention_fwd_impl),
    attention_part_fwd.add(DeviceType::cuda, &attention_part_fwd_impl),
    attention_decode.add(DeviceType::cuda, &attention_decode_impl),
};

}  // namespace
}  // namespace shoal::cuda
