// CPU kernel of core/ops/rows.h.
#include "core/ops/rows.h"

#include <cstring>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN

void copy_columns_impl(const CopyColumns& c) {
  const int64_t element = dtype_size(c.from.dtype()), from_bytes = c.from.row_size() * element,
                to_bytes = c.to.row_size() * element;
  const std::byte* from = c.from.bytes() + c.first_from * element;
  std::byte* to = c.to.bytes() + c.first_to * element;
  const auto bytes = static_cast<size_t>(c.width * element);
  cpu::parallel_rows(c.from.num_rows(), c.width, [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) std::memcpy(to + r * to_bytes, from + r * from_bytes, bytes);
  });
}

const bool added[] = {copy_columns.add(DeviceType::cpu, &copy_columns_impl, kIsaLevel)};

SHOAL_KERNELS_END
