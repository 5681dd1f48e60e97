// CPU kernels of core/ops/fp8_linear.h. They say what fp8 operands and products are; no processor here has
// such instructions, and they are not fast: operands become f32 again before they are multiplied.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/backend/cpu/isa.h"
#include "core/base/threads.h"
#include "core/ops/elementwise.h"
#include "core/ops/fp8_linear.h"
#include "core/ops/linear.h"

SHOAL_KERNELS_BEGIN

/// Calls f.operator()<T>() with T = float or BFloat16.
template <class F>
void for_type(DType dtype, const char* where, const F& f) {
  SHOAL_CHECK(dtype == DType::f32 || dtype == DType::bf16, where, ": expected x of f32 or bf16, got ", dtype);
  if (dtype == DType::f32) return f.template operator()<float>();
  f.template operator()<BFloat16>();
}

/// First row of each group, and their end.
std::vector<int64_t> firsts_of(const char* where, std::span<const int64_t> rows, const Tensor& x) {
  std::vector<int64_t> firsts = {0};
  for (const int64_t count : rows) {
    SHOAL_CHECK(count >= 0, where, ": expected at least 0 rows per group, got ", count);
    firsts.push_back(firsts.back() + count);
  }
  SHOAL_CHECK(x.dims() == 2 && firsts.back() == x.size(0), where, ": rows per group sum to ", firsts.back(),
              ", but the operand is ", x.shape());
  return firsts;
}

/// The largest finite |x| among rows [r0, r1) and columns [c0, c1).
template <class T>
float largest(const T* x, int64_t width, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  float most = 0;
  for (int64_t r = r0; r < r1; r++) {
    for (int64_t c = c0; c < c1; c++) {
      const float value = std::abs(static_cast<float>(x[r * width + c]));
      if (value > most && value <= std::numeric_limits<float>::max()) most = value;
    }
  }
  return most;
}

void scales_impl(const Tensor& x, std::span<const int64_t> rows, Fp8Format format, const Tensor& scales) {
  const char* where = "fp8_scales";
  const std::vector<int64_t> firsts = firsts_of(where, rows, x);
  SHOAL_CHECK(scales.numel() == static_cast<int64_t>(rows.size()), where, ": expected ", rows.size(),
              " scales, got ", scales.shape());
  for_type(x.dtype(), where, [&]<class T>() {
    const T* from = x.data<T>();
    auto* to = scales.data<float>();
    const int64_t width = x.size(1);
    parallel_tasks(std::ssize(rows), [&](int64_t g) {
      const auto i = static_cast<size_t>(g);
      to[g] = fp8_scale(largest(from, width, firsts[i], firsts[i + 1], 0, width), format);
    });
  });
}

/// The scale of the element (row, column) of a group whose rows are x [count, width]; row and column are in
/// the matrix of the operand, `transposed` says whether that is x^T.
template <class T>
float fresh_scale(const Fp8Operand& to, const T* x, int64_t count, int64_t width, bool transposed,
                  int64_t row, int64_t column) {
  const bool block = to.kind == Fp8Scales::block;
  const int64_t r0 = block ? row / kFp8Block * kFp8Block : row, r1 = block ? r0 + kFp8Block : row + 1;
  const int64_t c0 = column / kFp8Block * kFp8Block, c1 = c0 + kFp8Block;
  const float most = transposed ? largest(x, width, std::min(count, c0), std::min(count, c1),
                                          std::min(width, r0), std::min(width, r1))
                                : largest(x, width, std::min(count, r0), std::min(count, r1),
                                          std::min(width, c0), std::min(width, c1));
  return fp8_scale(most, to.format);
}

template <class T>
void quantize(const Fp8Operand& to, size_t group, const T* x, int64_t count, int64_t width, bool transposed) {
  const Fp8Matrix& m = to.matrices[group];
  uint8_t* codes = to.codes.data<uint8_t>() + m.codes;
  float* scales = to.scales.data<float>() + m.scales;
  // Scales beyond the last row are those of zeros.
  const int64_t outer = to.kind == Fp8Scales::vector ? fp8_round_up(m.outer, 4) : m.outer;
  const int64_t step = to.kind == Fp8Scales::block ? kFp8Block : 1;
  for (int64_t row = 0; to.kind != Fp8Scales::matrix && row < outer; row += step) {
    for (int64_t column = 0; column < m.sum; column += kFp8Block) {
      scales[fp8_scale_index(to.kind, m.outer, m.sum, row, column)] =
          fresh_scale(to, x, count, width, transposed, row, column);
    }
  }
  parallel_for(m.outer, std::max<int64_t>(1, (1 << 12) / std::max<int64_t>(1, m.sum)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; row++) {
                   for (int64_t column = 0; column < m.sum; column++) {
                     const int64_t r = transposed ? column : row, c = transposed ? row : column;
                     const float value = r < count ? static_cast<float>(x[r * width + c]) : 0;
                     const float scale = scales[fp8_scale_index(to.kind, m.outer, m.sum, row, column)];
                     codes[row * m.sum + column] = to_fp8(value * fp8_inverse(scale), to.format);
                   }
                 }
               });
}

void quantize_impl(const Tensor& x, std::span<const int64_t> rows, const Fp8Operand& along_rows,
                   const Fp8Operand& along_columns) {
  const char* where = "fp8_quantize";
  const std::vector<int64_t> firsts = firsts_of(where, rows, x);
  for (const Fp8Operand* to : {&along_rows, &along_columns}) {
    SHOAL_CHECK(!*to || to->matrices.size() == rows.size(), where, ": expected an operand of ", rows.size(),
                " groups, got ", to->matrices.size());
  }
  for_type(x.dtype(), where, [&]<class T>() {
    for (size_t g = 0; g < rows.size(); g++) {
      const T* from = x.data<T>() + firsts[g] * x.size(1);
      if (along_rows) quantize(along_rows, g, from, rows[g], x.size(1), false);
      if (along_columns) quantize(along_columns, g, from, rows[g], x.size(1), true);
    }
  });
}

/// The numbers of one matrix of an operand.
Tensor numbers(const Fp8Operand& operand, const Fp8Matrix& m) {
  const Tensor out = Tensor::empty({m.outer, m.sum}, DType::f32);
  const uint8_t* codes = operand.codes.data<uint8_t>() + m.codes;
  const float* scales = operand.scales.data<float>() + m.scales;
  auto* to = out.data<float>();
  parallel_for(m.outer, std::max<int64_t>(1, (1 << 12) / std::max<int64_t>(1, m.sum)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin * m.sum; i < end * m.sum; i++) {
                   const int64_t at = fp8_scale_index(operand.kind, m.outer, m.sum, i / m.sum, i % m.sum);
                   to[i] = from_fp8(codes[i], operand.format) * scales[at];
                 }
               });
  return out;
}

void gemm_impl(bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c) {
  check_fp8_gemm(accumulate, a, b, c);
  int64_t first = 0;
  for (size_t g = 0; g < a.matrices.size(); g++) {
    const Fp8Matrix &of_a = a.matrices[g], &of_b = b.matrices[g];
    const Tensor to = c.flat(first, of_a.outer * of_b.outer).view({of_a.outer, of_b.outer});
    first += to.numel();
    if (to.numel() == 0) continue;
    const Tensor wide = c.dtype() == DType::f32 ? to : Tensor::empty(to.shape(), DType::f32, to.device());
    gemm(c.device(), {.transpose_b = true, .accumulate = accumulate}, numbers(a, of_a), numbers(b, of_b),
         wide);
    if (c.dtype() != DType::f32) cast_fwd(c.device(), wide, to);
  }
}

const bool added = fp8_scales.add(DeviceType::cpu, &scales_impl, kIsaLevel) &&
                   fp8_quantize.add(DeviceType::cpu, &quantize_impl, kIsaLevel) &&
                   fp8_gemm.add(DeviceType::cpu, &gemm_impl, kIsaLevel);

SHOAL_KERNELS_END
