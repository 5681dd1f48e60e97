#include "tests/cuda/emulator/tensor_core.h"

#include <bit>

#include "core/base/error.h"
#include "tests/cuda/emulator/state.h"

namespace shoal::emulator {

namespace {

constexpr int kRows = 16, kDepth = 16, kColumns = 8;

float half_of(uint32_t pair, int which) {
  return std::bit_cast<float>(which == 0 ? pair << 16 : pair & 0xFFFF0000U);
}

struct Row {
  uint16_t elements[8];
  uint32_t* matrices;
  bool transposed;
};

void deal_lanes(void* const* lanes) {
  const auto row = [&](int matrix, int r) { return static_cast<const Row*>(lanes[matrix * 8 + r]); };
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    const auto* mine = static_cast<const Row*>(lanes[lane]);
    for (int m = 0; m < 4; m++) {
      const uint32_t low = mine->transposed ? row(m, 2 * t)->elements[g] : row(m, g)->elements[2 * t];
      const uint32_t high =
          mine->transposed ? row(m, 2 * t + 1)->elements[g] : row(m, g)->elements[2 * t + 1];
      mine->matrices[m] = low | high << 16;
    }
  }
}

}  // namespace

void multiply_lanes(void* const* lanes) {
  float a[kRows][kDepth], b[kDepth][kColumns];
  for (int lane = 0; lane < 32; lane++) {
    const auto& mine = *static_cast<const Product*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; half++) {
      for (int i = 0; i < 4; i++) a[g + i % 2 * 8][2 * t + half + i / 2 * 8] = half_of(mine.a[i], half);
      for (int i = 0; i < 2; i++) b[2 * t + half + i * 8][g] = half_of(mine.b[i], half);
    }
  }
  float sums[kRows][kColumns] = {};
  for (int i = 0; i < kRows; i++) {
    for (int k = 0; k < kDepth; k++) {
      for (int j = 0; j < kColumns; j++) sums[i][j] += a[i][k] * b[k][j];
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    const auto& mine = *static_cast<const Product*>(lanes[lane]);
    for (int i = 0; i < 4; i++) mine.sums[i] += sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  }
}

void load_lanes(uint32_t* matrices, const void* row, bool transposed, const char* function, Site site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    fault(str(function, " at ", site.file, ':', site.line, ": expected a row aligned to 16 bytes"));
  }
  require_shared(row, 16, function, site);
  Row mine{{}, matrices, transposed};
  read_seen(mine.elements, row, 16);
  warp_together(&mine, &deal_lanes, function, site);
}

}  // namespace shoal::emulator
