// What is done before attention: bounds of documents, and new keys and values into the caches of decoding.
#include "core/backend/cuda/attention.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 128;

/// The first of ids[0, count) that is at least (kAbove: above) id; they ascend.
template <bool kAbove>
SHOAL_DEVICE int bound_of(const int32_t* ids, int64_t count, int32_t id) {
  int64_t first = 0, last = count;
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    if (kAbove ? ids[middle] <= id : ids[middle] < id) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return static_cast<int>(first);
}

__global__ void document_bounds_kernel(const int32_t* documents, int64_t count, int64_t seq,
                                       int32_t* bounds) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int32_t* ids = documents + i / seq * seq;
    bounds[2 * i] = bound_of<false>(ids, seq, documents[i]);
    bounds[2 * i + 1] = bound_of<true>(ids, seq, documents[i]);
  }
}

/// The keys and values of `seq` new rows to the rows from `start` on of the caches.
template <class T>
__global__ void append_kernel(AttentionArgs<T> a, HeadRows<const T> new_k, HeadRows<const T> new_v,
                              T* cache_k, T* cache_v) {
  const int64_t row = int64_t{a.groups} * a.head_size, seq = a.sight.num_queries, count = a.batch * seq * row;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const auto b = static_cast<int>(i / row / seq), s = static_cast<int>(i / row % seq);
    const auto g = static_cast<int>(i % row / a.head_size), c = static_cast<int>(i % a.head_size);
    const int64_t to = b * a.k.batch + (a.sight.first_position + s) * a.k.row + g * a.k.group + c;
    cache_k[to] = new_k.at(b, s, g)[c];
    cache_v[to] = new_v.at(b, s, g)[c];
  }
}

}  // namespace

Tensor document_bounds(const AttentionSpec& spec, Device device) {
  if (!spec.document_BS.defined()) return {};
  const int64_t count = spec.batch * spec.seq;
  const Tensor bounds = Tensor::empty({count, 2}, DType::i32, device);
  SHOAL_LAUNCH(document_bounds_kernel, launch_shape(device, (count + kThreads - 1) / kThreads, kThreads),
               spec.document_BS.data<int32_t>(), count, spec.seq, bounds.data<int32_t>());
  return bounds;
}

template <class T>
AttentionArgs<T> append_to_caches(const DecodeArgs& args, const AttentionSpec& spec) {
  const int64_t capacity = args.cache_k.size(1);
  const Shape cache{spec.batch, capacity, spec.kv_heads, spec.head_size};
  SHOAL_CHECK(args.cache_k.shape() == cache && args.cache_v.shape() == cache,
              "attention_decode: expected caches [B, capacity, G, C] = ", cache, ", got ",
              args.cache_k.shape(), " and ", args.cache_v.shape());
  SHOAL_CHECK(args.length >= 0 && args.length + spec.seq <= capacity, "attention_decode: ", spec.seq,
              " new tokens after ", args.length, " do not fit the cache capacity ", capacity,
              "; make a larger cache");
  SHOAL_CHECK(capacity < INT32_MAX, "attention_decode: expected a capacity below 2^31, got ", capacity);
  AttentionArgs<T> a = attention_args<T>(args.qkv, spec, args.y, Tensor(), Tensor());
  const HeadRows<const T> new_k = a.k, new_v = a.v;
  const int64_t row = spec.kv_heads * spec.head_size;
  a.k = {args.cache_k.data<T>(), capacity * row, row, spec.head_size};
  a.v = {args.cache_v.data<T>(), capacity * row, row, spec.head_size};
  const auto length = static_cast<int>(args.length);
  a.sight = {nullptr, a.sight.num_queries, length + a.sight.num_queries, length, true};
  const int64_t count = spec.batch * spec.seq * row;
  SHOAL_LAUNCH((append_kernel<T>),
               launch_shape(args.qkv.device(), (count + kThreads - 1) / kThreads, kThreads), a, new_k, new_v,
               args.cache_k.data<T>(), args.cache_v.data<T>());
  return a;
}

namespace {

Runs device_runs(const PositionRuns& runs) {
  Runs out{};
  for (size_t i = 0; i < 2; i++) {
    out.begin[i] = static_cast<int>(runs.begin[i]);
    out.count[i] = static_cast<int>(runs.count[i]);
  }
  return out;
}

/// Rows of a part in packed qkv or in kv, from a column of group 0 on.
template <class T>
HeadRows<T> rows_at(T* data, int64_t column, int64_t rows, int64_t groups, int64_t group) {
  return {data + column, rows * groups * group, groups * group, group};
}

}  // namespace

template <class T>
AttentionArgs<T, PartSight> part_args(const AttentionPartForward& rows, const AttentionSpec& spec,
                                      const AttentionPart& part, const Tensor& bounds) {
  SHOAL_CHECK(spec.seq < INT32_MAX / 2 && spec.batch <= INT32_MAX,
              "attention_part: expected fewer than 2^30 tokens, got ", spec.batch, " sequences of ",
              spec.seq);
  const int64_t heads = spec.heads / spec.kv_heads, c = spec.head_size, queries = part.queries.rows(),
                keys = part.keys.rows();
  const double scale = spec.scale != 0 ? spec.scale : 1 / std::sqrt(static_cast<double>(c));
  const T *qkv = rows.qkv.data<T>(), *kv = rows.kv.data<T>();
  return {
      static_cast<int>(spec.batch),
      static_cast<int>(spec.kv_heads),
      static_cast<int>(heads),
      static_cast<int>(c),
      static_cast<Compute<T>>(scale),
      data_or_null<float>(spec.alibi_slopes_H),
      PartSight{data_or_null<int32_t>(bounds), static_cast<int>(queries), static_cast<int>(keys),
                static_cast<int>(spec.seq), spec.causal, device_runs(part.queries), device_runs(part.keys)},
      rows_at(qkv, 0, queries, spec.kv_heads, (heads + 2) * c),
      rows_at(kv, 0, keys, spec.kv_heads, 2 * c),
      rows_at(kv, c, keys, spec.kv_heads, 2 * c),
      rows_at(rows.y.data<T>(), 0, queries, spec.kv_heads, heads * c),
      data_or_null<Compute<T>>(rows.lse)};
}

template <class T>
AttentionGradients<T> part_gradients(const AttentionPartBackward& args, const AttentionSpec& spec,
                                     const AttentionPart& part, const Tensor& delta) {
  const int64_t heads = spec.heads / spec.kv_heads, c = spec.head_size, queries = part.queries.rows(),
                keys = part.keys.rows();
  T* dkv = args.dkv.data<T>();
  const T* dy = args.dy.data<T>();
  return {rows_at(dy, 0, queries, spec.kv_heads, heads * c),
          rows_at(args.dqkv.data<T>(), 0, queries, spec.kv_heads, (heads + 2) * c),
          rows_at(dkv, 0, keys, spec.kv_heads, 2 * c), rows_at(dkv, c, keys, spec.kv_heads, 2 * c),
          delta.data<Compute<T>>()};
}

#define SHOAL_PARTS(T)                                                                              \
  template AttentionArgs<T, PartSight> part_args(const AttentionPartForward&, const AttentionSpec&, \
                                                 const AttentionPart&, const Tensor&);              \
  template AttentionGradients<T> part_gradients(const AttentionPartBackward&, const AttentionSpec&, \
                                                const AttentionPart&, const Tensor&)
SHOAL_PARTS(float);
SHOAL_PARTS(double);
SHOAL_PARTS(BFloat16);
#undef SHOAL_PARTS
template AttentionArgs<float> append_to_caches(const DecodeArgs&, const AttentionSpec&);
template AttentionArgs<double> append_to_caches(const DecodeArgs&, const AttentionSpec&);
template AttentionArgs<BFloat16> append_to_caches(const DecodeArgs&, const AttentionSpec&);

}  // namespace shoal::cuda
