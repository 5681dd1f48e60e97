// Random bf16 values.
#pragma once

#include "core/ops/elementwise.h"
#include "tests/support/gradcheck.h"

namespace shoal::testing {

/// The values of random_tensor in f32, rounded.
inline Tensor bf16_tensor(const Shape& shape, uint64_t seed) {
  return cast(random_tensor(shape, DType::f32, seed), DType::bf16);
}

}  // namespace shoal::testing
