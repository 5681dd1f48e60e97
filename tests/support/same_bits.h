// Checks that a result does not depend on the number of threads, bit for bit.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "core/base/threads.h"
#include "core/tensor/tensor.h"

namespace shoal::testing {

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.bytes(), b.bytes(), static_cast<size_t>(a.num_bytes())) == 0;
}

/// Runs `compute`, which returns the tensors to compare, with teams of 1, 2, 3 and 4 threads.
template <class F>
void expect_same_for_any_team(const F& compute) {
  set_num_threads(1);
  const std::vector<Tensor> want = compute();
  for (const int threads : {2, 3, 4}) {
    set_num_threads(threads);
    const std::vector<Tensor> got = compute();
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < want.size(); i++) {
      EXPECT_TRUE(same_bits(got[i], want[i])) << "tensor " << i << " with " << threads << " threads";
    }
  }
  set_num_threads(1);
}

}  // namespace shoal::testing
