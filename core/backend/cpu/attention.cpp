// Attention in blocks of queries and keys (online softmax; Dao, arXiv:2307.08691, algorithms 1 and 2). A
// thread holds one block of scores at a time, so extra memory does not grow with the square of the sequence.
// The keys that a query sees are one interval [first, last), because documents are consecutive: whole blocks
// outside it are skipped, and register tiles stop at its ends.
#include "core/ops/attention_part.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"
#include "core/base/threads.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/attention_forward.inc"

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
      add_alibi(scores, columns, slope, block.key_rows, k0, block.first_position + r + i);
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
      const T inverse = tiles.sum[row] == 0 ? 0 : 1 / tiles.sum[row];  // 0: it saw no key
      const T* out = tiles.out + row * tiles.padded;
      T* y = block.y + r * block.y_stride + i * c;
      for (int64_t j = 0; j < c; j++) y[j] = out[j] * inverse;
      if (block.lse != nullptr) {
        block.lse[r * block.lse_stride + i] = tiles.max[row] + std::log(tiles.sum[row]);
      }
    }
  }
}

void attention_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse) {
  dispatch_float(qkv.dtype(), "attention", [&]<class T>() {
    attention_fwd_blocks<T>(packed_rows<T>(qkv, spec), spec, y, lse,
                            [&](const QueryBlock<T>& block) { attend(block, spec); });
  });
}

void attention_part_fwd_impl(const AttentionPartForward& args, const AttentionSpec& spec,
                             const AttentionPart& part) {
  dispatch_float(args.qkv.dtype(), "attention_part", [&]<class T>() {
    attention_fwd_blocks<T>(part_rows<T>(args, spec, part), spec, args.y, args.lse,
                            [&](const QueryBlock<T>& block) { attend(block, spec); });
  });
}

void attention_decode_impl(const DecodeArgs& args, const AttentionSpec& spec) {
  dispatch_float(args.qkv.dtype(), "attention_decode", [&]<class T>() {
    attention_decode_blocks<T>(args, spec, [&](const QueryBlock<T>& block) { attend(block, spec); });
  });
}

const bool added = attention_fwd.add(DeviceType::cpu, &attention_fwd_impl, kIsaLevel) &&
                   attention_part_fwd.add(DeviceType::cpu, &attention_part_fwd_impl, kIsaLevel) &&
                   attention_decode.add(DeviceType::cpu, &attention_decode_impl, kIsaLevel);

SHOAL_KERNELS_END
