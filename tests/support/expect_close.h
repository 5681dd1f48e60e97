// Comparing tensors and vectors with a tolerance; a failure says where and by how much.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/tensor/tensor.h"

namespace shoal::testing {

struct Tolerance {
  double relative = 1e-6, absolute = 1e-8;
};

inline std::vector<double> to_doubles(const Tensor& t) {
  std::vector<double> out;
  if (t.dtype() == DType::f32)
    for (const float v : t.to_vector<float>()) out.push_back(v);
  else if (t.dtype() == DType::f64)
    out = t.to_vector<double>();
  else if (t.dtype() == DType::bf16)
    for (const BFloat16 v : t.to_vector<BFloat16>()) out.push_back(static_cast<float>(v));
  else if (t.dtype() == DType::i32)
    for (const int32_t v : t.to_vector<int32_t>()) out.push_back(v);
  else if (t.dtype() == DType::i64)
    for (const int64_t v : t.to_vector<int64_t>()) out.push_back(static_cast<double>(v));
  else
    for (const uint8_t v : t.to_vector<uint8_t>()) out.push_back(v);
  return out;
}

inline ::testing::AssertionResult close(const std::vector<double>& got, const std::vector<double>& want,
                                        Tolerance tolerance) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes differ: got " << got.size() << ", want " << want.size();
  size_t worst = 0;
  double worst_excess = 0;
  for (size_t i = 0; i < got.size(); i++) {
    const double error = std::abs(got[i] - want[i]);
    const double excess =
        error == 0 ? 0 : error / (tolerance.absolute + tolerance.relative * std::abs(want[i]));
    if (!(excess <= worst_excess)) {
      worst_excess = std::isnan(excess) ? HUGE_VAL : excess;
      worst = i;
    }
  }
  if (worst_excess <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "element " << worst << " of " << got.size() << ": got " << got[worst] << ", want " << want[worst]
         << ", difference " << got[worst] - want[worst] << " is " << worst_excess << " times the tolerance";
}

inline ::testing::AssertionResult close(const Tensor& got, const Tensor& want, Tolerance tolerance = {}) {
  if (!(got.shape() == want.shape()))
    return ::testing::AssertionFailure() << "shapes differ: got " << got.shape() << ", want " << want.shape();
  return close(to_doubles(got), to_doubles(want), tolerance);
}

}  // namespace shoal::testing
