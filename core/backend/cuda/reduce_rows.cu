// CUDA kernels of core/ops/reduce_rows.h.
#include "core/backend/cuda/map.h"
#include "core/ops/reduce_rows.h"

namespace shoal::cuda {
namespace {

struct RowSum {
  template <class C>
  SHOAL_DEVICE C operator()(C a, C b) const {
    return static_cast<C>(a + b);
  }
};
struct RowMax {
  template <class C>
  SHOAL_DEVICE C operator()(C a, C b) const {
    return b > a || b != b ? b : a;
  }
};
struct RowMin {
  template <class C>
  SHOAL_DEVICE C operator()(C a, C b) const {
    return b < a || b != b ? b : a;
  }
};

template <class T, class F>
struct ReduceRows {
  static constexpr int kPack = cuda::kPack<T>;
  const T* parts;
  T* to;
  int64_t num_rows, width;
  template <int N>
  SHOAL_DEVICE void at(int64_t i) const {
    auto sum = load<N>(parts + i);
    for (int64_t r = 1; r < num_rows; r++) {
      const auto part = load<N>(parts + r * width + i);
      for (int j = 0; j < N; j++) sum.v[j] = F{}(sum.v[j], part.v[j]);
    }
    store<N>(to + i, sum);
  }
};

template <class T>
void reduce_rows_typed(const Tensor& parts, RowReduction op, const Tensor& out) {
  const T* from = parts.data<T>();
  T* to = out.data<T>();
  const int64_t rows = parts.size(0), width = out.numel();
  // Rows after the first begin on 16 bytes only if their width is a multiple of that.
  const bool aligned = all_aligned({from, to}) && (rows == 1 || width * sizeof(T) % 16 == 0);
  const auto run = [&](auto f) {
    map(out.device(), width, aligned, ReduceRows<T, decltype(f)>{from, to, rows, width});
  };
  if (op == RowReduction::sum) return run(RowSum{});
  if (op == RowReduction::max) return run(RowMax{});
  run(RowMin{});
}

void reduce_rows_impl(const Tensor& parts, RowReduction op, const Tensor& out) {
  check_reduce_rows(parts, out);
  switch (out.dtype()) {
    case DType::i32:
      return reduce_rows_typed<int32_t>(parts, op, out);
    case DType::i64:
      return reduce_rows_typed<int64_t>(parts, op, out);
    case DType::u8:
      return reduce_rows_typed<uint8_t>(parts, op, out);
    default:
      dispatch_storage(out.dtype(), "reduce_rows", [&]<class T>() { reduce_rows_typed<T>(parts, op, out); });
  }
}

[[maybe_unused]] const bool added = reduce_rows.add(DeviceType::cuda, &reduce_rows_impl);

}  // namespace
}  // namespace shoal::cuda
