// Products of all groups in one launch. A block of four warps makes a tile of 64 x 128 results, then the tile
// gridDim.x further on: tiles are numbered through all groups, and a block walks over the groups as it
// counts. Operands pass through shared memory in slices of 64 along the sum, kStages of them on their way at
// once. Each warp multiplies 32 x 64 of the tile.
#include "core/backend/cuda/grouped_gemm.h"

#include "core/backend/cuda/block.h"
#include "core/backend/cuda/groups.h"
#include "core/backend/cuda/ptx.h"

namespace shoal::cuda {
namespace {

constexpr int kTileM = 64, kTileN = 128, kTileK = 64, kStages = 3;
constexpr int kThreads = 128;  // 2 x 2 warps
constexpr int kWarpM = 32, kWarpN = 64;
constexpr int kChunk = 8;  // elements of 16 bytes
constexpr int64_t kBlocks =
    396;  // three for each of the 132 processors of an H200: what their shared memory holds
constexpr size_t kSharedBytes = sizeof(BFloat16) * kStages * kTileK * (kTileM + kTileN);

/// An operand of a tile: rows of `ld` elements in memory, of which `rows` x `columns` from `data` on count.
struct Operand {
  const BFloat16* data;
  int64_t ld, rows, columns;
  bool chunks;  // every chunk of a row is aligned to its size
};

/// A slice of an operand in shared memory. The chunks of a row are permuted by its number: eight rows below
/// each other are in different banks, and ldmatrix reads them at once.
template <int kRows, int kColumns>
struct Slice {
  static constexpr int kRowChunks = kColumns / kChunk;
  BFloat16* data;
  SHOAL_DEVICE BFloat16* at(int row, int chunk) const {
    return data + (row * kRowChunks + (chunk ^ (row & 7))) * kChunk;
  }
  /// Starts to fill it with what is at (row, column) of the operand, and zeros where that ends.
  SHOAL_DEVICE void fill(const Operand& from, int64_t row, int64_t column) const {
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kRowChunks; i += kThreads) {
      const int64_t r = row + i / kRowChunks, c = column + i % kRowChunks * kChunk;
      const int64_t left = r < from.rows && c < from.columns ? from.columns - c : 0;
      BFloat16* to = at(i / kRowChunks, i % kRowChunks);
      const BFloat16* source = from.data + (left > 0 ? r * from.ld + c : 0);
      if (from.chunks) {
        copy_async(to, source, left > 0 ? sizeof(BFloat16) * kChunk : 0);
      } else {
        Pack<BFloat16, kChunk> values;
        SHOAL_UNROLL
        for (int j = 0; j < kChunk; j++) values.v[j] = j < left ? source[j] : BFloat16(0.0F);
        *reinterpret_cast<Pack<BFloat16, kChunk>*>(to) = values;
      }
    }
  }
};

/// The product of one tile. kSumsInA, kSumsInB: the operand's rows in memory run along the sum (a stored [m,
/// k], b stored [n, k]); otherwise its columns lie below each other (a stored [k, m], b stored [k, n]).
template <bool kSumsInA, bool kSumsInB>
struct TileProduct {
  using SliceA = Slice<kSumsInA ? kTileM : kTileK, kSumsInA ? kTileK : kTileM>;
  using SliceB = Slice<kSumsInB ? kTileN : kTileK, kSumsInB ? kTileK : kTileN>;
  BFloat16* shared;
  Operand a, b;
  int64_t m, n;  // the tile's first row and column
  float sums[kWarpM / 16][kWarpN / 8][4] = {};

  SHOAL_DEVICE SliceA slice_a(int step) const { return {shared + step % kStages * (kTileM * kTileK)}; }
  SHOAL_DEVICE SliceB slice_b(int step) const {
    return {shared + kStages * (kTileM * kTileK) + step % kStages * (kTileN * kTileK)};
  }
  SHOAL_DEVICE void fill(int step, int steps) const {
    if (step < steps) {
      const int64_t k = int64_t{step} * kTileK;
      slice_a(step).fill(a, kSumsInA ? m : k, kSumsInA ? k : m);
      slice_b(step).fill(b, kSumsInB ? n : k, kSumsInB ? k : n);
    }
    commit_copies();
  }

  /// count: the length of the sum.
  SHOAL_DEVICE void run(int64_t count) {
    const int steps = static_cast<int>((count + kTileK - 1) / kTileK);
    __syncthreads();  // the slices of the tile before are no longer read
    for (int step = 0; step < kStages - 1; step++) fill(step, steps);
    for (int step = 0; step < steps; step++) {
      wait_copies<kStages - 2>();
      __syncthreads();  // this step's slices are there, and those of the step before are no longer read
      fill(step + kStages - 1, steps);
      multiply(slice_a(step), slice_b(step));
    }
  }

  SHOAL_DEVICE void multiply(const SliceA& in_a, const SliceB& in_b) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
    const int first_m = warp / 2 * kWarpM, first_n = warp % 2 * kWarpN;
    // Lane 8 i + r addresses row r of the i-th of four matrices of 8 x 8: high and low halves of a 16 x 16
    // part.
    const int r = lane % 8, low = lane / 8 % 2, high = lane / 16;
    SHOAL_UNROLL
    for (int k = 0; k < kTileK; k += 16) {
      uint32_t part_a[kWarpM / 16][4];
      SHOAL_UNROLL
      for (int i = 0; i < kWarpM / 16; i++) {
        const int row = first_m + i * 16;
        if constexpr (kSumsInA) {
          load_matrices(part_a[i], in_a.at(row + low * 8 + r, k / kChunk + high));
        } else {
          load_matrices_transposed(part_a[i], in_a.at(k + high * 8 + r, row / kChunk + low));
        }
      }
      SHOAL_UNROLL
      for (int j = 0; j < kWarpN / 8; j += 2) {
        const int column = first_n + j * 8;
        uint32_t part_b[4];
        if constexpr (kSumsInB) {
          load_matrices(part_b, in_b.at(column + high * 8 + r, k / kChunk + low));
        } else {
          load_matrices_transposed(part_b, in_b.at(k + low * 8 + r, column / kChunk + high));
        }
        SHOAL_UNROLL
        for (int i = 0; i < kWarpM / 16; i++) {
          multiply_add(sums[i][j], part_a[i], part_b[0], part_b[1]);
          multiply_add(sums[i][j + 1], part_a[i], part_b[2], part_b[3]);
        }
      }
    }
  }

  /// Writes the tile to, or adds it to, the matrix c of rows x columns. pairs: two neighbours may be stored
  /// at once.
  template <class Out>
  SHOAL_DEVICE void write(Out* c, int64_t rows, int64_t columns, bool pairs, bool accumulate) const {
    const int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x / kWarp);
    const int64_t first_row = m + warp / 2 * kWarpM + lane / 4,
                  first_column = n + warp % 2 * kWarpN + lane % 4 * 2;
    SHOAL_UNROLL
    for (int i = 0; i < kWarpM / 16; i++) {
      SHOAL_UNROLL
      for (int half = 0; half < 2; half++) {
        const int64_t row = first_row + i * 16 + half * 8;
        if (row >= rows) continue;
        SHOAL_UNROLL
        for (int j = 0; j < kWarpN / 8; j++) {
          const int64_t column = first_column + j * 8;
          Out* to = c + row * columns + column;
          const float(&pair)[4] = sums[i][j];
          if (pairs) {
            if (column < columns) put<2>(to, {pair[half * 2], pair[half * 2 + 1]}, accumulate);
          } else {
            if (column < columns) put<1>(to, {pair[half * 2]}, accumulate);
            if (column + 1 < columns) put<1>(to + 1, {pair[half * 2 + 1]}, accumulate);
          }
        }
      }
    }
  }
  template <int N, class Out>
  SHOAL_DEVICE static void put(Out* to, Pack<float, N> values, bool accumulate) {
    if (accumulate) {
      const auto before = load<N>(to);
      for (int i = 0; i < N; i++) values.v[i] += before.v[i];
    }
    store<N>(to, values);
  }
};

template <class Out>
struct GroupedArgs {
  const BFloat16 *a, *b;
  Out* c;
  int64_t m, n, k;  // the one that is rows of a group: unused
  bool chunks_a, chunks_b, pairs, accumulate;
  RowGroups groups;
};

template <class Out, bool kTransposed>
__global__ void __launch_bounds__(kThreads) grouped_rows_kernel(GroupedArgs<Out> args) {
  SHOAL_DYNAMIC_SHARED(BFloat16, shared);
  const int64_t column_tiles = (args.n + kTileN - 1) / kTileN;
  int64_t tile = blockIdx.x, first_tile = 0;
  for (int g = 0; g < args.groups.count; g++) {
    const int64_t first = args.groups.first[g], rows = args.groups.first[g + 1] - first;
    const int64_t row_tiles = (rows + kTileM - 1) / kTileM, tiles = row_tiles * column_tiles;
    // Neighbouring blocks share columns of the matrix, which is the larger operand.
    for (; tile < first_tile + tiles; tile += gridDim.x) {
      const int64_t at = tile - first_tile;
      TileProduct<true, kTransposed> product{
          shared,
          {args.a + first * args.k, args.k, rows, args.k, args.chunks_a},
          {args.b + g * args.n * args.k, kTransposed ? args.k : args.n, kTransposed ? args.n : args.k,
           kTransposed ? args.k : args.n, args.chunks_b},
          at % row_tiles * kTileM,
          at / row_tiles * kTileN};
      product.run(args.k);
      product.write(args.c + first * args.n, rows, args.n, args.pairs, false);
    }
    first_tile += tiles;
  }
}

__global__ void __launch_bounds__(kThreads) grouped_reduce_kernel(GroupedArgs<float> args) {
  SHOAL_DYNAMIC_SHARED(BFloat16, shared);
  const int64_t row_tiles = (args.m + kTileM - 1) / kTileM, column_tiles = (args.n + kTileN - 1) / kTileN;
  const int64_t tiles = row_tiles * column_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles * args.groups.count; tile += gridDim.x) {
    const int64_t g = tile / tiles, at = tile % tiles;
    const int64_t first = args.groups.first[g], rows = args.groups.first[g + 1] - first;
    if (rows == 0 && args.accumulate) continue;
    TileProduct<false, false> product{shared,
                                      {args.a + first * args.m, args.m, rows, args.m, args.chunks_a},
                                      {args.b + first * args.n, args.n, rows, args.n, args.chunks_b},
                                      at % row_tiles * kTileM,
                                      at / row_tiles * kTileN};
    product.run(rows);
    product.write(args.c + g * args.m * args.n, args.m, args.n, args.pairs, args.accumulate);
  }
}

/// Blocks of kThreads, whatever the limits say about threads: fewer blocks then.
LaunchShape shape_for(Device device, int64_t tiles) {
  const LaunchLimits& limits = launch_limits();
  const int64_t allowed = std::max<int64_t>(1, limits.blocks * limits.block_threads / kThreads);
  LaunchShape shape = launch_shape(device, std::min({tiles, kBlocks, allowed}), kThreads, 1, kSharedBytes);
  shape.block = kThreads;
  return shape;
}

bool in_chunks(const void* data, int64_t ld) {
  return ld % kChunk == 0 && all_aligned({data});
}
/// Whether two neighbours may be stored at once, in each row of each group.
template <class Out>
bool in_pairs(const Out* data, int64_t ld) {
  return ld % 2 == 0 && reinterpret_cast<uintptr_t>(data) % (2 * sizeof(Out)) == 0;
}

int64_t divide_up(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}

template <class Out, bool kTransposed>
void rows_product(const Tensor& x, const Tensor& matrices, const Tensor& y, std::span<const int64_t> rows) {
  GroupedArgs<Out> args{};
  args.a = x.data<BFloat16>();
  args.k = x.size(1);
  args.n = y.size(1);
  args.c = y.data<Out>();
  args.chunks_a = in_chunks(args.a, args.k);
  args.chunks_b = in_chunks(matrices.data<BFloat16>(), kTransposed ? args.k : args.n);
  args.pairs = in_pairs(args.c, args.n);
  for_each_row_groups("grouped product", rows, x.size(0), [&](const RowGroups& groups, int64_t first_group) {
    args.b = matrices.data<BFloat16>() + first_group * args.n * args.k;
    args.groups = groups;
    int64_t tiles = 0;
    for (int g = 0; g < groups.count; g++)
      tiles += divide_up(groups.first[g + 1] - groups.first[g], kTileM) * divide_up(args.n, kTileN);
    SHOAL_LAUNCH((grouped_rows_kernel<Out, kTransposed>), shape_for(x.device(), tiles), args);
  });
}

}  // namespace

void grouped_rows_product(const Tensor& x, const Tensor& matrices, bool transposed, const Tensor& y,
                          std::span<const int64_t> rows) {
  const bool low = y.dtype() == DType::bf16;
  if (transposed)
    return low ? rows_product<BFloat16, true>(x, matrices, y, rows)
               : rows_product<float, true>(x, matrices, y, rows);
  return low ? rows_product<BFloat16, false>(x, matrices, y, rows)
             : rows_product<float, false>(x, matrices, y, rows);
}

void grouped_reduce_product(bool accumulate, const Tensor& a, const Tensor& b, const Tensor& c,
                            std::span<const int64_t> rows) {
  GroupedArgs<float> args{};
  args.a = a.data<BFloat16>();
  args.b = b.data<BFloat16>();
  args.m = a.size(1);
  args.n = b.size(1);
  args.chunks_a = in_chunks(args.a, args.m);
  args.chunks_b = in_chunks(args.b, args.n);
  args.pairs = in_pairs(c.data<float>(), args.n);
  args.accumulate = accumulate;
  for_each_row_groups("grouped product", rows, a.size(0), [&](const RowGroups& groups, int64_t first_group) {
    args.c = c.data<float>() + first_group * args.m * args.n;
    args.groups = groups;
    const int64_t tiles = groups.count * divide_up(args.m, kTileM) * divide_up(args.n, kTileN);
    SHOAL_LAUNCH(grouped_reduce_kernel, shape_for(a.device(), tiles), args);
  });
}

}  // namespace shoal::cuda
