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

template AttentionArgs<float> append_to_caches(const DecodeArgs&, const AttentionSpec&);
template AttentionArgs<double> append_to_caches(const DecodeArgs&, const AttentionSpec&);
template AttentionArgs<BFloat16> append_to_caches(const DecodeArgs&, const AttentionSpec&);

}  // namespace shoal::cuda
