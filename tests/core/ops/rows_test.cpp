#include "core/ops/rows.h"

#include <gtest/gtest.h>

#include "core/autograd/tape.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using testing::gradcheck;
using testing::random_tensor;
using testing::to_doubles;

TEST(Rows, PartsAreThoseOfAPlainLoop) {
  const Tensor x = random_tensor({4, 5}, DType::f64, 1);
  const std::vector<double> all = to_doubles(x);
  EXPECT_EQ(to_doubles(take_rows(x, 1, 3)), std::vector<double>(all.begin() + 5, all.begin() + 15));
  EXPECT_EQ(take_rows(x, 2, 2).numel(), 0);
  std::vector<double> want;
  for (size_t r = 0; r < 4; r++) {
    for (const size_t c : {1U, 2U, 4U}) want.push_back(all[r * 5 + c]);
  }
  EXPECT_EQ(to_doubles(take_columns(x, {{1, 3}, {4, 5}})), want);
}

TEST(Rows, GradientsMatchNumericOnes) {
  const Tensor x = random_tensor({4, 5}, DType::f64, 1);
  EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{take_rows(in[0], 1, 3)}; }, {x}));
  EXPECT_TRUE(gradcheck([](auto& in) { return std::vector{take_columns(in[0], {{1, 3}, {4, 5}})}; }, {x}));
}

TEST(Rows, PartsOutsideAreRefused) {
  const Tensor x = random_tensor({4, 5}, DType::f64, 1);
  EXPECT_NE(testing::error_of([&] { take_rows(x, 2, 5); }).find("take_rows: rows [2, 5) of [4, 5]"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] {
              take_columns(x, {{3, 6}});
            }).find("take_columns: columns [3, 6) of [4, 5]"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
