// GemmEngine: single-threaded matrix products on raw pointers, with several implementations behind it. The
// kernels in kernels.cpp cut a product into parts and give each part to an engine on its own thread; nothing
// else calls engines.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor/kernel.h"

namespace shoal::cpu {

/// C[m, n] (+)= sum_k op(A)[m, k] * op(B)[k, n]; row-major with leading dimensions in elements. A is stored
/// [m, k], transposed [k, m]; B is stored [k, n], transposed [n, k]. Without accumulate C is written and
/// never read (it may hold NaN); k == 0 then writes zeros.
template <class T>
struct GemmCall {
  int64_t m = 0, n = 0, k = 0;
  const T* a = nullptr;
  int64_t lda = 0;
  const T* b = nullptr;
  int64_t ldb = 0;
  T* c = nullptr;
  int64_t ldc = 0;
  bool transpose_a = false, transpose_b = false, accumulate = false;

  const T* a_at(int64_t row) const { return transpose_a ? a + row : a + row * lda; }
  const T* b_at(int64_t column) const { return transpose_b ? b + column * ldb : b + column; }
  /// The part of the product that makes rows [row, row + rows) and columns [column, column + columns) of C.
  GemmCall part(int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    GemmCall p = *this;
    p.m = rows;
    p.n = columns;
    p.a = a_at(row);
    p.b = b_at(column);
    p.c = c + row * ldc + column;
    return p;
  }
};

/// Engines have no state that callers can see: any number of threads may run one at the same time.
class GemmEngine {
 public:
  virtual ~GemmEngine() = default;
  virtual const char* name() const = 0;
  /// Whether the bits of a row of C depend on that row of A and on B alone, not on the other rows.
  virtual bool rows_are_independent() const { return true; }
  virtual void run(const GemmCall<float>& call) const = 0;
  virtual void run(const GemmCall<double>& call) const = 0;
};

/// The engine of this process: SHOAL_GEMM if set (UsageError when unknown), else the fastest one for this
/// machine; `reference` in builds with ThreadSanitizer, which cannot see into OpenBLAS.
const GemmEngine& gemm_engine();
/// Every engine of this build.
const std::vector<const GemmEngine*>& gemm_engines();
/// The engine called `name`; UsageError naming the choices when there is none.
const GemmEngine& gemm_engine_named(const std::string& name);

const GemmEngine& reference_engine();  // plain C++
const GemmEngine& openblas_engine();   // cblas
const GemmEngine& tiled_engine();      // core/backend/cpu/tiled_gemm.cpp

/// The tiled engine's code, compiled once per instruction set.
inline constinit Kernel<void(const GemmCall<float>&)> tiled_gemm_f32("tiled_gemm_f32");
inline constinit Kernel<void(const GemmCall<double>&)> tiled_gemm_f64("tiled_gemm_f64");

}  // namespace shoal::cpu
