// Matrix instructions of the emulated machine.
#pragma once

#include "tests/cuda/emulator/machine.h"

namespace shoal::emulator {

/// What one lane brings to a product of 16 x 16 and 16 x 8 bf16, see core/backend/cuda/ptx.h.
struct Product {
  float* sums;  // 4, added to
  uint32_t a[4], b[2];
};
/// Multiplies for all lanes; lanes: 32 Product*.
void multiply_lanes(void* const* lanes);

/// ldmatrix.x4: the calling lane's row of 16 bytes is read, and the rows of all lanes are dealt out.
void load_lanes(uint32_t* matrices, const void* row, bool transposed, const char* function, Site site);

}  // namespace shoal::emulator
