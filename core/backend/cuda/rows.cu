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

template <class T>
void copy_columns_of(const CopyColumns& c) {
  const Columns<T> body{reinterpret_cast<const T*>(c.from.bytes()) + c.first_from,
                        reinterpret_cast<T*>(c.to.bytes()) + c.first_to, c.from.row_size(), c.to.row_size()};
  const bool aligned =
      all_aligned({body.from, body.to}) && body.from_width % kPack<T> == 0 && body.to_width % kPack<T> == 0;
  map_rows(c.from.device(), c.from.num_rows(), c.width, aligned, body);
}

// Bits are copied, so only the size of an element counts.
void copy_columns_impl(const CopyColumns& c) {
  switch (dtype_size(c.from.dtype())) {
    case 1:
      return copy_columns_of<uint8_t>(c);
    case 2:
      return copy_columns_of<uint16_t>(c);
    case 4:
      return copy_columns_of<uint32_t>(c);
    default:
      return copy_columns_of<uint64_t>(c);
  }
}

[[maybe_unused]] const bool added = copy_columns.add(DeviceType::cuda, &copy_columns_impl);

}  // namespace
}  // namespace shoal::cuda
