// CUDA kernel of core/ops/rows.h.
#include "core/ops/rows.h"

#include "core/backend/cuda/map.h"

namespace shoal::cuda {
namespace {

template <class T>
struct Columns {
  static constexpr int kPack = cuda::kPack<T>;
  const T* from;
  T* to;
  int64_t from_width, to_width;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    copy<N>(to + row * to_width + column, from + row * from_width + column);
  }
};

void copy_columns_impl(const CopyColumns& c) {
  dispatch_storage(c.from.dtype(), "copy_columns", [&]<class T>() {
    const Columns<T> body{c.from.data<T>() + c.first_from, c.to.data<T>() + c.first_to, c.from.row_size(),
                          c.to.row_size()};
    const bool aligned =
        all_aligned({body.from, body.to}) && body.from_width % kPack<T> == 0 && body.to_width % kPack<T> == 0;
    map_rows(c.from.device(), c.from.num_rows(), c.width, aligned, body);
  });
}

[[maybe_unused]] const bool added = copy_columns.add(DeviceType::cuda, &copy_columns_impl);

}  // namespace
}  // namespace shoal::cuda
