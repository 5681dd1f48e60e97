// CUDA kernels that make fp8 operands (core/ops/fp8.h) and turn them back into bf16. A block takes a tile of
// 128 x 128 through shared memory, so that one read of x serves the operand along its rows and the transposed
// one; each warp looks for the scale of a vector and rounds it.
#include "core/backend/cuda/fp8.h"

#include "core/backend/cuda/groups.h"
#include "core/backend/cuda/map.h"
#include "core/ops/fp8_linear.h"

namespace shoal::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kFp8Block), kPerLane = kTile / static_cast<int>(kWarp);
constexpr int64_t kChunk = 8 * 1024;  // elements that a block looks through for the largest one

/// |value|, or 0 when it is not finite.
SHOAL_DEVICE float finite_size(float value) {
  const float size = fabsf(value);
  return size <= 3.402823466e38F ? size : 0.0F;
}

template <class T>
struct LargestArgs {
  const T* x;
  int64_t width;
  unsigned* bits;  // of the largest finite |x| of each group, zeros: they are in the order of the numbers
  RowGroups groups;
};

template <class T>
__global__ void fp8_largest_kernel(LargestArgs<T> args) {
  SHOAL_SHARED(float, scratch, BlockMax<float>::kScratch);
  BlockMax<float> block_max(scratch);
  int64_t chunk = blockIdx.x, first_chunk = 0;
  for (int g = 0; g < args.groups.count; g++) {
    const int64_t begin = args.groups.first[g] * args.width, end = args.groups.first[g + 1] * args.width;
    const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
    for (; chunk < first_chunk + chunks; chunk += gridDim.x) {
      const int64_t from = begin + (chunk - first_chunk) * kChunk,
                    to = from + kChunk < end ? from + kChunk : end;
      float most = 0;
      for (int64_t i = from + threadIdx.x; i < to; i += blockDim.x) {
        const float size = finite_size(static_cast<float>(args.x[i]));
        most = size > most ? size : most;
      }
      most = block_max(most, 0.0F);
      if (threadIdx.x == 0) atomicMax(&args.bits[g], std::bit_cast<unsigned>(most));
    }
    first_chunk += chunks;
  }
}

struct ScaleOfBits {
  static constexpr int kPack = 1;
  float* scales;
  Fp8Format format;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    scales[i] = fp8_scale(scales[i], format);
  }
};

/// One of the operands that a launch fills, from the matrix of a group on.
struct Side {
  uint8_t* codes;  // null: not wanted
  float* scales;
  Fp8Scales kind;
  int pad;

  /// outer, sum: of the matrix that is done.
  SHOAL_DEVICE void next_group(int64_t outer, int64_t sum) {
    if (codes == nullptr) return;
    codes += outer * sum;
    scales += fp8_num_scales(kind, outer, sum);
  }
};
template <class T>
struct QuantizeArgs {
  const T* x;
  int64_t width;
  bool packs;  // x may be read in packs
  Fp8Format format;
  Side along_rows, along_columns;
  RowGroups groups;
};

/// A tile of x in shared memory, zeros where x ends. Columns of it are in different banks.
template <class T>
struct Tile {
  static constexpr int kPitch = kTile + static_cast<int>(4 / sizeof(T));
  static constexpr size_t kBytes = sizeof(T) * kTile * kPitch;
  T* data;

  /// rows, columns: of x from (row, column) on. Returns the largest finite |x| that this thread has read.
  template <int N>
  SHOAL_DEVICE float fill(const T* x, int64_t width, int64_t row, int64_t column, int64_t rows,
                          int64_t columns) const {
    float most = 0;
    for (int i = static_cast<int>(threadIdx.x) * N; i < kTile * kTile;
         i += static_cast<int>(blockDim.x) * N) {
      const int r = i / kTile, c = i % kTile;
      Pack<T, N> values{};
      if (r < rows && c < columns)
        values = *reinterpret_cast<const Pack<T, N>*>(x + (row + r) * width + column + c);
      for (int j = 0; j < N; j++) {
        data[r * kPitch + c + j] = values.v[j];
        const float size = finite_size(static_cast<float>(values.v[j]));
        most = size > most ? size : most;
      }
    }
    return most;
  }
  /// Element i of a row, or of a column when kTransposed.
  template <bool kTransposed>
  SHOAL_DEVICE float at(int line, int i) const {
    return static_cast<float>(kTransposed ? data[i * kPitch + line] : data[line * kPitch + i]);
  }
};

/// Where a tile lies in the matrix of a group, as an operand sees it.
struct Place {
  int64_t outer, sum;  // of the matrix
  int64_t first_outer, first_sum;
};

/// Rounds the lines of a tile to an operand. shared_scale: of the tile, or of the matrix.
template <bool kTransposed, class T>
SHOAL_DEVICE void write_side(const Tile<T>& tile, const Side& side, const Place& at, Fp8Format format,
                             float shared_scale) {
  const int lane = static_cast<int>(threadIdx.x % kWarp), warps = static_cast<int>(blockDim.x / kWarp);
  const bool vector = side.kind == Fp8Scales::vector;
  const int64_t lines = (vector ? fp8_round_up(at.outer, 4) : at.outer) - at.first_outer;
  float* scale_to = side.scales + fp8_scale_index(side.kind, at.outer, at.sum, at.first_outer, at.first_sum);
  if (side.kind == Fp8Scales::block && threadIdx.x == 0) *scale_to = shared_scale;
  for (int line = static_cast<int>(threadIdx.x / kWarp); line < kTile && line < lines; line += warps) {
    float values[kPerLane], most = 0;
    SHOAL_UNROLL
    for (int j = 0; j < kPerLane; j++) {
      values[j] = tile.template at<kTransposed>(line, lane + j * static_cast<int>(kWarp));
      const float size = finite_size(values[j]);
      most = size > most ? size : most;
    }
    float scale = shared_scale;
    if (vector) {
      scale = fp8_scale(warp_max(most), format);
      if (lane == 0) scale_to[line] = scale;
    }
    if (at.first_outer + line >= at.outer) continue;
    const float inverse = fp8_inverse(scale);
    uint8_t* codes = side.codes + (at.first_outer + line) * at.sum + at.first_sum;
    SHOAL_UNROLL
    for (int j = 0; j < kPerLane; j++) {
      const int i = lane + j * static_cast<int>(kWarp);
      if (at.first_sum + i < at.sum) codes[i] = to_fp8(values[j] * inverse, format);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) fp8_quantize_kernel(QuantizeArgs<T> args) {
  SHOAL_DYNAMIC_SHARED(T, shared);
  SHOAL_SHARED(float, scratch, BlockMax<float>::kScratch);
  BlockMax<float> block_max(scratch);
  const Tile<T> tile{shared};
  const int column_tiles = static_cast<int>(fp8_blocks(args.width));
  Side along_rows = args.along_rows, along_columns = args.along_columns;
  // The operands that are wanted agree about what is not vectors.
  const bool by_rows = along_rows.codes != nullptr, by_columns = along_columns.codes != nullptr;
  const Fp8Scales kind = by_rows ? along_rows.kind : along_columns.kind;
  int number = static_cast<int>(blockIdx.x), first_tile = 0;
  for (int g = 0; g < args.groups.count; g++) {
    const int64_t first = args.groups.first[g], rows = args.groups.first[g + 1] - first;
    const int64_t padded = fp8_round_up(rows, along_columns.pad);
    const int tiles = static_cast<int>(fp8_blocks(rows)) * column_tiles;
    for (; number < first_tile + tiles; number += static_cast<int>(gridDim.x)) {
      const int64_t row = int64_t{(number - first_tile) / column_tiles} * kTile,
                    column = int64_t{(number - first_tile) % column_tiles} * kTile;
      __syncthreads();  // the tile before is no longer read
      const float most = args.packs ? tile.template fill<kPack<T>>(args.x, args.width, first + row, column,
                                                                   rows - row, args.width - column)
                                    : tile.template fill<1>(args.x, args.width, first + row, column,
                                                            rows - row, args.width - column);
      __syncthreads();
      float scale = 0;
      if (kind == Fp8Scales::block) scale = fp8_scale(block_max(most, 0.0F), args.format);
      if (kind == Fp8Scales::matrix) scale = by_rows ? *along_rows.scales : *along_columns.scales;
      if (by_rows) write_side<false>(tile, along_rows, {rows, args.width, row, column}, args.format, scale);
      if (by_columns)
        write_side<true>(tile, along_columns, {args.width, padded, column, row}, args.format, scale);
    }
    first_tile += tiles;
    along_rows.next_group(rows, args.width);
    along_columns.next_group(args.width, padded);
  }
}

template <class F>
void for_type(DType dtype, const char* where, const F& f) {
  SHOAL_CHECK(dtype == DType::f32 || dtype == DType::bf16, where, ": expected x of f32 or bf16, got ", dtype);
  if (dtype == DType::f32) return f.template operator()<float>();
  f.template operator()<BFloat16>();
}

void scales_impl(const Tensor& x, std::span<const int64_t> rows, Fp8Format format, const Tensor& scales) {
  const char* where = "fp8_scales";
  SHOAL_CHECK(x.dims() == 2 && scales.numel() == static_cast<int64_t>(rows.size()), where,
              ": expected a matrix and ", rows.size(), " scales, got ", x.shape(), " and ", scales.shape());
  scales.set_zero();
  for_type(x.dtype(), where, [&]<class T>() {
    LargestArgs<T> args{x.data<T>(), x.size(1), nullptr, {}};
    for_each_row_groups(where, rows, x.size(0), [&](const RowGroups& groups, int64_t first_group) {
      args.groups = groups;
      args.bits = reinterpret_cast<unsigned*>(scales.data<float>() + first_group);
      int64_t chunks = 0;
      for (int g = 0; g < groups.count; g++)
        chunks += ((groups.first[g + 1] - groups.first[g]) * args.width + kChunk - 1) / kChunk;
      SHOAL_LAUNCH(fp8_largest_kernel<T>, launch_shape(x.device(), chunks, kThreads), args);
    });
  });
  map(x.device(), scales.numel(), true, ScaleOfBits{scales.data<float>(), format});
}

Side side_of(const char* where, const Fp8Operand& operand, size_t groups) {
  if (!operand) return {nullptr, nullptr, Fp8Scales::matrix, 1};
  SHOAL_CHECK(operand.matrices.size() == groups, where, ": expected an operand of ", groups, " groups, got ",
              operand.matrices.size());
  return {operand.codes.data<uint8_t>(), operand.scales.data<float>(), operand.kind,
          static_cast<int>(operand.pad)};
}
/// From the matrix of a group on.
Side from_group(Side side, const Fp8Operand& operand, int64_t group) {
  if (!operand) return side;
  side.codes += operand.matrices[static_cast<size_t>(group)].codes;
  side.scales += operand.matrices[static_cast<size_t>(group)].scales;
  return side;
}

void quantize_impl(const Tensor& x, std::span<const int64_t> rows, const Fp8Operand& along_rows,
                   const Fp8Operand& along_columns) {
  const char* where = "fp8_quantize";
  SHOAL_CHECK(x.dims() == 2, where, ": expected a matrix, got ", x.shape());
  if (!along_rows && !along_columns) return;
  for_type(x.dtype(), where, [&]<class T>() {
    QuantizeArgs<T> args{};
    args.x = x.data<T>();
    args.width = x.size(1);
    args.packs = args.width % kPack<T> == 0 && all_aligned({args.x});
    args.format = along_rows ? along_rows.format : along_columns.format;
    const Side by_rows = side_of(where, along_rows, rows.size()),
               by_columns = side_of(where, along_columns, rows.size());
    for_each_row_groups(where, rows, x.size(0), [&](const RowGroups& groups, int64_t first_group) {
      args.groups = groups;
      args.along_rows = from_group(by_rows, along_rows, first_group);
      args.along_columns = from_group(by_columns, along_columns, first_group);
      int64_t tiles = 0;
      for (int g = 0; g < groups.count; g++)
        tiles += fp8_blocks(groups.first[g + 1] - groups.first[g]) * fp8_blocks(args.width);
      SHOAL_CHECK(tiles <= INT32_MAX, where, ": ", tiles, " blocks of 128 x 128 of ", x.shape(),
                  ", expected at most 2^31");
      SHOAL_LAUNCH(fp8_quantize_kernel<T>, launch_shape(x.device(), tiles, kThreads, 1, Tile<T>::kBytes),
                   args);
    });
  });
}

struct Number {
  static constexpr int kPack = cuda::kPack<BFloat16>;
  const uint8_t* codes;
  const float* scales;
  BFloat16* to;
  Fp8Format format;
  Fp8Scales kind;
  int64_t outer, sum;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const auto stored = *reinterpret_cast<const Pack<uint8_t, N>*>(codes + row * sum + column);
    const float scale = scales[fp8_scale_index(kind, outer, sum, row, column)];  // the same for all N
    Pack<float, N> values;
    for (int j = 0; j < N; j++) values.v[j] = from_fp8(stored.v[j], format) * scale;
    store<N>(to + row * sum + column, values);
  }
};

[[maybe_unused]] const bool added[] = {
    fp8_scales.add(DeviceType::cuda, &scales_impl),
    fp8_quantize.add(DeviceType::cuda, &quantize_impl),
};

}  // namespace

Tensor fp8_numbers(const Fp8Operand& operand) {
  const Tensor out = Tensor::empty(operand.codes.shape(), DType::bf16, operand.codes.device());
  for (const Fp8Matrix& m : operand.matrices) {
    const Number body{operand.codes.data<uint8_t>() + m.codes,
                      operand.scales.data<float>() + m.scales,
                      out.data<BFloat16>() + m.codes,
                      operand.format,
                      operand.kind,
                      m.outer,
                      m.sum};
    map_rows(out.device(), m.outer, m.sum, all_aligned({body.codes, body.to}), body);
  }
  return out;
}

}  // namespace shoal::cuda
