// CPU kernels of core/ops/bf16_linear.h. A packed matrix [outputs, inputs] is a row of panels of kPanelWidth
// outputs; a panel holds, for each pair of inputs, the pairs of its outputs: word (pair, output) at
// pair * kPanelWidth + output. Activations need no packing: a row already holds its pairs.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/scratch.h"
#include "core/base/threads.h"
#include "core/ops/bf16_linear.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/bf16_tile.inc"

constexpr int kPanelWidth = kPackRows;  // outputs of a packed panel, whatever the instruction set
constexpr int64_t kBlockInputs = 2048;  // summed in registers; a panel of this depth (256 KiB) stays in L2
constexpr int64_t kBlockRows = 252;     // rows of x per task; multiple of every kPairRows
constexpr int64_t kReduceRows = 512;    // rows summed in registers by the weight gradient
constexpr int64_t kStripRows = 48;      // its rows made from one packed strip; multiple of every kPairRows

int64_t divide_up(int64_t n, int64_t by) {
  return (n + by - 1) / by;
}

/// Words of one packed matrix.
int64_t matrix_words(int64_t outputs, int64_t inputs) {
  return divide_up(outputs, kPanelWidth) * kPanelWidth * divide_up(inputs, 2);
}

bool packs_in_order_impl(const Shape&) {
  return false;
}
int64_t packed_size_impl(int64_t groups, int64_t outputs, int64_t inputs) {
  return 2 * groups * matrix_words(outputs, inputs);
}

/// The next to read a copy is the next step, long after it has left the caches: written without reading its
/// lines. `to` is aligned to a vector; order_stores() before another thread reads.
[[gnu::always_inline]] inline void store_past_caches(uint32_t* to, Words words) {
#if (defined(SHOAL_ISA_avx512) || defined(SHOAL_ISA_avx512_bf16)) && defined(__x86_64__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), reinterpret_cast<__m512i>(words));
#else
  store<uint32_t>(to, words);
#endif
}
void order_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/// Rows [n0, n0 + count) of one weight [N, K], count <= kPanelWidth, into one panel of the forward copy.
void pack_forward(const float* rows, int64_t count, int64_t k_count, uint32_t* panel) {
  constexpr int kChunk = 2 * kFloats;  // inputs per transposed square
  const int64_t pairs = divide_up(k_count, 2);
  for (int64_t j = 0; j < kPanelWidth; j += kFloats) {
    int64_t k = 0;
    for (; k + kChunk <= k_count; k += kChunk) {
      Words square[kFloats];
      for (int i = 0; i < kFloats; i++)
        square[i] = j + i < count ? rounded_pairs(rows + (j + i) * k_count + k) : Words{};
      transpose_square<uint32_t>(square);
      for (int p = 0; p < kFloats; p++) store_past_caches(panel + (k / 2 + p) * kPanelWidth + j, square[p]);
    }
    for (int64_t p = k / 2; p < pairs; p++) {
      for (int64_t i = j; i < j + kFloats; i++) {
        const float* from = rows + i * k_count + 2 * p;
        const bool low = i < count, high = low && 2 * p + 1 < k_count;
        panel[p * kPanelWidth + i] = pair_word(BFloat16(low ? from[0] : 0), BFloat16(high ? from[1] : 0));
      }
    }
  }
}

/// Rows n and n + 1 (null: zeros) of one weight [N, K] as pair `pair` of the backward copy, whose panels are
/// `panel_words` apart.
void pack_backward(const float* low, const float* high, int64_t k_count, int64_t pair, int64_t panel_words,
                   uint32_t* to) {
  for (int64_t k0 = 0; k0 < k_count; k0 += kPanelWidth, to += panel_words) {
    uint32_t* words = to + pair * kPanelWidth;
    const int64_t count = std::min<int64_t>(kPanelWidth, k_count - k0);
    int64_t k = 0;
    for (; k + kFloats <= count; k += kFloats) {
      Words pair = rounded_words(low + k0 + k);
      if (high != nullptr) pair |= rounded_words(high + k0 + k) << 16U;
      store_past_caches(words + k, pair);
    }
    for (; k < count; k++)
      words[k] = pair_word(BFloat16(low[k0 + k]), BFloat16(high != nullptr ? high[k0 + k] : 0));
    for (; k < kPanelWidth; k++) words[k] = 0;
  }
}

void pack_rows_impl(const Tensor& weight, const PackedWeight& to, int64_t first_row, int64_t last_row) {
  const int dims = to.shape.dims();
  SHOAL_CHECK(dims == 2 || dims == 3, "pack_rows: expected [N, K] or [G, N, K], got ", to.shape);
  const int64_t groups = dims == 3 ? to.shape[0] : 1, n_count = to.shape[-2], k_count = to.shape[-1];
  const int64_t g = first_row / n_count, n0 = first_row % n_count, count = last_row - first_row;
  SHOAL_CHECK(weight.numel() == to.shape.numel(), "pack_rows: copies of a weight ", to.shape,
              " do not fit a weight ", weight.shape());
  for (const auto& [copy, expected] : {std::pair{to.forward, packed_size_impl(groups, n_count, k_count)},
                                       {to.backward, packed_size_impl(groups, k_count, n_count)}}) {
    SHOAL_CHECK(!copy || reinterpret_cast<uintptr_t>(copy.data<BFloat16>()) % kVectorBytes == 0,
                "pack_rows: a copy is not aligned to ", kVectorBytes, " bytes");
    SHOAL_CHECK(!copy || copy.numel() == expected, "pack_rows: a copy of a weight ", weight.shape(), " has ",
                expected, " elements, got ", copy.numel());
  }
  SHOAL_CHECK(n0 % kPanelWidth == 0 && count >= 0 && count <= kPanelWidth && n0 + count <= n_count,
              "pack_rows: rows [", first_row, ", ", last_row, ") are no block of ", to.shape);
  const int64_t forward_words = matrix_words(n_count, k_count),
                backward_words = matrix_words(k_count, n_count);
  const int64_t n_pairs = divide_up(n_count, 2);
  const float* rows = weight.data<float>() + first_row * k_count;
  if (to.forward) {
    pack_forward(rows, count, k_count,
                 reinterpret_cast<uint32_t*>(to.forward.data<BFloat16>()) + g * forward_words +
                     n0 * divide_up(k_count, 2));
  }
  if (!to.backward) return order_stores();
  auto* backward = reinterpret_cast<uint32_t*>(to.backward.data<BFloat16>()) + g * backward_words;
  for (int64_t n = 0; n < count; n += 2) {
    pack_backward(rows + n * k_count, n + 1 < count ? rows + (n + 1) * k_count : nullptr, k_count,
                  (n0 + n) / 2, n_pairs * kPanelWidth, backward);
  }
  order_stores();
}

/// One group's product y[m, outputs] = x[m, inputs] * M^T on one thread, for some of the panels.
template <class Out>
struct RowsProduct {
  int64_t m, outputs, inputs;  // inputs even
  const BFloat16* x;
  int64_t ldx;
  const uint32_t* packed;
  Out* y;

  void run(int64_t row, int64_t rows, int64_t first_panel, int64_t last_panel) const {
    const int64_t pairs = inputs / 2;
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
      const int64_t column = panel * kPanelWidth;
      const int columns = static_cast<int>(std::min<int64_t>(kPanelWidth, outputs - column));
      const uint32_t* w = packed + column * pairs;
      Out* to = y + row * outputs + column;
      if (inputs <= kBlockInputs) {
        pair_panel(rows, pairs, x + row * ldx, ldx, 2, w, kPanelWidth, to, outputs, columns, false);
        continue;
      }
      static thread_local cpu::Scratch scratch;
      float* sums = scratch.get<float>(kBlockRows * kPanelWidth);
      for (int64_t k = 0; k < inputs; k += kBlockInputs) {
        pair_panel(rows, std::min(kBlockInputs, inputs - k) / 2, x + row * ldx + k, ldx, 2,
                   w + k / 2 * kPanelWidth, kPanelWidth, sums, kPanelWidth, columns, k > 0);
      }
      for (int64_t r = 0; r < rows; r++) {
        for (int c = 0; c < columns; c++) to[r * outputs + c] = sums[r * kPanelWidth + c];
      }
    }
  }
};

/// x with its rows padded to an even length when they are odd: pairs must not reach into the next row.
const BFloat16* even_rows(const Tensor& x, int64_t& ldx) {
  const int64_t width = x.row_size();
  ldx = width + width % 2;
  if (ldx == width) return x.data<BFloat16>();
  static thread_local cpu::Scratch scratch;
  const BFloat16* from = x.data<BFloat16>();
  BFloat16* to = scratch.get<BFloat16>(x.num_rows() * ldx);
  for (int64_t r = 0; r < x.num_rows(); r++) {
    std::copy_n(from + r * width, width, to + r * ldx);
    to[r * ldx + width] = BFloat16();
  }
  return to;
}

template <class Out>
void packed_rows(const Tensor& x, const Tensor& packed, const Tensor& y, std::span<const int64_t> rows) {
  RowsProduct<Out> product{};
  product.x = even_rows(x, product.ldx);
  product.inputs = product.ldx;
  product.outputs = y.row_size();
  product.packed = reinterpret_cast<const uint32_t*>(packed.data<BFloat16>());
  product.y = y.data<Out>();
  const int64_t panels = divide_up(product.outputs, kPanelWidth);
  int64_t row_blocks = 0;
  for (const int64_t count : rows) row_blocks += divide_up(count, kBlockRows);
  // Few blocks of rows: each is cut into runs of panels, so that every thread has work.
  const int64_t wanted = num_threads() == 1 ? 1 : 4 * num_threads();
  const int64_t cuts = row_blocks == 0 ? 1 : std::clamp<int64_t>(divide_up(wanted, row_blocks), 1, panels);
  struct Task {
    RowsProduct<Out> product;
    int64_t row, rows, first_panel, last_panel;
  };
  static thread_local std::vector<Task> list;
  list.clear();
  for (const int64_t count : rows) {
    product.m = count;
    for (int64_t row = 0; row < count; row += kBlockRows) {
      for (int64_t c = 0; c < cuts; c++) {
        list.push_back(
            {product, row, std::min(kBlockRows, count - row), panels * c / cuts, panels * (c + 1) / cuts});
      }
    }
    product.x += count * product.ldx;
    product.y += count * product.outputs;
    product.packed += matrix_words(product.outputs, product.inputs);
  }
  const std::vector<Task>& tasks = list;  // the workers need this thread's list, not their own
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&tasks](int64_t i) {
    const Task& t = tasks[static_cast<size_t>(i)];
    t.product.run(t.row, t.rows, t.first_panel, t.last_panel);
  });
}

int64_t total_rows(const char* where, std::span<const int64_t> rows, int64_t expected) {
  int64_t total = 0;
  for (const int64_t count : rows) {
    SHOAL_CHECK(count >= 0, where, ": expected at least 0 rows per group, got ", count);
    total += count;
  }
  SHOAL_CHECK(total == expected, where, ": rows per group sum to ", total, ", but the operand has ",
              expected);
  return total;
}

void packed_gemm_rows_impl(PackedUse, const Tensor& x, const Tensor& packed, const Tensor& y,
                           std::span<const int64_t> rows) {
  const char* where = "packed_gemm_rows";
  SHOAL_CHECK(x.dims() == 2 && y.dims() == 2 && x.size(0) == y.size(0) && x.dtype() == DType::bf16 &&
                  packed.numel() == packed_size_impl(static_cast<int64_t>(rows.size()), y.size(1), x.size(1)),
              where, ": expected bf16 x [R, I], y [R, O] and ", rows.size(),
              " packed matrices [O, I], got x ", x.dtype(), ' ', x.shape(), ", y ", y.shape(), " and ",
              packed.numel(), " packed elements");
  total_rows(where, rows, x.size(0));
  if (y.dtype() == DType::bf16) return packed_rows<BFloat16>(x, packed, y, rows);
  SHOAL_CHECK(y.dtype() == DType::f32, where, ": expected y of bf16 or f32, got ", y.dtype());
  packed_rows<float>(x, packed, y, rows);
}

/// One group's c[n0 .. n1, k] (+)= a[m, n]^T * b[m, k] on one thread.
struct ReduceProduct {
  int64_t m, n_count, k_count;
  const BFloat16 *a, *b;
  float* c;
  bool accumulate;

  void run(int64_t n0, int64_t n1) const {
    if (m == 0 && !accumulate) std::fill(c + n0 * k_count, c + n1 * k_count, 0.0F);
    const int64_t panels = divide_up(k_count, kPanelWidth);
    static thread_local cpu::Scratch scratch;
    const int64_t max_pairs = divide_up(std::min(m, kReduceRows), 2);
    auto* b_pairs = scratch.get<uint32_t>(max_pairs * kPanelWidth * panels + max_pairs * kStripRows);
    uint32_t* a_pairs = b_pairs + max_pairs * kPanelWidth * panels;
    for (int64_t m0 = 0; m0 < m; m0 += kReduceRows) {
      const int64_t rows = std::min(kReduceRows, m - m0), pairs = divide_up(rows, 2);
      for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t k = panel * kPanelWidth;
        pair_rows(b + m0 * k_count + k, k_count, rows, std::min<int64_t>(kPanelWidth, k_count - k),
                  b_pairs + panel * pairs * kPanelWidth, kPanelWidth);
      }
      for (int64_t n = n0; n < n1; n += kStripRows) {
        const int64_t count = std::min(kStripRows, n1 - n);
        pair_rows(a + m0 * n_count + n, n_count, rows, count, a_pairs, kStripRows);
        for (int64_t panel = 0; panel < panels; panel++) {
          const int64_t k = panel * kPanelWidth;
          pair_panel(count, pairs, reinterpret_cast<const BFloat16*>(a_pairs), 2, 2 * kStripRows,
                     b_pairs + panel * pairs * kPanelWidth, kPanelWidth, c + n * k_count + k, k_count,
                     static_cast<int>(std::min<int64_t>(kPanelWidth, k_count - k)), accumulate || m0 > 0);
        }
      }
    }
  }
};

void bf16_gemm_reduce_impl(bool accumulate, const Tensor& a, const Tensor& b, const Tensor& c,
                           std::span<const int64_t> rows) {
  const char* where = "bf16_gemm_reduce";
  const auto groups = static_cast<int64_t>(rows.size());
  SHOAL_CHECK(a.dims() == 2 && b.dims() == 2 && a.size(0) == b.size(0) && a.dtype() == DType::bf16 &&
                  b.dtype() == DType::bf16 && c.numel() == groups * a.size(1) * b.size(1),
              where, ": expected bf16 [R, N]^T x [R, K] -> f32 [", groups, ", N, K], got ", a.dtype(), ' ',
              a.shape(), "^T x ", b.dtype(), ' ', b.shape(), " -> ", c.shape());
  total_rows(where, rows, a.size(0));
  ReduceProduct product{
      0, a.size(1), b.size(1), a.data<BFloat16>(), b.data<BFloat16>(), c.data<float>(), accumulate};
  struct Task {
    ReduceProduct product;
    int64_t n0, n1;
  };
  static thread_local std::vector<Task> list;
  list.clear();
  const int64_t wanted = num_threads() == 1 ? 1 : 4 * num_threads();
  const int64_t tiles = divide_up(product.n_count, kPairRows);
  const int64_t cuts =
      groups == 0 ? 1 : std::clamp<int64_t>(divide_up(wanted, groups), 1, std::max<int64_t>(1, tiles));
  for (const int64_t count : rows) {
    product.m = count;
    for (int64_t i = 0; i < cuts; i++) {
      list.push_back({product, tiles * i / cuts * kPairRows,
                      std::min(product.n_count, tiles * (i + 1) / cuts * kPairRows)});
    }
    product.a += count * product.n_count;
    product.b += count * product.k_count;
    product.c += product.n_count * product.k_count;
  }
  const std::vector<Task>& tasks = list;
  parallel_tasks(static_cast<int64_t>(tasks.size()), [&tasks](int64_t i) {
    const Task& t = tasks[static_cast<size_t>(i)];
    t.product.run(t.n0, t.n1);
  });
}

const bool added = packs_in_order.add(DeviceType::cpu, &packs_in_order_impl, kIsaLevel) &&
                   packed_size.add(DeviceType::cpu, &packed_size_impl, kIsaLevel) &&
                   pack_rows.add(DeviceType::cpu, &pack_rows_impl, kIsaLevel) &&
                   packed_gemm_rows.add(DeviceType::cpu, &packed_gemm_rows_impl, kIsaLevel) &&
                   bf16_gemm_reduce.add(DeviceType::cpu, &bf16_gemm_reduce_impl, kIsaLevel);

SHOAL_KERNELS_END
