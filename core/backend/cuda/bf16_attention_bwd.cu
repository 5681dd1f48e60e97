// Backward of attention on bf16 with tensor cores (Dao, arXiv:2307.08691, algorithm 2, in two kernels, so
// that each sum has one block and one order). With p = softmax, delta = sum over columns of dy * y:
//   dv = p^T dy,   ds = p * (dy v^T - delta),   dk = scale ds^T q,   dq = scale ds k.
// One kernel has a block for some keys and goes through the queries that see them, of all heads of the group;
// the other one has a block for some queries of a head and goes through the keys that they see. Both make the
// scores again: seven products where one kernel with atomic sums would need five. p and ds are rounded to
// bf16 before they are multiplied.
#include "core/backend/cuda/attention_tiles.h"
#include "core/backend/cuda/library_attention.h"

namespace shoal::cuda {
namespace {

constexpr float kLog2e = 1.44269504F;
constexpr int kOthers = 32;  // rows of a tile that a block goes through

/// Columns whose sums a block of keys keeps in registers: wider heads have a block for each part of their
/// columns.
template <int kHead, bool kOfKeys>
constexpr int kSumColumns = kOfKeys&& kHead > 128 ? 128 : kHead;

/// 16 rows of a warp: keys (kOfKeys) or queries. A thread has, in part, rows lane / 4 and lane / 4 + 8.
/// "Others" are the rows of the other kind that belong to a row.
template <int kHead, bool kOfKeys>
struct OwnRows {
  static constexpr int kColumns = kSumColumns<kHead, kOfKeys>;
  float scores_sums[kColumns / 8][4];                // dk or dq, without the scale
  float values_sums[kOfKeys ? kColumns / 8 : 1][4];  // dv
  int position[2];
  Range others[2], warp_others;
  float lse[2], delta[2];  // of queries; lse in base 2
};

/// What a block works on.
struct BlockPlace {
  int batch, group, head, first, count;  // head: of the group, of queries; rows [first, first + count)
  int column;                            // first of the sums
};

/// Shared memory of a block. Owned: keys and values, or queries and dy. Others: two tiles of each, used in
/// turn.
template <int kHead, bool kOfKeys>
struct BlockTiles {
  static constexpr int kTile = kOthers * kTileStride<kHead>;
  BFloat16 *own_scores, *own_values, *scores, *values;
  float* stats;  // of the tiles of queries: lse in base 2, then delta

  SHOAL_DEVICE BlockTiles(BFloat16* shared, int block_rows)
      : own_scores(shared),
        own_values(own_scores + block_rows * kTileStride<kHead>),
        scores(own_values + block_rows * kTileStride<kHead>),
        values(scores + 2 * kTile),
        stats(reinterpret_cast<float*>(values + 2 * kTile)) {}
  static size_t bytes(int block_rows) {
    const size_t rows = static_cast<size_t>(2 * block_rows + 4 * kOthers);
    return rows * kTileStride<kHead> * sizeof(BFloat16) + (kOfKeys ? 4 * kOthers * sizeof(float) : 0);
  }
};

template <bool kOfKeys>
SHOAL_DEVICE Range others_of(const AttentionArgs<BFloat16>& a, int b, int row) {
  const int clamped = smaller_of(row, a.sight.num_keys - 1);
  return kOfKeys ? a.sight.queries_of(b, clamped) : a.sight.keys_of(b, clamped);
}

template <int kHead, bool kOfKeys>
SHOAL_DEVICE void start_rows(const AttentionArgs<BFloat16>& a, const float* deltas, const BlockPlace& at,
                             OwnRows<kHead, kOfKeys>& own) {
  const int first = at.first + static_cast<int>(threadIdx.x / kWarp) * kWarpRows;
  SHOAL_UNROLL
  for (int half = 0; half < 2; half++) {
    own.position[half] = first + static_cast<int>(threadIdx.x % kWarp / 4) + half * 8;
    own.others[half] = others_of<kOfKeys>(a, at.batch, own.position[half]);
    const bool there = !kOfKeys && own.position[half] < a.sight.num_queries;
    const int64_t stat = there ? a.stat_of(at.batch, own.position[half], at.group * a.heads + at.head) : 0;
    own.lse[half] = there ? a.lse[stat] * kLog2e : 0;
    own.delta[half] = there ? deltas[stat] : 0;
  }
  own.warp_others = {others_of<kOfKeys>(a, at.batch, first).first,
                     others_of<kOfKeys>(a, at.batch, first + kWarpRows - 1).last};
  SHOAL_UNROLL
  for (int n = 0; n < own.kColumns / 8; n++) {
    for (int i = 0; i < 4; i++) own.scores_sums[n][i] = own.values_sums[kOfKeys ? n : 0][i] = 0;
  }
}

/// Products of owned rows with others, of queries with keys and of dy with values, become p and ds; 0 where a
/// query does not see a key. stats: see BlockTiles.
template <int kHead, bool kOfKeys>
SHOAL_DEVICE void score_gradients(const OwnRows<kHead, kOfKeys>& own, float (&scores)[kOthers / 8][4],
                                  float (&values)[kOthers / 8][4], int first_other, const float* stats,
                                  float scale, float slope) {
  SHOAL_UNROLL
  for (int half = 0; half < 2; half++) {
    SHOAL_UNROLL
    for (int i = 0; i < kOthers / 4; i++) {
      const int column = static_cast<int>(threadIdx.x % 4) * 2 + i / 2 * 8 + i % 2,
                other = first_other + column;
      float &score = scores[i / 2][2 * half + i % 2], &value = values[i / 2][2 * half + i % 2];
      const float lse = kOfKeys ? stats[column] : own.lse[half];
      const float delta = kOfKeys ? stats[kOthers + column] : own.delta[half];
      const int distance = kOfKeys ? own.position[half] - other : other - own.position[half];  // key - query
      float exponent = score * scale - lse;
      if (slope != 0) exponent += slope * static_cast<float>(distance);
      const bool seen = own.others[half].has(other);
      score = seen ? exp2_approx(exponent) : 0.0F;
      value = seen ? score * (value - delta) : 0.0F;
    }
  }
}

template <int kHead, bool kOfKeys>
SHOAL_DEVICE void finish_rows(const AttentionArgs<BFloat16>& a, const AttentionGradients<BFloat16>& gradients,
                              const BlockPlace& at, const OwnRows<kHead, kOfKeys>& own, bool aligned) {
  constexpr int kColumns = OwnRows<kHead, kOfKeys>::kColumns;
  const int columns = a.head_size - at.column;
  SHOAL_UNROLL
  for (int half = 0; half < 2; half++) {
    const int row = own.position[half];
    if (row >= at.first + at.count) continue;
    if (kOfKeys) {
      store_row<kColumns>(gradients.dk.at(at.batch, row, at.group) + at.column, own.scores_sums, half,
                          a.scale, columns, aligned);
      if constexpr (kOfKeys) {
        store_row<kColumns>(gradients.dv.at(at.batch, row, at.group) + at.column, own.values_sums, half, 1,
                            columns, aligned);
      }
    } else {
      store_row<kColumns>(gradients.dq.at(at.batch, row, at.group) + at.head * a.head_size, own.scores_sums,
                          half, a.scale, columns, aligned);
    }
  }
}

/// Tiles of others of a block, in order: of queries, those of the group's first head, then of the next one.
template <int kHead, bool kOfKeys>
class OtherTiles {
 public:
  SHOAL_DEVICE OtherTiles(const AttentionArgs<BFloat16>& a, const AttentionGradients<BFloat16>& gradients,
                          const BlockPlace& at, const BlockTiles<kHead, kOfKeys>& tiles, bool aligned)
      : a_(a), gradients_(gradients), at_(at), tiles_(tiles), aligned_(aligned) {
    first_ = others_of<kOfKeys>(a, at.batch, at.first).first / kOthers * kOthers;
    const int last = others_of<kOfKeys>(a, at.batch, at.first + at.count - 1).last;
    per_head_ = (last - first_ + kOthers - 1) / kOthers;
  }
  SHOAL_DEVICE int count() const { return kOfKeys ? per_head_ * a_.heads : per_head_; }
  SHOAL_DEVICE int head_of(int tile) const { return kOfKeys ? tile / per_head_ : at_.head; }
  SHOAL_DEVICE int first_of(int tile) const { return first_ + (kOfKeys ? tile % per_head_ : tile) * kOthers; }

  /// Starts to copy a tile.
  SHOAL_DEVICE void load(int tile) const {
    const int first = first_of(tile), offset = kOfKeys ? head_of(tile) * a_.head_size : 0;
    const int present = smaller_of(kOthers, a_.sight.num_keys - first), buffer = tile % 2 * tiles_.kTile;
    const HeadRows<const BFloat16>&scores = kOfKeys ? a_.q : a_.k, &values = kOfKeys ? gradients_.dy : a_.v;
    load_tile<kHead>(tiles_.scores + buffer, scores.at(at_.batch, first, at_.group) + offset, scores.row,
                     kOthers, present, a_.head_size, aligned_);
    load_tile<kHead>(tiles_.values + buffer, values.at(at_.batch, first, at_.group) + offset, values.row,
                     kOthers, present, a_.head_size, aligned_);
    commit_copies();
  }
  /// lse and delta of a tile of queries, one query for each thread of the first warp. They are read early and
  /// stored late, so that nobody waits for them.
  SHOAL_DEVICE Pack<float, 2> stats_of(int tile) const {
    const int query = first_of(tile) + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kOthers || query >= a_.sight.num_queries) return {0, 0};
    const int64_t stat = a_.stat_of(at_.batch, query, at_.group * a_.heads + head_of(tile));
    return {a_.lse[stat] * kLog2e, gradients_.delta[stat]};
  }
  SHOAL_DEVICE void store_stats(int tile, const Pack<float, 2>& stats) const {
    if (threadIdx.x >= kOthers) return;
    float* to = tiles_.stats + tile % 2 * 2 * kOthers + threadIdx.x;
    to[0] = stats.v[0];
    to[kOthers] = stats.v[1];
  }

 private:
  const AttentionArgs<BFloat16>& a_;
  const AttentionGradients<BFloat16>& gradients_;
  const BlockPlace& at_;
  const BlockTiles<kHead, kOfKeys>& tiles_;
  bool aligned_;
  int first_, per_head_;
};

/// One tile of others for the 16 rows of a warp, which are in row_scores and row_values.
template <int kHead, bool kOfKeys>
SHOAL_DEVICE void add_tile(const AttentionArgs<BFloat16>& a, const BlockPlace& at,
                           const BlockTiles<kHead, kOfKeys>& tiles, int buffer, int first, float slope,
                           OwnRows<kHead, kOfKeys>& own) {
  constexpr int kColumns = OwnRows<kHead, kOfKeys>::kColumns;
  const int warp_row = static_cast<int>(threadIdx.x / kWarp) * kWarpRows * kTileStride<kHead>;
  const BFloat16 *scores_tile = tiles.scores + buffer * tiles.kTile,
                 *values_tile = tiles.values + buffer * tiles.kTile;
  float scores[kOthers / 8][4] = {}, values[kOthers / 8][4] = {};
  multiply_rows<kHead, kOthers>(scores, tiles.own_scores + warp_row, scores_tile, a.head_size);
  multiply_rows<kHead, kOthers>(values, tiles.own_values + warp_row, values_tile, a.head_size);
  score_gradients(own, scores, values, first, tiles.stats + buffer * 2 * kOthers, a.scale * kLog2e, slope);
  const int columns = a.head_size - at.column;
  if constexpr (kOfKeys) {
    add_weighted_rows<kHead, kOthers, kColumns>(own.values_sums, scores, values_tile + at.column, columns);
  }
  add_weighted_rows<kHead, kOthers, kColumns>(own.scores_sums, values, scores_tile + at.column, columns);
}

template <int kHead, bool kOfKeys>
SHOAL_DEVICE void block_backward(const AttentionArgs<BFloat16>& a,
                                 const AttentionGradients<BFloat16>& gradients, const BlockPlace& at,
                                 const BlockTiles<kHead, kOfKeys>& tiles, int block_rows, bool aligned) {
  const HeadRows<const BFloat16>&scores = kOfKeys ? a.k : a.q, &values = kOfKeys ? a.v : gradients.dy;
  const int offset = kOfKeys ? 0 : at.head * a.head_size;
  load_tile<kHead>(tiles.own_scores, scores.at(at.batch, at.first, at.group) + offset, scores.row, block_rows,
                   at.count, a.head_size, aligned);
  load_tile<kHead>(tiles.own_values, values.at(at.batch, at.first, at.group) + offset, values.row, block_rows,
                   at.count, a.head_size, aligned);
  const OtherTiles<kHead, kOfKeys> others(a, gradients, at, tiles, aligned);
  others.load(0);
  if (kOfKeys) others.store_stats(0, others.stats_of(0));
  OwnRows<kHead, kOfKeys> own;
  start_rows(a, gradients.delta, at, own);
  for (int tile = 0; tile < others.count(); tile++) {
    wait_copies<0>();
    __syncthreads();  // the tile is there for all; and the one before, which the next one overwrites, was
                      // read by all
    const bool more = tile + 1 < others.count();
    if (more) others.load(tile + 1);
    const Pack<float, 2> stats = kOfKeys && more ? others.stats_of(tile + 1) : Pack<float, 2>{0, 0};
    const int first = others.first_of(tile);
    if (first < own.warp_others.last && first + kOthers > own.warp_others.first) {
      const float slope = a.slope_of(at.group * a.heads + others.head_of(tile)) * kLog2e;
      add_tile(a, at, tiles, tile % 2, first, slope, own);
    }
    if (kOfKeys && more) others.store_stats(tile + 1, stats);
  }
  finish_rows(a, gradients, at, own, aligned);
}

template <int kHead, bool kOfKeys>
__global__ void __launch_bounds__(kTileThreads, 1)
    bf16_attention_bwd_kernel(AttentionArgs<BFloat16> a, AttentionGradients<BFloat16> gradients,
                              bool aligned) {
  SHOAL_DYNAMIC_SHARED(BFloat16, shared);
  const int block_rows = static_cast<int>(blockDim.x / kWarp) * kWarpRows, num_rows = a.sight.num_queries;
  const BlockTiles<kHead, kOfKeys> tiles(shared, block_rows);
  const int num_blocks = (num_rows + block_rows - 1) / block_rows;
  const int parts = (a.head_size + kSumColumns<kHead, kOfKeys> - 1) / kSumColumns<kHead, kOfKeys>;
  const int heads = kOfKeys ? parts * a.groups : a.groups * a.heads;  // blocks for the same rows
  const int count = num_blocks * a.batch * heads;
  for (int i = static_cast<int>(blockIdx.x); i < count; i += static_cast<int>(gridDim.x)) {
    // The first keys and the last queries have most to do: they go first.
    const int block = kOfKeys ? i / heads / a.batch : num_blocks - 1 - i / heads / a.batch, head = i % heads;
    BlockPlace at{i / heads % a.batch, head / a.heads, head % a.heads, block * block_rows, 0, 0};
    if (kOfKeys) at.group = head / parts, at.head = 0, at.column = head % parts * kSumColumns<kHead, kOfKeys>;
    at.count = smaller_of(block_rows, num_rows - at.first);
    block_backward<kHead, kOfKeys>(a, gradients, at, tiles, block_rows, aligned);
    __syncthreads();  // the tiles are read by all
  }
}

template <int kHead, bool kOfKeys>
void launch_blocks(Device device, const AttentionArgs<BFloat16>& a,
                   const AttentionGradients<BFloat16>& gradients, bool aligned) {
  const LaunchShape one = launch_shape(device, 1, kTileThreads);
  const int block_rows = static_cast<int>(one.block / kWarp) * kWarpRows;
  constexpr int kColumns = kSumColumns<kHead, kOfKeys>;
  const int64_t blocks = (a.sight.num_queries + block_rows - 1) / block_rows;
  const int64_t heads = kOfKeys ? (a.head_size + kColumns - 1) / kColumns : a.heads;
  const int64_t count = blocks * a.batch * a.groups * heads;
  SHOAL_CHECK(count < INT32_MAX / 2, "attention: ", a.batch, " sequences of ", a.sight.num_queries,
              " tokens with ", a.groups * a.heads, " heads are too many for one launch; use fewer");
  const LaunchShape shape =
      launch_shape(device, count, kTileThreads, 1, BlockTiles<kHead, kOfKeys>::bytes(block_rows));
  SHOAL_LAUNCH((bf16_attention_bwd_kernel<kHead, kOfKeys>), shape, a, gradients, aligned);
}

void bf16_attention_bwd_impl(const AttentionBackward& args, const AttentionSpec& spec) {
  if (attention_bwd_by_library(args, spec)) return;
  const Device device = args.qkv.device();
  const Tensor bounds = document_bounds(spec, device),
               delta = attention_delta<BFloat16>(args.dy, args.y, spec.head_size);
  const auto a = attention_args<BFloat16>(args.qkv, spec, args.y, args.lse, bounds);
  const auto gradients = attention_gradients<BFloat16>(args, spec, delta);
  if (a.head_size > kLargestTileHead) return attention_bwd_by_rows(device, a, gradients);
  const bool aligned = rows_aligned(a.q, a.head_size) && rows_aligned(a.k, a.head_size) &&
                       rows_aligned(a.v, a.head_size) && rows_aligned(gradients.dy, a.head_size) &&
                       rows_aligned(gradients.dq, a.head_size);
  with_tile_head(a.head_size, [&]<int kHead>() {
    launch_blocks<kHead, true>(device, a, gradients, aligned);
    launch_blocks<kHead, false>(device, a, gradients, aligned);
  });
}

/// Without tensor cores.
void bf16_attention_part_bwd_impl(const AttentionPartBackward& args, const AttentionSpec& spec,
                                  const AttentionPart& part) {
  const Device device = args.qkv.device();
  const Tensor bounds = document_bounds(spec, device),
               delta = attention_delta<BFloat16>(args.dy, args.y, spec.head_size);
  attention_bwd_by_rows(device,
                        part_args<BFloat16>({args.qkv, args.kv, args.y, args.lse}, spec, part, bounds),
                        part_gradients<BFloat16>(args, spec, part, delta));
}

[[maybe_unused]] const bool added[] = {
    bf16_attention_bwd.add(DeviceType::cuda, &bf16_attention_bwd_impl),
    bf16_attention_part_bwd.add(DeviceType::cuda, &bf16_attention_part_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
