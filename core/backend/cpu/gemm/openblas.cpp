// The OpenBLAS engine. Its own threads are switched off, for each thread that calls it: products are cut into
// parts by kernels.cpp. How it orders a row's sum may depend on m and n, so its rows are not bit-equal across
// different splits.
#include <cblas.h>

#include <algorithm>
#include <limits>

#include "core/backend/cpu/gemm/engine.h"

namespace shoal::cpu {

namespace {

template <class T>
void run_openblas(const GemmCall<T>& call) {
  static thread_local const bool alone = [] {
    openblas_set_num_threads(1);  // OpenMP keeps the number for each thread
    return true;
  }();
  if (!alone || call.m == 0 || call.n == 0) return;
  if (call.k == 0) {
    if (!call.accumulate) {
      for (int64_t m = 0; m < call.m; m++) std::fill_n(call.c + m * call.ldc, call.n, T{0});
    }
    return;
  }
  const int64_t largest = std::max({call.m, call.n, call.k, call.lda, call.ldb, call.ldc});
  SHOAL_CHECK(largest <= std::numeric_limits<blasint>::max(), "gemm (openblas): dimension ", largest,
              " does not fit its ", 8 * sizeof(blasint), "-bit integers; set SHOAL_GEMM=tiled");
  const auto dim = [](int64_t value) { return static_cast<blasint>(value); };
  const auto ta = call.transpose_a ? CblasTrans : CblasNoTrans;
  const auto tb = call.transpose_b ? CblasTrans : CblasNoTrans;
  const T beta = call.accumulate ? 1 : 0;
  if constexpr (sizeof(T) == sizeof(float)) {
    cblas_sgemm(CblasRowMajor, ta, tb, dim(call.m), dim(call.n), dim(call.k), 1, call.a, dim(call.lda),
                call.b, dim(call.ldb), beta, call.c, dim(call.ldc));
  } else {
    cblas_dgemm(CblasRowMajor, ta, tb, dim(call.m), dim(call.n), dim(call.k), 1, call.a, dim(call.lda),
                call.b, dim(call.ldb), beta, call.c, dim(call.ldc));
  }
}

class OpenBlasEngine final : public GemmEngine {
 public:
  const char* name() const override { return "openblas"; }
  bool rows_are_independent() const override { return false; }
  void run(const GemmCall<float>& call) const override { run_openblas(call); }
  void run(const GemmCall<double>& call) const override { run_openblas(call); }
};

}  // namespace

const GemmEngine& openblas_engine() {
  static const OpenBlasEngine engine;
  return engine;
}

}  // namespace shoal::cpu
