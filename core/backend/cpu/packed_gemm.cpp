// The packed GEMM engine: blocks of A and B are copied into panels that the register tile reads
// contiguously (Goto and van de Geijn, "Anatomy of high-performance matrix multiplication", 2008).
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

constexpr int64_t kBlockK = 256;   // a panel of B (kBlockK x 48 floats) lives in L1
constexpr int64_t kBlockM = 240;   // a block of A (240 KiB in f32) lives in L2
constexpr int64_t kBlockN = 2016;  // a block of B lives in L3

template <class T>
constexpr int kPanel = kTileVectors* kLanes<T>;  // columns of one packed panel of B

/// One register tile on packed panels; columns < V * lanes only at the right edge.
template <class T, int R, int V>
[[gnu::noinline]] void packed_tile(int64_t k_count, const T* a, const T* b, T* c, int64_t ldc, int columns,
                                   bool accumulate) {
  if (columns == V * kLanes<T>) {
    tile_product<T, R, V>(k_count, a, 1, kTileRows, b, kPanel<T>, c, ldc, accumulate);
    return;
  }
  T edge[R * V * kLanes<T>];
  tile_product<T, R, V>(k_count, a, 1, kTileRows, b, kPanel<T>, edge, V * kLanes<T>, false);
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < columns; n++) {
      const T value = edge[r * V * kLanes<T> + n];
      c[r * ldc + n] = accumulate ? c[r * ldc + n] + value : value;
    }
  }
}

/// All rows of one packed block of A against one panel of B.
template <class T, int V>
void panel_product(int64_t rows, int64_t k_count, const T* a, const T* b, T* c, int64_t ldc, int columns,
                   bool accumulate) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    packed_tile<T, kTileRows, V>(k_count, a + r * k_count, b, c + r * ldc, ldc, columns, accumulate);
  }
  const T* rest = a + r * k_count;  // the last panel is padded to kTileRows
  c += r * ldc;
  int done = 0;
  const auto part = [&]<int R>() {
    if (rows - r - done < R) return;
    packed_tile<T, R, V>(k_count, rest + done, b, c + done * ldc, ldc, columns, accumulate);
    done += R;
  };
  if constexpr (kTileRows > 4) part.template operator()<4>();
  part.template operator()<2>();
  part.template operator()<1>();
}

template <class T>
void panel_product_any(int64_t rows, int64_t k_count, const T* a, const T* b, T* c, int64_t ldc, int columns,
                       bool accumulate) {
  const int vectors = (columns + kLanes<T> - 1) / kLanes<T>;
  if (vectors == 1) {
    panel_product<T, 1>(rows, k_count, a, b, c, ldc, columns, accumulate);
  } else if (vectors == 2) {
    panel_product<T, 2>(rows, k_count, a, b, c, ldc, columns, accumulate);
  } else {
    panel_product<T, kTileVectors>(rows, k_count, a, b, c, ldc, columns, accumulate);
  }
}

template <class T>
void packed_gemm_impl(const cpu::GemmCall<T>& call) {
  if (call.k == 0 && !call.accumulate) {
    for (int64_t m = 0; m < call.m; m++) std::fill_n(call.c + m * call.ldc, call.n, T{0});
  }
  if (call.m == 0 || call.n == 0 || call.k == 0) return;
  constexpr int kNr = kPanel<T>;
  const auto round_up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; };
  const int64_t k_max = std::min(kBlockK, call.k);
  static thread_local cpu::Scratch scratch;
  const int64_t a_size = round_up(std::min(kBlockM, call.m), kTileRows) * k_max;
  T* packed_a = scratch.get<T>(round_up(a_size, 64) + round_up(std::min(kBlockN, call.n), kNr) * k_max);
  T* packed_b = packed_a + round_up(a_size, 64);

  for (int64_t n0 = 0; n0 < call.n; n0 += kBlockN) {
    const int64_t n_count = std::min(kBlockN, call.n - n0);
    for (int64_t k0 = 0; k0 < call.k; k0 += kBlockK) {
      const int64_t k_count = std::min(kBlockK, call.k - k0);
      const bool accumulate = call.accumulate || k0 > 0;
      const T* b_block = call.transpose_b ? call.b + n0 * call.ldb + k0 : call.b + k0 * call.ldb + n0;
      for (int64_t m0 = 0; m0 < call.m; m0 += kBlockM) {
        const int64_t m_count = std::min(kBlockM, call.m - m0);
        if (call.transpose_a) {
          pack_straight<T, kTileRows>(packed_a, call.a + k0 * call.lda + m0, call.lda, m_count, k_count);
        } else {
          pack_transposed<T, kTileRows>(packed_a, call.a + m0 * call.lda + k0, call.lda, m_count, k_count);
        }
        for (int64_t n = 0; n < n_count; n += kNr) {
          const int columns = static_cast<int>(std::min<int64_t>(kNr, n_count - n));
          T* panel = packed_b + n * k_count;
          if (m0 > 0) {
            // Packed by the first block of rows.
          } else if (call.transpose_b) {
            pack_transposed<T, kNr>(panel, b_block + n * call.ldb, call.ldb, columns, k_count);
          } else {
            pack_straight<T, kNr>(panel, b_block + n, call.ldb, columns, k_count);
          }
          panel_product_any<T>(m_count, k_count, packed_a, panel, call.c + m0 * call.ldc + n0 + n, call.ldc,
                               columns, accumulate);
        }
      }
    }
  }
}

const bool added_f32 = cpu::packed_gemm_f32.add(DeviceType::cpu, &packed_gemm_impl<float>, kIsaLevel);
const bool added_f64 = cpu::packed_gemm_f64.add(DeviceType::cpu, &packed_gemm_impl<double>, kIsaLevel);
SHOAL_KERNELS_END
