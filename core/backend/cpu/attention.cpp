// Attention in blocks of queries and keys (online softmax; Dao, arXiv:2307.08691, algorithms 1 and 2). A
// thread holds one block of scores at a time, so extra memory does not grow with the square of the sequence.
// The keys that a query sees are one interval [first, last), because documents are consecutive: whole blocks
// outside it are skipped, and register tiles stop at its ends.
#include "core/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"
#include "core/base/threads.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/attention_common.inc"
#include "core/backend/cpu/gemm_tile.inc"
#include "core/backend/cpu/vector_math.inc"

/// Largest of `count` elements, a whole number of vectors; NaN is ignored.
template <class T>
T row_max(const T* row, int64_t count) {
  Vector<T> m = load(row);
  for (int64_t i = kLanes<T>; i < count; i += kLanes<T>) {
    const Vector<T> v = load(row + i);
    m = v > m ? v : m;
  }
  T largest = -std::numeric_limits<T>::infinity();
  for (int lane = 0; lane < kLanes<T>; lane++) largest = m[lane] > largest ? m[lane] : largest;
  return largest;
}

/// One block of queries of one key/value head, with all query heads that share it.
template <class T>
struct QueryBlock {
  const T *q, *k, *v;            // first query row of head 0; first key and value row
  int64_t q_stride, kv_stride;   // between rows
  T *y, *lse;                    // lse may be null
  int64_t y_stride, lse_stride;  // between rows; head i is at y + i * C and lse + i
  int64_t num_queries, heads, head_size;
  int64_t first_head;      // index of head 0, for its slope
  int64_t first_position;  // of the first query, among the keys
  const Interval* keys;    // per query
};

/// Working memory of forward for one thread.
template <class T>
struct ForwardTiles {
  T *q, *k, *v, *scores, *out, *max, *sum;
  int64_t padded;  // C in whole vectors

  ForwardTiles(cpu::Scratch& scratch, const QueryBlock<T>& block)
      : padded(round_up(block.head_size, kLanes<T>)) {
    const int64_t c = block.head_size, rows = round_up(block.heads * block.num_queries, 64);
    q = scratch.get<T>(rows * (c + padded + 2) + kKeyBlock * (round_up(c, 64) + padded + kMaxQueryBlock) +
                       512);
    out = q + round_up(rows * c, 64);
    max = out + rows * padded;
    sum = max + rows;
    k = sum + rows;
    v = k + kKeyBlock * round_up(c, 64);
    scores = v + kKeyBlock * padded;
  }
};

/// Scores -> probabilities of one row relative to the running maximum; rescales the row's output.
template <class T>
void online_softmax(T* scores, int64_t begin, int64_t end, int64_t columns, T& max, T& sum, T* out,
                    int64_t padded) {
  if (begin >= end) {
    fill(scores, 0, columns, T{0});
    return;
  }
  constexpr T kLowest = -std::numeric_limits<T>::infinity();
  fill(scores, 0, begin, kLowest);
  fill(scores, end, columns, kLowest);
  const T block_max = row_max(scores, columns);
  const T new_max = block_max > max ? block_max : max;
  T added = 0;
#pragma omp simd reduction(+ : added)
  for (int64_t j = 0; j < columns; j++) {
    scores[j] = fast_exp(scores[j] - new_max);
    added += scores[j];
  }
  if (new_max != max) {
    const T factor = fast_exp(max - new_max);
    for (int64_t i = 0; i < padded; i++) out[i] *= factor;
    sum *= factor;
    max = new_max;
  }
  sum += added;
}

/// One block of keys [k0, k0 + n) for all rows of one head.
template <class T>
void attend_keys(const QueryBlock<T>& block, const ForwardTiles<T>& tiles, int64_t head, T slope, int64_t k0,
                 int64_t n) {
  const int64_t c = block.head_size, row0 = head * block.num_queries;
  for (int64_t r = 0; r < block.num_queries; r += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, block.num_queries - r));
    // The bounds ascend, so the last row of the tile sees furthest.
    const int64_t visible = std::min(n, block.keys[r + rows - 1].last - k0);
    if (visible <= 0 || block.keys[r].first >= k0 + n) continue;
    const int64_t columns = round_up(visible, kLanes<T>);
    tile_rows<T>(rows, columns / kLanes<T>, c, tiles.q + (row0 + r) * c, c, 1, tiles.k, kKeyBlock,
                 tiles.scores, kKeyBlock, false);
    for (int i = 0; i < rows; i++) {
      const int64_t row = row0 + r + i;
      T* scores = tiles.scores + i * kKeyBlock;
      const Interval& keys = block.keys[r + i];
      add_alibi(scores, columns, slope, k0 - block.first_position - r - i);
      online_softmax(scores, std::max<int64_t>(0, keys.first - k0), std::min(visible, keys.last - k0),
                     columns, tiles.max[row], tiles.sum[row], tiles.out + row * tiles.padded, tiles.padded);
    }
    tile_rows<T>(rows, tiles.padded / kLanes<T>, visible, tiles.scores, kKeyBlock, 1, tiles.v, tiles.padded,
                 tiles.out + (row0 + r) * tiles.padded, tiles.padded, true);
  }
}

template <class T>
void attend(const QueryBlock<T>& block, const AttentionSpec& spec) {
  static thread_local cpu::Scratch scratch;
  const ForwardTiles<T> tiles(scratch, block);
  const int64_t c = block.head_size, num_rows = block.heads * block.num_queries;
  fill(tiles.out, 0, num_rows * tiles.padded, T{0});
  fill(tiles.max, 0, num_rows, -std::numeric_limits<T>::infinity());
  fill(tiles.sum, 0, num_rows, T{0});
  for (int64_t i = 0; i < block.heads; i++) {
    copy_rows(tiles.q + i * block.num_queries * c, c, block.q + i * c, block.q_stride, block.num_queries, c,
              scale_of<T>(spec));
  }
  const int64_t end = block.keys[block.num_queries - 1].last;
  // Key blocks start at multiples of kKeyBlock, so that a row's sums do not depend on its query block.
  for (int64_t k0 = block.keys[0].first / kKeyBlock * kKeyBlock; k0 < end; k0 += kKeyBlock) {
    const int64_t n = std::min(kKeyBlock, end - k0);
    pack_transposed<T, kKeyBlock>(tiles.k, block.k + k0 * block.kv_stride, block.kv_stride, n, c);
    copy_rows(tiles.v, tiles.padded, block.v + k0 * block.kv_stride, block.kv_stride, n, c, T{1});
    for (int64_t i = 0; i < block.heads; i++) {
      attend_keys(block, tiles, i, slope_of<T>(spec, block.first_head + i), k0, n);
    }
  }
  for (int64_t i = 0; i < block.heads; i++) {
    for (int64_t r = 0; r < block.num_queries; r++) {
      const int64_t row = i * block.num_queries + r;
      const T inverse = 1 / tiles.sum[row];
      const T* out = tiles.out + row * tiles.padded;
      T* y = block.y + r * block.y_stride + i * c;
      for (int64_t j = 0; j < c; j++) y[j] = out[j] * inverse;
      if (block.lse != nullptr) {
        block.lse[r * block.lse_stride + i] = tiles.max[row] + std::log(tiles.sum[row]);
      }
    }
  }
}

/// Queries per block: fewer when many heads share a key head, so that the block of outputs stays in cache.
int64_t query_block_size(int64_t heads_per_group) {
  return std::clamp<int64_t>(round_up(512 / heads_per_group, 8), 8, kMaxQueryBlock);
}

template <class T>
void attention_fwd_typed(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) {
  const int64_t groups = spec.kv_heads, heads = spec.heads / groups, c = spec.head_size, seq = spec.seq;
  const int64_t stride = groups * (heads + 2) * c, block_size = query_block_size(heads);
  const int64_t num_blocks = (seq + block_size - 1) / block_size;
  parallel_tasks(num_blocks * spec.batch * groups, [&](int64_t task) {
    // The last blocks see the most keys: they go first.
    const int64_t q0 = (num_blocks - 1 - task / (spec.batch * groups)) * block_size;
    const int64_t b = task / groups % spec.batch, g = task % groups;
    const T* group = qkv.data<T>() + b * seq * stride + g * (heads + 2) * c;
    const int64_t row = b * seq + q0;
    Interval keys[kMaxQueryBlock];
    QueryBlock<T> block{};
    block.num_queries = std::min(block_size, seq - q0);
    for (int64_t r = 0; r < block.num_queries; r++)
      keys[r] = visible_keys(spec, documents_of(spec, b), q0 + r);
    block.q = group + q0 * stride;
    block.k = group + heads * c;
    block.v = group + (heads + 1) * c;
    block.q_stride = block.kv_stride = stride;
    block.y = y.data<T>() + (row * spec.heads + g * heads) * c;
    block.y_stride = spec.heads * c;
    block.lse = lse.data<T>() + row * spec.heads + g * heads;
    block.lse_stride = spec.heads;
    block.heads = heads;
    block.head_size = c;
    block.first_head = g * heads;
    block.first_position = q0;
    block.keys = keys;
    attend(block, spec);
  });
}

template <class T>
void attention_decode_typed(const DecodeArgs& args, const AttentionSpec& spec) {
  const int64_t groups = spec.kv_heads, heads = spec.heads / groups, c = spec.head_size, seq = spec.seq;
  const int64_t stride = groups * (heads + 2) * c, block_size = query_block_size(heads);
  const int64_t capacity = args.cache_k.size(1), cache_stride = groups * c;
  parallel_tasks(spec.batch * groups, [&](int64_t task) {
    const int64_t b = task / groups, g = task % groups;
    const T* group = args.qkv.data<T>() + b * seq * stride + g * (heads + 2) * c;
    T* cache_k = args.cache_k.data<T>() + b * capacity * cache_stride + g * c;
    T* cache_v = args.cache_v.data<T>() + b * capacity * cache_stride + g * c;
    for (int64_t s = 0; s < seq; s++) {
      const T* k = group + s * stride + heads * c;
      std::copy_n(k, c, cache_k + (args.length + s) * cache_stride);
      std::copy_n(k + c, c, cache_v + (args.length + s) * cache_stride);
    }
    for (int64_t q0 = 0; q0 < seq; q0 += block_size) {
      Interval keys[kMaxQueryBlock];
      QueryBlock<T> block{};
      block.num_queries = std::min(block_size, seq - q0);
      for (int64_t r = 0; r < block.num_queries; r++) keys[r] = {0, args.length + q0 + r + 1};
      block.q = group + q0 * stride;
      block.q_stride = stride;
      block.k = cache_k;
      block.v = cache_v;
      block.kv_stride = cache_stride;
      block.y = args.y.data<T>() + ((b * seq + q0) * spec.heads + g * heads) * c;
      block.y_stride = spec.heads * c;
      block.heads = heads;
      block.head_size = c;
      block.first_head = g * heads;
      block.first_position = args.length + q0;
      block.keys = keys;
      attend(block, spec);
    }
  });
}

void attention_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) {
  dispatch_float(qkv.dtype(), "attention", [&]<class T>() { attention_fwd_typed<T>(qkv, spec, y, lse); });
}

void attention_decode_impl(const DecodeArgs& args, const AttentionSpec& spec) {
  const Shape cache{spec.batch, args.cache_k.size(1), spec.kv_heads, spec.head_size};
  SHOAL_CHECK(args.cache_k.shape() == cache && args.cache_v.shape() == cache,
              "attention_decode: expected caches [B, capacity, G, C] = ", cache, ", got ",
              args.cache_k.shape(), " and ", args.cache_v.shape());
  SHOAL_CHECK(args.length >= 0 && args.length + spec.seq <= args.cache_k.size(1),
              "attention_decode: ", spec.seq, " new tokens after ", args.length,
              " do not fit the cache capacity ", args.cache_k.size(1), "; make a larger cache");
  dispatch_float(args.qkv.dtype(), "attention_decode",
                 [&]<class T>() { attention_decode_typed<T>(args, spec); });
}

const bool added = attention_fwd.add(DeviceType::cpu, &attention_fwd_impl, kIsaLevel) &&
                   attention_decode.add(DeviceType::cpu, &attention_decode_impl, kIsaLevel);

SHOAL_KERNELS_END
