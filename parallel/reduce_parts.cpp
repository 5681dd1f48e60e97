#include "parallel/reduce_parts.h"

#include <algorithm>

#include "core/base/threads.h"
#include "core/ops/reduce.h"

namespace shoal {

namespace {

constexpr int64_t kBlock = 1024;              // elements accumulated on the stack; stays in the first cache
constexpr int64_t kGrain = int64_t{1} << 15;  // elements per thread that are worth a thread

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return b > a || b != b ? b : a;
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return b < a || b != b ? b : a;
  }
};

template <class T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<BFloat16> {
  using Type = float;
};

template <class T, class Op>
void reduce_range(std::span<const std::byte* const> parts, std::span<std::byte* const> outs, int64_t begin,
                  int64_t end) {
  using Acc = typename Accumulator<T>::Type;
  Acc acc[kBlock];
  for (int64_t b = begin; b < end; b += kBlock) {
    const int64_t n = std::min(kBlock, end - b);
    const T* first = reinterpret_cast<const T*>(parts[0]) + b;
    for (int64_t i = 0; i < n; i++) acc[i] = static_cast<Acc>(first[i]);
    for (size_t p = 1; p < parts.size(); p++) {
      const T* part = reinterpret_cast<const T*>(parts[p]) + b;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) acc[i] = Op::apply(acc[i], static_cast<Acc>(part[i]));
    }
    for (std::byte* const out : outs) {
      T* to = reinterpret_cast<T*>(out) + b;
      for (int64_t i = 0; i < n; i++) to[i] = static_cast<T>(acc[i]);
    }
  }
}

template <class T>
void reduce_typed(ReduceOp op, std::span<const std::byte* const> parts, std::span<std::byte* const> outs,
                  int64_t count) {
  parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    if (op == ReduceOp::sum) return reduce_range<T, Sum>(parts, outs, begin, end);
    if (op == ReduceOp::max) return reduce_range<T, Max>(parts, outs, begin, end);
    reduce_range<T, Min>(parts, outs, begin, end);
  });
}

}  // namespace

void reduce_parts(DType dtype, ReduceOp op, std::span<const std::byte* const> parts,
                  std::span<std::byte* const> outs, size_t num_streamed, int64_t count) {
  // What a training step sums, from kernels for this machine's instruction set.
  if (op == ReduceOp::sum && is_float(dtype) && parts.size() > 1)
    return sum_parts(Device{}, dtype, parts, outs, num_streamed, count);
  switch (dtype) {
    case DType::f32:
      return reduce_typed<float>(op, parts, outs, count);
    case DType::bf16:
      return reduce_typed<BFloat16>(op, parts, outs, count);
    case DType::f64:
      return reduce_typed<double>(op, parts, outs, count);
    case DType::i32:
      return reduce_typed<int32_t>(op, parts, outs, count);
    case DType::i64:
      return reduce_typed<int64_t>(op, parts, outs, count);
    case DType::u8:
      return reduce_typed<uint8_t>(op, parts, outs, count);
  }
}

}  // namespace shoal
