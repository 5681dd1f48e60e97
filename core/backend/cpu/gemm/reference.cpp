// The reference engine: plain C++, blocked for the cache. The oracle of the tests, and what runs under
// ThreadSanitizer. Every element of C is summed in ascending k.
#include <algorithm>
#include <array>

#include "core/backend/cpu/gemm/engine.h"

namespace shoal::cpu {

namespace {

constexpr int64_t kBlockK = 64, kBlockN = 128;

/// One block of op(B), copied so that the inner loop runs along contiguous columns.
template <class T>
using Block = std::array<T, kBlockK * kBlockN>;

template <class T>
void copy_block(const GemmCall<T>& call, int64_t k0, int64_t k_count, int64_t n0, int64_t n_count,
                Block<T>& block) {
  for (int64_t k = 0; k < k_count; k++) {
    for (int64_t n = 0; n < n_count; n++) {
      block[static_cast<size_t>(k * kBlockN + n)] =
          call.transpose_b ? call.b[(n0 + n) * call.ldb + k0 + k] : call.b[(k0 + k) * call.ldb + n0 + n];
    }
  }
}

template <class T>
void run_reference(const GemmCall<T>& call) {
  if (!call.accumulate) {
    for (int64_t m = 0; m < call.m; m++) std::fill_n(call.c + m * call.ldc, call.n, T{0});
  }
  Block<T> block;
  for (int64_t n0 = 0; n0 < call.n; n0 += kBlockN) {
    const int64_t n_count = std::min(kBlockN, call.n - n0);
    for (int64_t k0 = 0; k0 < call.k; k0 += kBlockK) {
      const int64_t k_count = std::min(kBlockK, call.k - k0);
      copy_block(call, k0, k_count, n0, n_count, block);
      for (int64_t m = 0; m < call.m; m++) {
        T* c = call.c + m * call.ldc + n0;
        for (int64_t k = 0; k < k_count; k++) {
          const T a = call.transpose_a ? call.a[(k0 + k) * call.lda + m] : call.a[m * call.lda + k0 + k];
          const T* b = block.data() + k * kBlockN;
          for (int64_t n = 0; n < n_count; n++) c[n] += a * b[n];
        }
      }
    }
  }
}

class ReferenceEngine final : public GemmEngine {
 public:
  const char* name() const override { return "reference"; }
  void run(const GemmCall<float>& call) const override { run_reference(call); }
  void run(const GemmCall<double>& call) const override { run_reference(call); }
};

}  // namespace

const GemmEngine& reference_engine() {
  static const ReferenceEngine engine;
  return engine;
}

}  // namespace shoal::cpu
