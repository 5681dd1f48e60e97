// Backward of attention, in the same blocks as forward. One task is one key/value head: it walks the key
// blocks in order and, for each, the query blocks that see it, so every sum has one order on any number of
// threads. With p = softmax, delta = sum_c dy y (Dao, arXiv:2307.08691, algorithm 2):
//   dv = p^T dy,   ds = p * (dy v^T - delta),   dq = scale ds k,   dk = scale ds^T q.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"
#include "core/base/threads.h"
#include "core/ops/attention_part.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/attention_backward.inc"
#include "core/backend/cpu/gemm_tile.inc"
#include "core/backend/functors/vector_math.inc"

/// Working memory of one thread. "Keys x C" tiles have kKeyBlock rows, "queries x C" tiles kMaxQueryBlock;
/// scores are queries x kKeyBlock.
template <class T>
struct BackwardTiles {
  T *k_transposed, *v_transposed, *k, *dk, *dv;  // keys; the transposed ones are [C, kKeyBlock]
  T *q, *dy, *dq;                                // queries
  T *probs, *dscores;
  T* delta;  // [queries, heads]
  int64_t padded;

  BackwardTiles(cpu::Scratch& scratch, const HeadGroup<T>& group)
      : padded(round_up(group.head_size, kLanes<T>)) {
    const int64_t key_tile = kKeyBlock * round_up(group.head_size, 64), query_tile = kMaxQueryBlock * padded;
    const int64_t score_tile = kMaxQueryBlock * kKeyBlock;
    k_transposed =
        scratch.get<T>(5 * key_tile + 3 * query_tile + 2 * score_tile + group.num_queries * group.heads);
    v_transposed = k_transposed + key_tile;
    k = v_transposed + key_tile;
    dk = k + key_tile;
    dv = dk + key_tile;
    q = dv + key_tile;
    dy = q + query_tile;
    dq = dy + query_tile;
    probs = dq + query_tile;
    dscores = probs + score_tile;
    delta = dscores + score_tile;
  }
};

/// delta = sum_c dy y per row and head; also zeroes dq, which is then added to.
template <class T>
void start_rows(const HeadGroup<T>& group, const BackwardTiles<T>& tiles) {
  const int64_t c = group.head_size;
  for (int64_t s = 0; s < group.num_queries; s++) {
    fill(group.dq + s * group.q_stride, 0, group.heads * c, T{0});
    for (int64_t i = 0; i < group.heads; i++) {
      const T* dy = group.dy + s * group.y_stride + i * c;
      const T* y = group.y + s * group.y_stride + i * c;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < c; j++) sum += dy[j] * y[j];
      tiles.delta[s * group.heads + i] = sum;
    }
  }
}

/// Probabilities and score gradients of one row, in place of scores and dy v^T; zero outside [begin, end).
template <class T>
void score_gradients(T* probs, T* dscores, int64_t begin, int64_t end, int64_t columns, T lse, T delta) {
  begin = std::min(begin, columns);
  end = std::max(begin, end);
  fill(probs, 0, begin, T{0});
  fill(dscores, 0, begin, T{0});
  for (int64_t j = begin; j < end; j++) {
    probs[j] = fast_exp(probs[j] - lse);
    dscores[j] = probs[j] * (dscores[j] - delta);
  }
  fill(probs, end, columns, T{0});
  fill(dscores, end, columns, T{0});
}

/// probs and dscores for queries x keys of one head, in row tiles that stop at the last visible key.
template <class T>
void block_scores(const HeadGroup<T>& group, const BackwardTiles<T>& tiles, int64_t head, T slope,
                  Block queries, Block keys, const Interval* visible) {
  const int64_t c = group.head_size, padded = tiles.padded;
  for (int64_t r = 0; r < queries.count; r += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, queries.count - r));
    const int64_t seen = std::clamp<int64_t>(visible[r + rows - 1].last - keys.first, 0, keys.count);
    const int64_t vectors = (seen + kLanes<T> - 1) / kLanes<T>, columns = vectors * kLanes<T>;
    T* probs = tiles.probs + r * kKeyBlock;
    T* dscores = tiles.dscores + r * kKeyBlock;
    tile_rows<T>(rows, vectors, c, tiles.q + r * padded, padded, 1, tiles.k_transposed, kKeyBlock, probs,
                 kKeyBlock, false);
    tile_rows<T>(rows, vectors, c, tiles.dy + r * padded, padded, 1, tiles.v_transposed, kKeyBlock, dscores,
                 kKeyBlock, false);
    for (int i = 0; i < rows; i++) {
      const int64_t s = queries.first + r + i;
      const Interval& bounds = visible[r + i];
      add_alibi(probs + i * kKeyBlock, columns, slope, group.keys, keys.first, group.queries.position(s));
      score_gradients(probs + i * kKeyBlock, dscores + i * kKeyBlock,
                      std::max<int64_t>(0, bounds.first - keys.first),
                      std::min(seen, bounds.last - keys.first), columns,
                      group.lse[s * group.lse_stride + head], tiles.delta[s * group.heads + head]);
      // The transposed products below read whole key tiles.
      fill(probs + i * kKeyBlock, columns, kKeyBlock, T{0});
      fill(dscores + i * kKeyBlock, columns, kKeyBlock, T{0});
    }
  }
}

/// Adds the products of one block to dk and dv (tiles) and dq (dqkv).
template <class T>
void block_gradients(const HeadGroup<T>& group, const BackwardTiles<T>& tiles, int64_t head, Block queries,
                     Block keys, const Interval* visible) {
  const int64_t c = group.head_size, padded = tiles.padded, vectors = padded / kLanes<T>;
  int64_t first = 0;  // queries before it do not see the keys of this tile or of later ones
  for (int64_t j = 0; j < keys.count; j += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, keys.count - j));
    while (first < queries.count && visible[first].last <= keys.first + j) first++;
    const int64_t count = queries.count - first;
    if (count == 0) break;
    tile_rows<T>(rows, vectors, count, tiles.probs + first * kKeyBlock + j, 1, kKeyBlock,
                 tiles.dy + first * padded, padded, tiles.dv + j * padded, padded, true);
    tile_rows<T>(rows, vectors, count, tiles.dscores + first * kKeyBlock + j, 1, kKeyBlock,
                 tiles.q + first * padded, padded, tiles.dk + j * padded, padded, true);
  }
  for (int64_t r = 0; r < queries.count; r += kTileRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kTileRows, queries.count - r));
    const int64_t seen = std::clamp<int64_t>(visible[r + rows - 1].last - keys.first, 0, keys.count);
    tile_rows<T>(rows, vectors, seen, tiles.dscores + r * kKeyBlock, kKeyBlock, 1, tiles.k, padded,
                 tiles.dq + r * padded, padded, false);
    for (int i = 0; i < rows; i++) {
      T* dq = group.dq + (queries.first + r + i) * group.q_stride + head * c;
      const T* from = tiles.dq + (r + i) * padded;
      for (int64_t x = 0; x < c; x++) dq[x] += group.scale * from[x];
    }
  }
}

template <class T>
void key_block(const HeadGroup<T>& group, const AttentionSpec& spec, const BackwardTiles<T>& tiles,
               int64_t first_head, Block keys) {
  const int64_t c = group.head_size, padded = tiles.padded;
  const T* k = group.kv + keys.first * group.kv_stride;
  pack_transposed<T, kKeyBlock>(tiles.k_transposed, k, group.kv_stride, keys.count, c);
  pack_transposed<T, kKeyBlock>(tiles.v_transposed, k + c, group.kv_stride, keys.count, c);
  copy_rows(tiles.k, padded, k, group.kv_stride, keys.count, c, T{1});
  fill(tiles.dk, 0, keys.count * padded, T{0});
  fill(tiles.dv, 0, keys.count * padded, T{0});
  const int64_t unseeing = spec.causal ? group.queries.rows_below(group.keys.position(keys.first)) : 0;
  for (int64_t q0 = unseeing / kMaxQueryBlock * kMaxQueryBlock; q0 < group.num_queries;
       q0 += kMaxQueryBlock) {
    const Block queries{q0, std::min(kMaxQueryBlock, group.num_queries - q0)};
    Interval visible[kMaxQueryBlock];
    for (int64_t r = 0; r < queries.count; r++)
      visible[r] = visible_keys(spec, group.keys, group.documents, group.queries.position(q0 + r));
    if (visible[queries.count - 1].last <= keys.first) continue;
    if (visible[0].first >= keys.first + keys.count) break;  // later queries start later still
    for (int64_t i = 0; i < group.heads; i++) {
      copy_rows(tiles.q, padded, group.q + q0 * group.q_stride + i * c, group.q_stride, queries.count, c,
                group.scale);
      copy_rows(tiles.dy, padded, group.dy + q0 * group.y_stride + i * c, group.y_stride, queries.count, c,
                T{1});
      block_scores(group, tiles, i, slope_of<T>(spec, first_head + i), queries, keys, visible);
      block_gradients(group, tiles, i, queries, keys, visible);
    }
  }
  for (int64_t j = 0; j < keys.count; j++) {
    T* dk = group.dkv + (keys.first + j) * group.kv_stride;
    for (int64_t x = 0; x < c; x++) dk[x] = tiles.dk[j * padded + x];
    for (int64_t x = 0; x < c; x++) dk[c + x] = tiles.dv[j * padded + x];
  }
}

template <class T>
void group_backward(const HeadGroup<T>& group, const AttentionSpec& spec, int64_t first_head) {
  static thread_local cpu::Scratch scratch;
  const BackwardTiles<T> tiles(scratch, group);
  start_rows(group, tiles);
  for (int64_t k0 = 0; k0 < group.num_keys; k0 += kKeyBlock) {
    key_block(group, spec, tiles, first_head, {k0, std::min(kKeyBlock, group.num_keys - k0)});
  }
}

void attention_bwd_impl(const AttentionBackward& args, const AttentionSpec& spec) {
  dispatch_float(args.qkv.dtype(), "attention_bwd", [&]<class T>() {
    attention_bwd_groups<T>(args, spec, [&](const HeadGroup<T>& group, int64_t first_head) {
      group_backward(group, spec, first_head);
    });
  });
}

void attention_part_bwd_impl(const AttentionPartBackward& args, const AttentionSpec& spec,
                             const AttentionPart& part) {
  dispatch_float(args.qkv.dtype(), "attention_part_bwd", [&]<class T>() {
    attention_bwd_groups<T>(args, spec, part, [&](const HeadGroup<T>& group, int64_t first_head) {
      group_backward(group, spec, first_head);
    });
  });
}

const bool added = attention_part_bwd.add(DeviceType::cpu, &attention_part_bwd_impl, kIsaLevel) &&
                   attention_bwd.add(DeviceType::cpu, &attention_bwd_impl, kIsaLevel);

SHOAL_KERNELS_END
