// Splitting work into blocks whose borders do not depend on the number of threads, so that a result is
// bit-equal for every team size. For CPU kernels only.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/base/threads.h"
#include "core/tensor/types.h"

namespace shoal::cpu {

/// The type a kernel computes in when values are stored as T.
template <class T>
struct ComputeOf {
  using Type = T;
};
template <>
struct ComputeOf<BFloat16> {
  using Type = float;
};
template <class T>
using Compute = typename ComputeOf<T>::Type;

inline constexpr int64_t kBlockElements = 8192;
inline constexpr int64_t kMaxPartials = 64;

/// Calls body(begin, end) for consecutive ranges of kBlockElements elements that cover [0, n).
template <class Body>
void parallel_blocks(int64_t n, const Body& body) {
  const int64_t num_blocks = (n + kBlockElements - 1) / kBlockElements;
  parallel_for(num_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) body(b * kBlockElements, std::min(n, (b + 1) * kBlockElements));
  });
}

/// Calls body(begin, end) for ranges of whole rows, in parallel when there is enough work. Only for bodies
/// that treat each row by itself.
template <class Body>
void parallel_rows(int64_t num_rows, int64_t row_size, const Body& body) {
  parallel_for(num_rows, std::max<int64_t>(1, kBlockElements / std::max<int64_t>(row_size, 1)), body);
}

/// Sum over [0, n) of body(begin, end), which returns the sum of one range; the ranges are fixed by n and
/// added in ascending order. Value is a type with += (a number).
template <class Value, class Body>
Value ordered_sum(int64_t n, const Body& body) {
  const int64_t block = std::max(kBlockElements, (n + kMaxPartials - 1) / kMaxPartials);
  const int64_t num_blocks = (n + block - 1) / block;
  std::array<Value, kMaxPartials> partial{};
  parallel_for(num_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; b++) {
      partial[static_cast<size_t>(b)] = body(b * block, std::min(n, (b + 1) * block));
    }
  });
  Value total{};
  for (int64_t b = 0; b < num_blocks; b++) total += partial[static_cast<size_t>(b)];
  return total;
}

}  // namespace shoal::cpu
