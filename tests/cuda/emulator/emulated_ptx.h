// What core/backend/cuda/ptx.h wraps, for the emulator, as the PTX ISA defines it. The sums of a product are
// added in f32 one after the other, which hardware may do in another order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/tensor/types.h"
#include "tests/cuda/emulator/emulated_cuda.h"
#include "tests/cuda/emulator/tensor_core.h"

namespace shoal::cuda {

inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SHOAL_SITE) {
  emulator::Product mine{sums, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  emulator::warp_together(&mine, &emulator::multiply_lanes, "multiply_add", {file, line});
}

inline void load_matrices(uint32_t (&matrices)[4], const void* row, SHOAL_SITE) {
  emulator::load_lanes(matrices, row, false, "load_matrices", {file, line});
}
inline void load_matrices_transposed(uint32_t (&matrices)[4], const void* row, SHOAL_SITE) {
  emulator::load_lanes(matrices, row, true, "load_matrices_transposed", {file, line});
}

inline void copy_async(void* shared, const void* global, unsigned bytes, SHOAL_SITE) {
  emulator::start_copy(shared, global, bytes, {file, line});
}
inline void commit_copies() {
  emulator::commit_copies();
}
template <int kPending>
void wait_copies(SHOAL_SITE) {
  static_assert(kPending >= 0);
  emulator::wait_copies(kPending, {file, line});
}

inline uint32_t round_pair(float low, float high) {
  const auto bits = [](float x) -> uint32_t { return std::isnan(x) ? 0x7FFFU : BFloat16(x).bits; };
  return bits(low) | bits(high) << 16;
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return std::fabs(y) < std::numeric_limits<float>::min() ? 0.0F : y;
}

}  // namespace shoal::cuda
