#include <gtest/gtest.h>

#include "models/ffn.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal::testing {
namespace {

TEST(ReluSquared, SquaresPositiveValuesAndIsZeroElsewhere) {
  const auto f = FfnActivationRegistry::make({"relu_squared", nullptr});
  EXPECT_FALSE(f->gated());
  const Tensor x = Tensor::from(std::vector<double>{-2, 0, 0.5, 3}, Shape{2, 2});
  EXPECT_TRUE(close(to_doubles(f->forward(x)), {0, 0, 0.25, 9}, {1e-15, 0}));
}

TEST(ReluSquared, GradientMatchesNumeric) {
  const auto f = FfnActivationRegistry::make({"relu_squared", nullptr});
  EXPECT_TRUE(gradcheck([&](const std::vector<Tensor>& in) { return std::vector<Tensor>{f->forward(in[0])}; },
                        {random_tensor({3, 7}, DType::f64, 4)}));
}

}  // namespace
}  // namespace shoal::testing
