// Attention forward on bf16: the blocks of attention.cpp, with both products on pairs of bf16 and f32 sums.
// The probabilities are rounded to bf16 for the product with the values; their sum is not.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"
#include "core/base/threads.h"
#include "core/ops/attention_part.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/attention_forward.inc"
#include "core/backend/cpu/bf16_tile.inc"

constexpr int64_t kKeys = 128;  // keys of a block: rows of scores are whole strips of vectors

/// Working memory of one thread.
struct Tiles {
  uint32_t *k, *v;  // pairs of [C, keys] along C, and of [keys, C] along the keys
  BFloat16 *q, *probs;
  float *scores, *out, *max, *sum;
  int64_t even, padded;  // C up to an even number, and to whole vectors

  Tiles(cpu::Scratch& words, cpu::Scratch& halves, cpu::Scratch& floats, const QueryBlock<BFloat16>& block)
      : even(round_up(block.head_size, 2)), padded(round_up(block.head_size, kFloats)) {
    const int64_t rows = round_up(block.heads * block.num_queries, 64);
    k = words.get<uint32_t>(even / 2 * kKeys + kKeys / 2 * padded);
    v = k + even / 2 * kKeys;
    q = halves.get<BFloat16>(rows * even + kPairRows * kKeys);
    probs = q + rows * even;
    scores = floats.get<float>(kPairRows * kKeys + rows * (padded + 2));
    out = scores + kPairRows * kKeys;
    max = out + rows * padded;
    sum = max + rows;
  }
};

/// One block of keys [k0, k0 + n) for all rows of one head.
void attend_keys(const QueryBlock<BFloat16>& block, const Tiles& tiles, int64_t head, float scale,
                 float slope, int64_t k0, int64_t n) {
  const int64_t c = block.head_size, row0 = head * block.num_queries;
  for (int64_t r = 0; r < block.num_queries; r += kPairRows) {
    const int rows = static_cast<int>(std::min<int64_t>(kPairRows, block.num_queries - r));
    // The bounds ascend, so the last row of the tile sees furthest.
    const int64_t visible = std::min(n, block.keys[r + rows - 1].last - k0);
    if (visible <= 0 || block.keys[r].first >= k0 + n) continue;
    const int64_t columns = round_up(visible, kFloats);
    pair_panel(rows, tiles.even / 2, tiles.q + (row0 + r) * tiles.even, tiles.even, 2, tiles.k, kKeys,
               tiles.scores, kKeys, static_cast<int>(columns), false);
    for (int i = 0; i < rows; i++) {
      const int64_t row = row0 + r + i;
      float* scores = tiles.scores + i * kKeys;
      const Interval& keys = block.keys[r + i];
      for (int64_t j = 0; j < columns; j++) scores[j] *= scale;
      add_alibi(scores, columns, slope, block.key_rows, k0, block.first_position + r + i);
      online_softmax(scores, std::max<int64_t>(0, keys.first - k0), std::min(visible, keys.last - k0),
                     columns, tiles.max[row], tiles.sum[row], tiles.out + row * tiles.padded, tiles.padded);
      for (int64_t j = 0; j < columns; j += kFloats)
        store_rounded(tiles.probs + i * kKeys + j, load(scores + j));
    }
    pair_panel(rows, (visible + 1) / 2, tiles.probs, kKeys, 2, tiles.v, tiles.padded,
               tiles.out + (row0 + r) * tiles.padded, tiles.padded, static_cast<int>(c), true);
  }
}

void attend(const QueryBlock<BFloat16>& block, const AttentionSpec& spec) {
  static thread_local cpu::Scratch words, halves, floats;
  const Tiles tiles(words, halves, floats, block);
  const int64_t c = block.head_size, num_rows = block.heads * block.num_queries;
  fill(tiles.out, 0, num_rows * tiles.padded, 0.0F);
  fill(tiles.max, 0, num_rows, -std::numeric_limits<float>::infinity());
  fill(tiles.sum, 0, num_rows, 0.0F);
  for (int64_t row = 0; row < num_rows; row++) {
    const BFloat16* from = block.q + row % block.num_queries * block.q_stride + row / block.num_queries * c;
    std::copy_n(from, c, tiles.q + row * tiles.even);
    if (tiles.even > c) tiles.q[row * tiles.even + c] = BFloat16();
  }
  const int64_t end = block.keys[block.num_queries - 1].last;
  // Key blocks start at multiples of kKeys, so that a row's sums do not depend on its query block.
  for (int64_t k0 = block.keys[0].first / kKeys * kKeys; k0 < end; k0 += kKeys) {
    const int64_t n = std::min(kKeys, end - k0);
    pair_columns(block.k + k0 * block.kv_stride, block.kv_stride, n, c, tiles.k, kKeys);
    pair_rows(block.v + k0 * block.kv_stride, block.kv_stride, n, c, tiles.v, tiles.padded);
    for (int64_t i = 0; i < block.heads; i++) {
      attend_keys(block, tiles, i, scale_of<float>(spec), slope_of<float>(spec, block.first_head + i), k0, n);
    }
  }
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t i = row / block.num_queries, r = row % block.num_queries;
    const float inverse = tiles.sum[row] == 0 ? 0 : 1 / tiles.sum[row];  // 0: it saw no key
    const float* out = tiles.out + row * tiles.padded;
    BFloat16* y = block.y + r * block.y_stride + i * c;
    for (int64_t j = 0; j < c; j++) y[j] = out[j] * inverse;
    if (block.lse != nullptr) block.lse[r * block.lse_stride + i] = tiles.max[row] + std::log(tiles.sum[row]);
  }
}

void bf16_attention_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y,
                             const Tensor& lse) {
  attention_fwd_blocks<BFloat16>(packed_rows<BFloat16>(qkv, spec), spec, y, lse,
                                 [&](const QueryBlock<BFloat16>& block) { attend(block, spec); });
}

void bf16_attention_part_fwd_impl(const AttentionPartForward& args, const AttentionSpec& spec,
                                  const AttentionPart& part) {
  attention_fwd_blocks<BFloat16>(part_rows<BFloat16>(args, spec, part), spec, args.y, args.lse,
                                 [&](const QueryBlock<BFloat16>& block) { attend(block, spec); });
}

void bf16_attention_decode_impl(const DecodeArgs& args, const AttentionSpec& spec) {
  attention_decode_blocks<BFloat16>(args, spec,
                                    [&](const QueryBlock<BFloat16>& block) { attend(block, spec); });
}

const bool added = bf16_attention_fwd.add(DeviceType::cpu, &bf16_attention_fwd_impl, kIsaLevel) &&
                   bf16_attention_part_fwd.add(DeviceType::cpu, &bf16_attention_part_fwd_impl, kIsaLevel) &&
                   bf16_attention_decode.add(DeviceType::cpu, &bf16_attention_decode_impl, kIsaLevel);

SHOAL_KERNELS_END
