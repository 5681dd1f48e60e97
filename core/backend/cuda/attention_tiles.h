// Tiles of bf16 in shared memory, and the products of them that a warp makes with tensor cores (ptx.h). A
// warp owns 16 rows of each product. A tile has rows of kHead columns; the true head size may be smaller:
// columns up to the next multiple of 16 are zeros, those behind are not touched.
#pragma once

#include "core/backend/cuda/attention.h"
#include "core/backend/cuda/ptx.h"

namespace shoal::cuda {

inline constexpr int kWarpRows = 16, kTileThreads = 128, kLargestTileHead = 256;
/// Elements between the rows of a tile: 16 bytes more than they have, so that ldmatrix meets each bank once.
template <int kHead>
inline constexpr int kTileStride = kHead + 8;

/// Calls run.operator()<kHead>() for the smallest size of tiles that holds head_size <= kLargestTileHead.
template <class Run>
void with_tile_head(int head_size, const Run& run) {
  if (head_size <= 64) {
    run.template operator()<64>();
  } else if (head_size <= 128) {
    run.template operator()<128>();
  } else {
    run.template operator()<256>();
  }
}

/// Whether every row of these heads can be copied by 16 bytes.
template <class T>
bool rows_aligned(const HeadRows<T>& rows, int head_size) {
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.batch % 8 == 0 && rows.row % 8 == 0 &&
         rows.group % 8 == 0 && head_size % 8 == 0;
}

/// The threads of the block start to copy rows to a tile: the first `present` of `count` rows, `stride`
/// apart; the others become zeros. They are there after a wait for the copies and a barrier.
template <int kHead>
SHOAL_DEVICE void load_tile(BFloat16* tile, const BFloat16* from, int64_t stride, int count, int present,
                            int head_size, bool aligned) {
  constexpr int kPacks = kHead / 8;
  for (int i = static_cast<int>(threadIdx.x); i < count * kPacks; i += static_cast<int>(blockDim.x)) {
    const int row = i / kPacks, column = i % kPacks * 8;
    if (column >= (head_size + 15) / 16 * 16) continue;
    const int there = row < present ? (head_size - column < 8 ? head_size - column : 8) : 0;
    const BFloat16* source = from + row * stride + column;
    BFloat16* to = tile + row * kTileStride<kHead> + column;
    if (aligned) {
      copy_async(to, there > 0 ? source : from, there > 0 ? 16 : 0);
    } else {
      for (int j = 0; j < 8; j++) to[j] = j < there ? source[j] : BFloat16();
    }
  }
}

/// out[r][j] += sum over columns of a[r] * b[j], for 16 rows of a tile and kCount rows of another one.
template <int kHead, int kCount>
SHOAL_DEVICE void multiply_rows(float (&out)[kCount / 8][4], const BFloat16* a, const BFloat16* b,
                                int head_size) {
  constexpr int kStride = kTileStride<kHead>;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const BFloat16* a_row = a + lane % 16 * kStride + lane / 16 * 8;
  const BFloat16* b_row = b + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
  SHOAL_UNROLL
  for (int k = 0; k < kHead; k += 16) {
    if (k >= head_size) break;
    uint32_t rows[4];
    load_matrices(rows, a_row + k);
    SHOAL_UNROLL
    for (int j = 0; j < kCount; j += 16) {
      uint32_t columns[4];
      load_matrices(columns, b_row + j * kStride + k);
      multiply_add(out[j / 8], rows, columns[0], columns[1]);
      multiply_add(out[j / 8 + 1], rows, columns[2], columns[3]);
    }
  }
}

/// out[r][c] += sum over j of bf16(weights[r][j]) * b[j][c], for kCount rows of a tile and the first
/// `columns` of kColumns columns, up to a multiple of 16. weights are as multiply_rows leaves them.
template <int kHead, int kCount, int kColumns>
SHOAL_DEVICE void add_weighted_rows(float (&out)[kColumns / 8][4], const float (&weights)[kCount / 8][4],
                                    const BFloat16* b, int columns) {
  constexpr int kStride = kTileStride<kHead>;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const BFloat16* b_row = b + lane % 16 * kStride + lane / 16 * 8;
  SHOAL_UNROLL
  for (int j = 0; j < kCount; j += 16) {
    const float(&low)[4] = weights[j / 8], (&high)[4] = weights[j / 8 + 1];
    const uint32_t rows[4] = {round_pair(low[0], low[1]), round_pair(low[2], low[3]),
                              round_pair(high[0], high[1]), round_pair(high[2], high[3])};
    SHOAL_UNROLL
    for (int c = 0; c < kColumns; c += 16) {
      if (c >= columns) break;
      uint32_t pairs[4];
      load_matrices_transposed(pairs, b_row + j * kStride + c);
      multiply_add(out[c / 8], rows, pairs[0], pairs[1]);
      multiply_add(out[c / 8 + 1], rows, pairs[2], pairs[3]);
    }
  }
}

/// Rounds row `half` (of lane / 4 and lane / 4 + 8) of `sums`, times factor, to the first `columns` elements
/// at `to`.
template <int kColumns>
SHOAL_DEVICE void store_row(BFloat16* to, const float (&sums)[kColumns / 8][4], int half, float factor,
                            int columns, bool aligned) {
  const int first = static_cast<int>(threadIdx.x % 4) * 2;
  SHOAL_UNROLL
  for (int n = 0; n < kColumns / 8; n++) {
    const int c = n * 8 + first;
    const float low = sums[n][2 * half] * factor, high = sums[n][2 * half + 1] * factor;
    if (aligned && c < columns) {
      *reinterpret_cast<uint32_t*>(to + c) = round_pair(low, high);
    } else {
      if (c < columns) to[c] = low;
      if (c + 1 < columns) to[c + 1] = high;
    }
  }
}

/// Sum over the four lanes that share rows of a product.
SHOAL_DEVICE float quad_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}
/// Their largest value; NaN is left out.
SHOAL_DEVICE float quad_max(float value) {
  for (int offset = 1; offset <= 2; offset *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace shoal::cuda
