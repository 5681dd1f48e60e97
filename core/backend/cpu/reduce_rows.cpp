// CPU kernel of core/ops/reduce_rows.h.
#include "core/ops/reduce_rows.h"

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"
#include "core/base/threads.h"

SHOAL_KERNELS_BEGIN

using cpu::Compute;

constexpr int64_t kRowGrain = int64_t{1} << 15;  // elements per thread that are worth a thread

template <class T, class C>
C combine(RowReduction op, C a, T part) {
  const C b = static_cast<C>(part);
  if (op == RowReduction::sum) return static_cast<C>(a + b);
  const bool replaces = op == RowReduction::max ? b > a : b < a;
  return replaces || b != b ? b : a;
}

template <class T, class C>
void reduce_rows_typed(const Tensor& parts, RowReduction op, const Tensor& out) {
  const int64_t rows = parts.size(0), width = out.numel();
  const T* from = parts.data<T>();
  T* to = out.data<T>();
  parallel_for(width, kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      C acc = static_cast<C>(from[i]);
      for (int64_t r = 1; r < rows; r++) acc = combine(op, acc, from[r * width + i]);
      to[i] = static_cast<T>(acc);
    }
  });
}

void reduce_rows_impl(const Tensor& parts, RowReduction op, const Tensor& out) {
  check_reduce_rows(parts, out);
  switch (out.dtype()) {
    case DType::i32:
      return reduce_rows_typed<int32_t, int32_t>(parts, op, out);
    case DType::i64:
      return reduce_rows_typed<int64_t, int64_t>(parts, op, out);
    case DType::u8:
      return reduce_rows_typed<uint8_t, uint8_t>(parts, op, out);
    default:
      dispatch_storage(out.dtype(), "reduce_rows",
                       [&]<class T>() { reduce_rows_typed<T, Compute<T>>(parts, op, out); });
  }
}

const bool added_reduce_rows = reduce_rows.add(DeviceType::cpu, &reduce_rows_impl, kIsaLevel);

SHOAL_KERNELS_END
