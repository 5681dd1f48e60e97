// The tiled GEMM engine. The larger operand is read where it lies, whichever way it is stored:
//   B stored [k, n]:  a tile holds rows of C; A gives single elements, rows of B give vectors.
//   B stored [n, k]:  a tile holds columns of C: B gives single elements and A the vectors, for which blocks
//   of
//                     A are turned into panels (Goto and van de Geijn, "Anatomy of high-performance matrix
//                     multiplication", 2008) unless A is stored [k, m]. B is a weight here and A its few rows
//                     of activations: packing the weight instead would cost as much as multiplying by it.
// An element of C is summed in ascending k with a carry to memory every kBlockK, whatever m and n are: how a
// product is cut into rows and columns never changes its bits.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/backend/cpu/gemm/engine.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/gemm_tile.inc"

constexpr int64_t kBlockK = 512;     // a panel of kBlockK x kTileVectors vectors stays in L2
constexpr int64_t kBlockRows = 192;  // rows of A turned at a time (384 KiB of f32); a multiple of every panel

constexpr int64_t kManyRows = 256;  // rows of C that make copying a panel of B worth it

template <class T>
constexpr int kPanel = kTileVectors* kLanes<T>;  // columns of one panel

/// A product of single elements x(i, k) = x[i * row_stride + k * k_stride] and vectors of w, whose row k is
/// w + k * ldw: sum(i, j) over k < k_count, for j < columns.
template <class T>
struct Panel {
  int64_t k_count;
  const T* x;
  int64_t row_stride, k_stride;
  const T* w;
  int64_t ldw;
  int columns;
  bool accumulate;
};

/// Result element (i, j) goes to c[i * ldc + j].
template <class T, int R, int V>
[[gnu::noinline]] void straight_tile(const Panel<T>& p, int64_t i, T* c, int64_t ldc) {
  const T* x = p.x + i * p.row_stride;
  if (p.columns == V * kLanes<T>) {
    tile_product<T, R, V>(p.k_count, x, p.row_stride, p.k_stride, p.w, p.ldw, c, ldc, p.accumulate);
    return;
  }
  T edge[R * V * kLanes<T>];
  tile_product<T, R, V>(p.k_count, x, p.row_stride, p.k_stride, p.w, p.ldw, edge, V * kLanes<T>, false);
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < p.columns; n++) {
      const T value = edge[r * V * kLanes<T> + n];
      c[r * ldc + n] = p.accumulate ? c[r * ldc + n] + value : value;
    }
  }
}

/// Result element (i, j) goes to c[j * ldc + i]: R is a power of two, so that interleaving turns the tile.
template <class T, int R, int V>
[[gnu::noinline]] void turned_tile(const Panel<T>& p, int64_t i, T* c, int64_t ldc) {
  constexpr int kL = kLanes<T>;
  T tile[R * V * kL];
  tile_product<T, R, V>(p.k_count, p.x + i * p.row_stride, p.row_stride, p.k_stride, p.w, p.ldw, tile, V * kL,
                        false);
#pragma GCC unroll 4
  for (int v = 0; v < V; v++) {
    Vector<T> square[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) square[r] = load(tile + (r * V + v) * kL);
    rotate_rows<T, R>(square);
    const int count = std::min(kL, p.columns - v * kL);
    const T* from = reinterpret_cast<const T*>(square);
    for (int j = 0; j < count; j++, from += R) {
      T* to = c + (v * kL + j) * ldc;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) to[r] = p.accumulate ? to[r] + from[r] : from[r];
    }
  }
}

template <class T, int V, bool Turned>
void panel_rows(const Panel<T>& p, int64_t rows, T* c, int64_t ldc) {
  int64_t i = 0;
  const auto tiles = [&]<int R>() {
    for (; rows - i >= R; i += R) {
      if constexpr (Turned) {
        turned_tile<T, R, V>(p, i, c + i, ldc);
      } else {
        straight_tile<T, R, V>(p, i, c + i * ldc, ldc);
      }
    }
  };
  tiles.template operator()<kTileRows>();
  if constexpr (kTileRows > 4) tiles.template operator()<4>();
  tiles.template operator()<2>();
  tiles.template operator()<1>();
}

template <class T, bool Turned>
void panel_product(const Panel<T>& p, int64_t rows, T* c, int64_t ldc) {
  const int vectors = (p.columns + kLanes<T> - 1) / kLanes<T>;
  if (vectors == 1) {
    panel_rows<T, 1, Turned>(p, rows, c, ldc);
  } else if (vectors == 2) {
    panel_rows<T, 2, Turned>(p, rows, c, ldc);
  } else {
    panel_rows<T, kTileVectors, Turned>(p, rows, c, ldc);
  }
}

/// `columns` columns of `w` as whole vectors. In place, or copied to `copy`: at an edge with zeros behind,
/// because a vector may not reach beyond the matrix, and for many rows of C, because rows of w that lie a
/// power of two apart share few sets of a cache.
template <class T>
void set_vectors(Panel<T>& p, const T* w, int64_t ldw, int columns, int64_t m, T* copy) {
  p.columns = columns;
  p.w = w;
  p.ldw = ldw;
  if (columns % kLanes<T> == 0 && m < kManyRows) return;
  pack_straight<T, kPanel<T>>(copy, w, ldw, columns, p.k_count);
  p.w = copy;
  p.ldw = kPanel<T>;
}

/// B stored [k, n].
template <class T>
void straight_product(const cpu::GemmCall<T>& call) {
  static thread_local cpu::Scratch scratch;
  T* copy = scratch.get<T>(kPanel<T> * std::min(kBlockK, call.k));
  // Numbers of a column of A lie far apart: blocks of A stay in L2 while all panels of B pass.
  constexpr int64_t kInL2 = (512 << 10) / sizeof(T);
  const int64_t block = call.transpose_a ? std::max(kManyRows, kInL2 / std::min(kBlockK, call.k)) : call.m;
  for (int64_t k0 = 0; k0 < call.k; k0 += kBlockK) {
    Panel<T> p{};
    p.k_count = std::min(kBlockK, call.k - k0);
    p.row_stride = call.transpose_a ? 1 : call.lda;
    p.k_stride = call.transpose_a ? call.lda : 1;
    p.accumulate = call.accumulate || k0 > 0;
    for (int64_t m = 0; m < call.m; m += block) {
      p.x = call.a + m * p.row_stride + k0 * p.k_stride;
      for (int64_t n = 0; n < call.n; n += kPanel<T>) {
        const int columns = static_cast<int>(std::min<int64_t>(kPanel<T>, call.n - n));
        set_vectors(p, call.b + k0 * call.ldb + n, call.ldb, columns, call.m, copy);
        panel_product<T, false>(p, std::min(block, call.m - m), call.c + m * call.ldc + n, call.ldc);
      }
    }
  }
}

/// B stored [n, k].
template <class T>
void turned_product(const cpu::GemmCall<T>& call) {
  constexpr int kNr = kPanel<T>;
  static thread_local cpu::Scratch scratch;
  const int64_t block = std::min(kBlockRows, (call.m + kNr - 1) / kNr * kNr);
  T* panels = scratch.get<T>(block * std::min(kBlockK, call.k));
  for (int64_t k0 = 0; k0 < call.k; k0 += kBlockK) {
    Panel<T> p{};
    p.k_count = std::min(kBlockK, call.k - k0);
    p.k_stride = 1;
    p.row_stride = call.ldb;
    p.accumulate = call.accumulate || k0 > 0;
    for (int64_t m0 = 0; m0 < call.m; m0 += kBlockRows) {
      const int64_t rows = std::min(kBlockRows, call.m - m0);
      if (!call.transpose_a)
        pack_transposed<T, kNr>(panels, call.a + m0 * call.lda + k0, call.lda, rows, p.k_count);
      for (int64_t n = 0; n < call.n; n += kTileRows) {
        p.x = call.b + n * call.ldb + k0;
        for (int64_t m = 0; m < rows; m += kNr) {
          const int columns = static_cast<int>(std::min<int64_t>(kNr, rows - m));
          if (call.transpose_a) {
            set_vectors(p, call.a + k0 * call.lda + m0 + m, call.lda, columns, 0, panels);
          } else {
            p.columns = columns;
            p.w = panels + m * p.k_count;
            p.ldw = kNr;
          }
          panel_product<T, true>(p, std::min<int64_t>(kTileRows, call.n - n),
                                 call.c + (m0 + m) * call.ldc + n, call.ldc);
        }
      }
    }
  }
}

template <class T>
void tiled_gemm_impl(const cpu::GemmCall<T>& call) {
  if (call.k == 0 && !call.accumulate) {
    for (int64_t m = 0; m < call.m; m++) std::fill_n(call.c + m * call.ldc, call.n, T{0});
  }
  if (call.m == 0 || call.n == 0 || call.k == 0) return;
  if (call.transpose_b) {
    turned_product(call);
  } else {
    straight_product(call);
  }
}

const bool added_f32 = cpu::tiled_gemm_f32.add(DeviceType::cpu, &tiled_gemm_impl<float>, kIsaLevel);
const bool added_f64 = cpu::tiled_gemm_f64.add(DeviceType::cpu, &tiled_gemm_impl<double>, kIsaLevel);
SHOAL_KERNELS_END
