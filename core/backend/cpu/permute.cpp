// CPU kernels of core/ops/permute.h. Every output row is written by one worker, in a fixed order.
#include "core/ops/permute.h"

#include <algorithm>
#include <cstring>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

using cpu::Compute;

/// Throws unless every index is in [lowest, num_rows).
void check_indices(const char* where, const Tensor& index, int64_t lowest, int64_t num_rows) {
  const int64_t* data = index.data<int64_t>();
  int64_t bad = 0;
#pragma omp simd reduction(+ : bad)
  for (int64_t i = 0; i < index.numel(); i++) bad += data[i] < lowest || data[i] >= num_rows ? 1 : 0;
  if (bad == 0) return;
  int64_t i = 0;
  while (data[i] >= lowest && data[i] < num_rows) i++;
  SHOAL_CHECK(false, where, ": expected row indices in [", lowest, ", ", num_rows, "), got ", data[i], " at ",
              i);
}

void gather_rows_fwd_impl(const Tensor& x, const Tensor& index, const Tensor& y) {
  check_indices("gather_rows", index, -1, x.size(0));
  const int64_t width = x.row_size(), row_bytes = width * dtype_size(x.dtype());
  const int64_t* from_row = index.data<int64_t>();
  const std::byte* from = x.bytes();
  std::byte* to = y.bytes();
  cpu::parallel_rows(index.numel(), width, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      const auto bytes = static_cast<size_t>(row_bytes);
      if (from_row[n] < 0) {
        std::memset(to + n * row_bytes, 0, bytes);
      } else {
        std::memcpy(to + n * row_bytes, from + from_row[n] * row_bytes, bytes);
      }
    }
  });
}

constexpr int64_t kChunk = 256;  // columns summed at a time, in the computing type

// One chunk of one output row: the sum over k of weights[k] * x[slots[k]].
template <class T>
void combine_chunk(const T* x, const Compute<T>* weights, const int64_t* slots, int64_t top_k, int64_t width,
                   int64_t column, T* y) {
  Compute<T> sums[kChunk];
  const int64_t count = std::min(kChunk, width - column);
  for (int64_t d = 0; d < count; d++) sums[d] = 0;
  for (int64_t k = 0; k < top_k; k++) {
    if (slots[k] < 0) continue;
    const T* row = x + slots[k] * width + column;
    if (weights == nullptr) {
#pragma omp simd
      for (int64_t d = 0; d < count; d++) sums[d] += static_cast<Compute<T>>(row[d]);
    } else {
      const Compute<T> w = weights[k];
#pragma omp simd
      for (int64_t d = 0; d < count; d++) sums[d] += w * static_cast<Compute<T>>(row[d]);
    }
  }
#pragma omp simd
  for (int64_t d = 0; d < count; d++) y[column + d] = sums[d];
}

void combine_rows_fwd_impl(const Tensor& x, const Tensor& weights, const Tensor& slots, const Tensor& y) {
  check_indices("combine_rows", slots, -1, x.size(0));
  dispatch_storage(x.dtype(), "combine_rows", [&]<class T>() {
    const int64_t num_tokens = slots.size(0), top_k = slots.size(1), width = y.row_size();
    const T* from = x.data<T>();
    const Compute<T>* weight = weights.defined() ? weights.data<Compute<T>>() : nullptr;
    const int64_t* slot = slots.data<int64_t>();
    T* to = y.data<T>();
    cpu::parallel_rows(num_tokens, width * top_k, [=](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        for (int64_t column = 0; column < width; column += kChunk) {
          combine_chunk<T>(from, weight == nullptr ? nullptr : weight + t * top_k, slot + t * top_k, top_k,
                           width, column, to + t * width);
        }
      }
    });
  });
}

// dx may be x.
template <class T>
void combine_bwd_row(const T* dy, const T* x, Compute<T> weight, T* dx, Compute<T>* dweight, int64_t width) {
  using C = Compute<T>;
  if (dweight != nullptr) {
    C dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t d = 0; d < width; d++) dot += static_cast<C>(dy[d]) * static_cast<C>(x[d]);
    *dweight = dot;
  }
  if (dx != nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < width; d++) dx[d] = weight * static_cast<C>(dy[d]);
  }
}

template <class T>
void combine_bwd(const CombineBackward& a) {
  using C = Compute<T>;
  const int64_t width = a.x_ND.row_size(), top_k = a.slots_TK.size(1);
  const T *dy = a.dy_TD.data<T>(), *x = a.x_ND.data<T>();
  const C* weights = a.weights_TK.defined() ? a.weights_TK.data<C>() : nullptr;
  const int64_t *token = a.row_N.data<int64_t>(), *choice = a.choice_N.data<int64_t>();
  T* dx = a.dx_ND.defined() ? a.dx_ND.data<T>() : nullptr;
  C* dweights = a.dweights_TK.defined() ? a.dweights_TK.data<C>() : nullptr;
  if (dweights != nullptr) a.dweights_TK.set_zero();  // for slots of -1
  cpu::parallel_rows(a.row_N.numel(), width, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      if (token[n] < 0 || choice[n] < 0) {  // no token's: nothing flows back
        if (dx != nullptr) std::fill(dx + n * width, dx + (n + 1) * width, T(0));
        continue;
      }
      const int64_t at = token[n] * top_k + choice[n];
      combine_bwd_row<T>(dy + token[n] * width, x + n * width, weights != nullptr ? weights[at] : C(1),
                         dx != nullptr ? dx + n * width : nullptr,
                         dweights != nullptr ? dweights + at : nullptr, width);
    }
  });
}

void combine_rows_bwd_impl(const CombineBackward& a) {
  check_indices("combine_rows: row_N", a.row_N, -1, a.slots_TK.size(0));
  check_indices("combine_rows: choice_N", a.choice_N, -1, a.slots_TK.size(1));
  dispatch_storage(a.x_ND.dtype(), "combine_rows", [&]<class T>() { combine_bwd<T>(a); });
}

const bool added[] = {
    gather_rows_fwd.add(DeviceType::cpu, &gather_rows_fwd_impl, kIsaLevel),
    combine_rows_fwd.add(DeviceType::cpu, &combine_rows_fwd_impl, kIsaLevel),
    combine_rows_bwd.add(DeviceType::cpu, &combine_rows_bwd_impl, kIsaLevel),
};

SHOAL_KERNELS_END
