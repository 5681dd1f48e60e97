// Backward of attention on bf16: the sums of attention_bwd.cpp, with all five products on pairs of bf16 and
// f32 sums. Probabilities and score gradients are rounded to bf16 before they are multiplied; dq is summed in
// f32 over all key blocks and rounded once.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"
#include "core/base/threads.h"
#include "core/ops/attention_part.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/attention_backward.inc"
#include "core/backend/cpu/bf16_tile.inc"
#include "core/backend/functors/vector_math.inc"

constexpr int64_t kKeys = 128;
constexpr int64_t kQueries = kMaxQueryBlock;

/// Working memory of one thread. "words" are pairs of bf16: *_columns pair along C, [C / 2, keys]; *_rows
/// pair along the rows, [rows / 2, C padded to vectors].
struct Tiles {
  uint32_t *k_columns, *v_columns, *k_rows;  // of a block of keys
  uint32_t *q_rows, *dy_rows, *probs_rows,
      *dscore_rows;                    // of a block of queries; the last two [queries / 2, keys]
  BFloat16 *q, *dy, *probs, *dscores;  // queries x C (even), queries x keys
  float *scores, *dprobs;              // queries x keys
  float *dk, *dv, *dq, *delta;         // keys x C; queries x heads x C; queries x heads
  int64_t even, padded;

  Tiles(cpu::Scratch& words, cpu::Scratch& halves, cpu::Scratch& floats, const HeadGroup<BFloat16>& group)
      : even(round_up(group.head_size, 2)), padded(round_up(group.head_size, kFloats)) {
    const int64_t columns = even / 2 * kKeys, key_rows = kKeys / 2 * padded,
                  query_rows = kQueries / 2 * padded;
    const int64_t score_rows = kQueries / 2 * kKeys;
    k_columns = words.get<uint32_t>(2 * columns + key_rows + 2 * query_rows + 2 * score_rows);
    v_columns = k_columns + columns;
    k_rows = v_columns + columns;
    q_rows = k_rows + key_rows;
    dy_rows = q_rows + query_rows;
    probs_rows = dy_rows + query_rows;
    dscore_rows = probs_rows + score_rows;
    q = halves.get<BFloat16>(2 * kQueries * even + 2 * kQueries * kKeys);
    dy = q + kQueries * even;
    probs = dy + kQueries * even;
    dscores = probs + kQueries * kKeys;
    scores = floats.get<float>(2 * kQueries * kKeys + 2 * kKeys * padded +
                               group.num_queries * group.heads * (padded + 1));
    dprobs = scores + kQueries * kKeys;
    dk = dprobs + kQueries * kKeys;
    dv = dk + kKeys * padded;
    dq = dv + kKeys * padded;
    delta = dq + group.num_queries * group.heads * padded;
  }
  /// dq row of query s and head i.
  float* dq_row(const HeadGroup<BFloat16>& group, int64_t s, int64_t i) const {
    return dq + (i * group.num_queries + s) * padded;
  }
};

/// delta = sum_c dy y per row and head; zeroes dq.
void start_rows(const HeadGroup<BFloat16>& group, const Tiles& tiles) {
  const int64_t c = group.head_size;
  fill(tiles.dq, 0, group.num_queries * group.heads * tiles.padded, 0.0F);
  for (int64_t s = 0; s < group.num_queries; s++) {
    for (int64_t i = 0; i < group.heads; i++) {
      const BFloat16* dy = group.dy + s * group.y_stride + i * c;
      const BFloat16* y = group.y + s * group.y_stride + i * c;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < c; j++) sum += static_cast<float>(dy[j]) * static_cast<float>(y[j]);
      tiles.delta[s * group.heads + i] = sum;
    }
  }
}

/// Rows of C elements into rows of an even width.
void copy_even(BFloat16* to, int64_t even, const BFloat16* from, int64_t ld, int64_t rows, int64_t c) {
  for (int64_t r = 0; r < rows; r++) {
    std::copy_n(from + r * ld, c, to + r * even);
    if (even > c) to[r * even + c] = BFloat16();
  }
}

/// Probabilities and score gradients of one row as bf16; zero outside [begin, end).
void score_gradients(const float* scores, const float* dprobs, BFloat16* probs, BFloat16* dscores,
                     int64_t begin, int64_t end, float scale, float lse, float delta) {
  begin = std::min(begin, kKeys);
  end = std::max(begin, end);
  fill(probs, 0, begin, BFloat16());
  fill(dscores, 0, begin, BFloat16());
  for (int64_t j = begin; j < end; j++) {
    const float p = fast_exp(scores[j] * scale - lse);
    probs[j] = p;
    dscores[j] = p * (dprobs[j] - delta);
  }
  fill(probs, end, kKeys, BFloat16());
  fill(dscores, end, kKeys, BFloat16());
}

/// probs and dscores for queries x keys of one head.
void block_scores(const HeadGroup<BFloat16>& group, const Tiles& tiles, int64_t head, float slope,
                  Block queries, Block keys, const Interval* visible) {
  for (int64_t r = 0; r < queries.count; r += kPairRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kPairRows, queries.count - r));
    const int64_t seen = std::clamp<int64_t>(visible[r + rows - 1].last - keys.first, 0, keys.count);
    const auto columns = static_cast<int>(round_up(seen, kFloats));
    float *scores = tiles.scores + r * kKeys, *dprobs = tiles.dprobs + r * kKeys;
    pair_panel(rows, tiles.even / 2, tiles.q + r * tiles.even, tiles.even, 2, tiles.k_columns, kKeys, scores,
               kKeys, columns, false);
    pair_panel(rows, tiles.even / 2, tiles.dy + r * tiles.even, tiles.even, 2, tiles.v_columns, kKeys, dprobs,
               kKeys, columns, false);
    for (int i = 0; i < rows; i++) {
      const int64_t s = queries.first + r + i, row = r + i;
      const Interval& bounds = visible[row];
      // ALiBi is added to the scaled score, so it is divided by the scale here.
      add_alibi(scores + i * kKeys, columns, slope / group.scale, group.keys, keys.first,
                group.queries.position(s));
      score_gradients(scores + i * kKeys, dprobs + i * kKeys, tiles.probs + row * kKeys,
                      tiles.dscores + row * kKeys, std::max<int64_t>(0, bounds.first - keys.first),
                      std::min(seen, bounds.last - keys.first), group.scale,
                      group.lse[s * group.lse_stride + head], tiles.delta[s * group.heads + head]);
    }
  }
}

/// Adds the products of one block to dk, dv and dq, all without the scale of the scores.
void block_gradients(const HeadGroup<BFloat16>& group, const Tiles& tiles, int64_t head, Block queries,
                     Block keys, const Interval* visible) {
  const int columns = static_cast<int>(group.head_size);
  pair_rows(tiles.probs, kKeys, queries.count, keys.count, tiles.probs_rows, kKeys);
  pair_rows(tiles.dscores, kKeys, queries.count, keys.count, tiles.dscore_rows, kKeys);
  int64_t first = 0;  // queries before it do not see the keys of this tile or of later ones
  for (int64_t j = 0; j < keys.count; j += kPairRows) {
    const int64_t rows = std::min<int64_t>(kPairRows, keys.count - j);
    while (first < queries.count && visible[first].last <= keys.first + j) first++;
    if (first == queries.count) break;
    const int64_t pair = first / 2, pairs = (queries.count + 1) / 2 - pair;
    const auto halves = [](const uint32_t* w) { return reinterpret_cast<const BFloat16*>(w); };
    pair_panel(rows, pairs, halves(tiles.probs_rows + pair * kKeys + j), 2, 2 * kKeys,
               tiles.dy_rows + pair * tiles.padded, tiles.padded, tiles.dv + j * tiles.padded, tiles.padded,
               columns, true);
    pair_panel(rows, pairs, halves(tiles.dscore_rows + pair * kKeys + j), 2, 2 * kKeys,
               tiles.q_rows + pair * tiles.padded, tiles.padded, tiles.dk + j * tiles.padded, tiles.padded,
               columns, true);
  }
  for (int64_t r = 0; r < queries.count; r += kPairRows) {
    const int64_t rows = std::min<int64_t>(kPairRows, queries.count - r);
    const int64_t seen = std::clamp<int64_t>(visible[r + rows - 1].last - keys.first, 0, keys.count);
    pair_panel(rows, (seen + 1) / 2, tiles.dscores + r * kKeys, kKeys, 2, tiles.k_rows, tiles.padded,
               tiles.dq_row(group, queries.first + r, head), tiles.padded, columns, true);
  }
}

void key_block(const HeadGroup<BFloat16>& group, const AttentionSpec& spec, const Tiles& tiles,
               int64_t first_head, Block keys) {
  const int64_t c = group.head_size;
  const BFloat16* k = group.kv + keys.first * group.kv_stride;
  pair_columns(k, group.kv_stride, keys.count, c, tiles.k_columns, kKeys);
  pair_columns(k + c, group.kv_stride, keys.count, c, tiles.v_columns, kKeys);
  pair_rows(k, group.kv_stride, keys.count, c, tiles.k_rows, tiles.padded);
  fill(tiles.dk, 0, keys.count * tiles.padded, 0.0F);
  fill(tiles.dv, 0, keys.count * tiles.padded, 0.0F);
  const int64_t unseeing = spec.causal ? group.queries.rows_below(group.keys.position(keys.first)) : 0;
  for (int64_t q0 = unseeing / kQueries * kQueries; q0 < group.num_queries; q0 += kQueries) {
    const Block queries{q0, std::min(kQueries, group.num_queries - q0)};
    Interval visible[kQueries];
    for (int64_t r = 0; r < queries.count; r++)
      visible[r] = visible_keys(spec, group.keys, group.documents, group.queries.position(q0 + r));
    if (visible[queries.count - 1].last <= keys.first) continue;
    if (visible[0].first >= keys.first + keys.count) break;  // later queries start later still
    for (int64_t i = 0; i < group.heads; i++) {
      const BFloat16 *q = group.q + q0 * group.q_stride + i * c, *dy = group.dy + q0 * group.y_stride + i * c;
      copy_even(tiles.q, tiles.even, q, group.q_stride, queries.count, c);
      copy_even(tiles.dy, tiles.even, dy, group.y_stride, queries.count, c);
      pair_rows(q, group.q_stride, queries.count, c, tiles.q_rows, tiles.padded);
      pair_rows(dy, group.y_stride, queries.count, c, tiles.dy_rows, tiles.padded);
      block_scores(group, tiles, i, slope_of<float>(spec, first_head + i), queries, keys, visible);
      block_gradients(group, tiles, i, queries, keys, visible);
    }
  }
  for (int64_t j = 0; j < keys.count; j++) {
    BFloat16* dk = group.dkv + (keys.first + j) * group.kv_stride;
    for (int64_t x = 0; x < c; x++) dk[x] = group.scale * tiles.dk[j * tiles.padded + x];
    for (int64_t x = 0; x < c; x++) dk[c + x] = tiles.dv[j * tiles.padded + x];
  }
}

void group_backward(const HeadGroup<BFloat16>& group, const AttentionSpec& spec, int64_t first_head) {
  static thread_local cpu::Scratch words, halves, floats;
  const Tiles tiles(words, halves, floats, group);
  const int64_t c = group.head_size;
  start_rows(group, tiles);
  for (int64_t k0 = 0; k0 < group.num_keys; k0 += kKeys) {
    key_block(group, spec, tiles, first_head, {k0, std::min(kKeys, group.num_keys - k0)});
  }
  for (int64_t s = 0; s < group.num_queries; s++) {
    for (int64_t i = 0; i < group.heads; i++) {
      BFloat16* dq = group.dq + s * group.q_stride + i * c;
      const float* from = tiles.dq_row(group, s, i);
      for (int64_t x = 0; x < c; x++) dq[x] = group.scale * from[x];
    }
  }
}

void bf16_attention_bwd_impl(const AttentionBackward& args, const AttentionSpec& spec) {
  attention_bwd_groups<BFloat16>(args, spec, [&](const HeadGroup<BFloat16>& group, int64_t first_head) {
    group_backward(group, spec, first_head);
  });
}

void bf16_attention_part_bwd_impl(const AttentionPartBackward& args, const AttentionSpec& spec,
                                  const AttentionPart& part) {
  attention_bwd_groups<BFloat16>(args, spec, part, [&](const HeadGroup<BFloat16>& group, int64_t first_head) {
    group_backward(group, spec, first_head);
  });
}

const bool added = bf16_attention_part_bwd.add(DeviceType::cpu, &bf16_attention_part_bwd_impl, kIsaLevel) &&
                   bf16_attention_bwd.add(DeviceType::cpu, &bf16_attention_bwd_impl, kIsaLevel);

SHOAL_KERNELS_END
