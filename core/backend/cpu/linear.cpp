// Bias of linear layers, per group of rows.
#include "core/ops/linear.h"

#include <algorithm>
#include <cstdint>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/base/threads.h"

SHOAL_KERNELS_BEGIN

using cpu::Compute;

constexpr int64_t kColumns = 256;    // columns of dy summed at a time, kept in L1
constexpr int64_t kRowsPerSum = 64;  // rows per partial sum: two levels keep the f32 rounding error small

void check_groups(const char* where, const Tensor& y, const Tensor& bias, std::span<const int64_t> rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  const bool dtypes_fit =
      y.dtype() == bias.dtype() || (y.dtype() == DType::bf16 && bias.dtype() == DType::f32);
  SHOAL_CHECK(
      dtypes_fit && total == y.num_rows() && bias.numel() == static_cast<int64_t>(rows.size()) * y.row_size(),
      where, ": expected a bias of ", rows.size(), " x ", y.row_size(), " for ", y.shape(), " ", y.dtype(),
      " with ", total, " rows in the groups, got ", bias.shape(), " ", bias.dtype());
}

void add_bias_impl(const Tensor& y, const Tensor& bias, std::span<const int64_t> rows) {
  check_groups("add_bias", y, bias, rows);
  dispatch_storage(y.dtype(), "add_bias", [&]<class T>() {
    const int64_t n = y.row_size();
    T* row = y.data<T>();
    const auto* b = bias.data<Compute<T>>();
    for (const int64_t count : rows) {
      parallel_for(count, std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, n)),
                   [=](int64_t begin, int64_t end) {
                     for (int64_t r = begin; r < end; r++) {
                       T* to = row + r * n;
                       for (int64_t i = 0; i < n; i++) to[i] = static_cast<Compute<T>>(to[i]) + b[i];
                     }
                   });
      row += count * n;
      b += n;
    }
  });
}

/// dbias[0, columns) += column sums of `count` rows.
template <class T>
void sum_columns(const T* dy, int64_t ld, int64_t count, int64_t columns, Compute<T>* dbias) {
  Compute<T> total[kColumns] = {}, partial[kColumns];
  for (int64_t r0 = 0; r0 < count; r0 += kRowsPerSum) {
    for (int64_t i = 0; i < columns; i++) partial[i] = 0;
    for (int64_t r = r0; r < std::min(count, r0 + kRowsPerSum); r++) {
      const T* from = dy + r * ld;
      for (int64_t i = 0; i < columns; i++) partial[i] += static_cast<Compute<T>>(from[i]);
    }
    for (int64_t i = 0; i < columns; i++) total[i] += partial[i];
  }
  for (int64_t i = 0; i < columns; i++) dbias[i] += total[i];
}

void bias_bwd_impl(const Tensor& dy, const Tensor& dbias, std::span<const int64_t> rows) {
  check_groups("bias_bwd", dy, dbias, rows);
  dispatch_storage(dy.dtype(), "bias_bwd", [&]<class T>() {
    const int64_t n = dy.row_size();
    const T* from = dy.data<T>();
    auto* to = dbias.data<Compute<T>>();
    for (const int64_t count : rows) {
      // Split by columns: each column is summed by one thread, in row order.
      parallel_tasks((n + kColumns - 1) / kColumns, [=](int64_t task) {
        const int64_t column = task * kColumns;
        sum_columns(from + column, n, count, std::min(kColumns, n - column), to + column);
      });
      from += count * n;
      to += n;
    }
  });
}

const bool added = add_bias.add(DeviceType::cpu, &add_bias_impl, kIsaLevel) &&
                   bias_bwd.add(DeviceType::cpu, &bias_bwd_impl, kIsaLevel);

SHOAL_KERNELS_END
