// Attention forward on bf16 with tensor cores (Dao, arXiv:2307.08691, algorithm 1). A block has 16 queries of
// one head for each of its warps and goes through the keys that any of them sees in tiles; the next tile is
// copied to shared memory while one is multiplied. Scores and sums are f32 registers, and the weights are
// rounded to bf16 for the product with the values. Without tensor cores: heads above 256, and decoding of a
// few tokens.
#include "core/backend/cuda/attention_tiles.h"
#include "core/backend/cuda/library_attention.h"

namespace shoal::cuda {
namespace {

constexpr float kLog2e = 1.44269504F, kLn2 = 0.693147181F;
constexpr int kFewQueries = 16;  // below, decoding is bound by reading the caches

/// Keys of a tile: what leaves room for two blocks on a processor.
template <int kHead>
constexpr int kTileKeys = kHead <= 128 ? 64 : 32;

/// 16 queries of a warp. A thread has, in part, rows lane / 4 and lane / 4 + 8.
template <int kHead>
struct QueryRows {
  float sums[kHead / 8][4];  // of weights times values
  float max[2], total[2];    // of the scores in base 2; of this thread's weights
  int query[2];
  Range keys[2], warp_keys;  // that each sees; that any of the warp's does
};

/// Where a block's queries are.
struct QueryBlock {
  int batch, group, head, first;  // head: of its group
};

template <int kHead>
SHOAL_DEVICE void start_rows(const AttentionArgs<BFloat16>& a, const QueryBlock& at, QueryRows<kHead>& rows) {
  const int last = a.sight.num_queries - 1,
            first = at.first + static_cast<int>(threadIdx.x / kWarp) * kWarpRows;
  SHOAL_UNROLL
  for (int half = 0; half < 2; half++) {
    rows.query[half] = first + static_cast<int>(threadIdx.x % kWarp / 4) + half * 8;
    rows.keys[half] = a.sight.keys_of(at.batch, smaller_of(rows.query[half], last));
    rows.max[half] = -INFINITY;
    rows.total[half] = 0;
  }
  rows.warp_keys = {a.sight.keys_of(at.batch, smaller_of(first, last)).first,
                    a.sight.keys_of(at.batch, smaller_of(first + kWarpRows - 1, last)).last};
  SHOAL_UNROLL
  for (int n = 0; n < kHead / 8; n++) {
    for (int i = 0; i < 4; i++) rows.sums[n][i] = 0;
  }
}

/// Products of queries and keys become scores in base 2, -inf where a query does not see the key; then
/// weights relative to the largest score so far.
template <int kHead, int kKeys>
SHOAL_DEVICE void weigh(QueryRows<kHead>& rows, float (&scores)[kKeys / 8][4], int first_key,
                        int first_position, float scale, float slope) {
  const int column = first_key + static_cast<int>(threadIdx.x % 4) * 2;
  SHOAL_UNROLL
  for (int half = 0; half < 2; half++) {
    const Range keys = rows.keys[half];
    const bool all_seen = first_key >= keys.first && first_key + kKeys <= keys.last;
    const int position = first_position + rows.query[half];
    float largest = rows.max[half];
    SHOAL_UNROLL
    for (int i = 0; i < kKeys / 4; i++) {
      float& score = scores[i / 2][2 * half + i % 2];
      const int key = column + i / 2 * 8 + i % 2;
      score *= scale;
      if (slope != 0) score += slope * static_cast<float>(key - position);
      if (!all_seen && !keys.has(key)) score = -INFINITY;
      largest = score > largest ? score : largest;
    }
    largest = quad_max(largest);
    const float base = largest == -INFINITY ? 0.0F : largest;  // nothing seen yet: all weights are 0
    const float factor = exp2_approx(rows.max[half] - base);
    rows.max[half] = largest;
    rows.total[half] *= factor;
    SHOAL_UNROLL
    for (int i = 0; i < kKeys / 4; i++) {
      float& score = scores[i / 2][2 * half + i % 2];
      score = exp2_approx(score - base);
      rows.total[half] += score;
    }
    SHOAL_UNROLL
    for (int n = 0; n < kHead / 8; n++) {
      rows.sums[n][2 * half] *= factor;
      rows.sums[n][2 * half + 1] *= factor;
    }
  }
}

template <int kHead>
SHOAL_DEVICE void finish_rows(const AttentionArgs<BFloat16>& a, const QueryBlock& at,
                              const QueryRows<kHead>& rows, bool aligned) {
  const int head = at.group * a.heads + at.head;
  SHOAL_UNROLL
  for (int half = 0; half < 2; half++) {
    const float total = quad_sum(rows.total[half]);
    if (rows.query[half] >= a.sight.num_queries) continue;
    BFloat16* y = a.y.at(at.batch, rows.query[half], at.group) + at.head * a.head_size;
    store_row<kHead>(y, rows.sums, half, 1 / total, a.head_size, aligned);
    if (a.lse != nullptr && threadIdx.x % 4 == 0) {
      a.lse[a.stat_of(at.batch, rows.query[half], head)] = rows.max[half] * kLn2 + std::log(total);
    }
  }
}

/// A query block: q_tile has its queries, k_tiles and v_tiles two tiles each, used in turn.
template <int kHead>
SHOAL_DEVICE void attend(const AttentionArgs<BFloat16>& a, const QueryBlock& at, BFloat16* q_tile,
                         bool aligned) {
  constexpr int kKeys = kTileKeys<kHead>, kStride = kTileStride<kHead>, kTile = kKeys * kStride;
  const int block_rows = static_cast<int>(blockDim.x / kWarp) * kWarpRows;
  BFloat16 *k_tiles = q_tile + block_rows * kStride, *v_tiles = k_tiles + 2 * kTile;
  const int num_rows = smaller_of(block_rows, a.sight.num_queries - at.first);
  const int first = a.sight.keys_of(at.batch, at.first).first / kKeys * kKeys;
  const int last = a.sight.keys_of(at.batch, at.first + num_rows - 1).last;
  const auto load_keys = [&](int tile) {
    const int key = first + tile * kKeys, present = smaller_of(kKeys, a.sight.num_keys - key);
    load_tile<kHead>(k_tiles + tile % 2 * kTile, a.k.at(at.batch, key, at.group), a.k.row, kKeys, present,
                     a.head_size, aligned);
    load_tile<kHead>(v_tiles + tile % 2 * kTile, a.v.at(at.batch, key, at.group), a.v.row, kKeys, present,
                     a.head_size, aligned);
    commit_copies();
  };
  const int head = at.group * a.heads + at.head;
  const float scale = a.scale * kLog2e, slope = a.slope_of(head) * kLog2e;
  QueryRows<kHead> rows;
  start_rows(a, at, rows);
  load_tile<kHead>(q_tile, a.q.at(at.batch, at.first, at.group) + at.head * a.head_size, a.q.row, block_rows,
                   num_rows, a.head_size, aligned);
  load_keys(0);
  const BFloat16* queries = q_tile + threadIdx.x / kWarp * kWarpRows * kStride;
  const int num_tiles = (last - first + kKeys - 1) / kKeys;
  for (int tile = 0; tile < num_tiles; tile++) {
    wait_copies<0>();
    __syncthreads();  // the tile is there for all; and the one before, which the next one overwrites, was
                      // read by all
    if (tile + 1 < num_tiles) load_keys(tile + 1);
    const int key = first + tile * kKeys;
    if (key >= rows.warp_keys.last || key + kKeys <= rows.warp_keys.first) continue;
    float scores[kKeys / 8][4] = {};
    multiply_rows<kHead, kKeys>(scores, queries, k_tiles + tile % 2 * kTile, a.head_size);
    weigh<kHead, kKeys>(rows, scores, key, a.sight.first_position, scale, slope);
    add_weighted_rows<kHead, kKeys, kHead>(rows.sums, scores, v_tiles + tile % 2 * kTile, a.head_size);
  }
  finish_rows(a, at, rows, aligned);
}

template <int kHead>
__global__ void __launch_bounds__(kTileThreads)
    bf16_attention_fwd_kernel(AttentionArgs<BFloat16> a, bool aligned) {
  SHOAL_DYNAMIC_SHARED(BFloat16, shared);
  const int block_rows = static_cast<int>(blockDim.x / kWarp) * kWarpRows;
  const int num_blocks = (a.sight.num_queries + block_rows - 1) / block_rows;
  const int heads = a.groups * a.heads;
  const int64_t count = int64_t{num_blocks} * a.batch * heads;
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    // The last queries see the most keys: they go first. Heads that share keys are neighbours.
    const int block = num_blocks - 1 - static_cast<int>(i / heads / a.batch);
    const int head = static_cast<int>(i % heads);
    const QueryBlock at{static_cast<int>(i / heads % a.batch), head / a.heads, head % a.heads,
                        block * block_rows};
    attend<kHead>(a, at, shared, aligned);
    __syncthreads();  // the tiles are read by all
  }
}

void attention_fwd_in_tiles(Device device, const AttentionArgs<BFloat16>& a) {
  const bool aligned = rows_aligned(a.q, a.head_size) && rows_aligned(a.k, a.head_size) &&
                       rows_aligned(a.v, a.head_size) && rows_aligned(a.y, a.head_size);
  with_tile_head(a.head_size, [&]<int kHead>() {
    LaunchShape shape = launch_shape(device, 1, kTileThreads);
    const int block_rows = static_cast<int>(shape.block / kWarp) * kWarpRows;
    const int64_t num_blocks = (a.sight.num_queries + block_rows - 1) / block_rows;
    const size_t tile_rows = static_cast<size_t>(block_rows + 4 * kTileKeys<kHead>);
    shape = launch_shape(device, num_blocks * a.batch * a.groups * a.heads, kTileThreads, 1,
                         tile_rows * kTileStride<kHead> * sizeof(BFloat16));
    SHOAL_LAUNCH((bf16_attention_fwd_kernel<kHead>), shape, a, aligned);
  });
}

void bf16_attention_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y,
                             const Tensor& lse) {
  if (attention_fwd_by_library(qkv, spec, y, lse)) return;
  const Tensor bounds = document_bounds(spec, qkv.device());
  const auto a = attention_args<BFloat16>(qkv, spec, y, lse, bounds);
  if (a.head_size <= kLargestTileHead) {
    attention_fwd_in_tiles(qkv.device(), a);
  } else {
    attention_fwd_by_rows(qkv.device(), a);
  }
}

/// Without tensor cores.
void bf16_attention_part_fwd_impl(const AttentionPartForward& args, const AttentionSpec& spec,
                                  const AttentionPart& part) {
  const Tensor bounds = document_bounds(spec, args.qkv.device());
  attention_fwd_by_rows(args.qkv.device(), part_args<BFloat16>(args, spec, part, bounds));
}

void bf16_attention_decode_impl(const DecodeArgs& args, const AttentionSpec& spec) {
  const auto a = append_to_caches<BFloat16>(args, spec);
  if (a.head_size <= kLargestTileHead && spec.seq >= kFewQueries) {
    attention_fwd_in_tiles(args.qkv.device(), a);
  } else {
    attention_fwd_by_rows(args.qkv.device(), a);
  }
}

[[maybe_unused]] const bool added[] = {
    bf16_attention_fwd.add(DeviceType::cuda, &bf16_attention_fwd_impl),
    bf16_attention_part_fwd.add(DeviceType::cuda, &bf16_attention_part_fwd_impl),
    bf16_attention_decode.add(DeviceType::cuda, &bf16_attention_decode_impl),
};

}  // namespace
}  // namespace shoal::cuda
