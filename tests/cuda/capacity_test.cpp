#include <cmath>

#include "core/base/random.h"
#include "core/ops/routing.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

/// Some tokens without an expert, some choices without one; few different weights.
Tensors assignments(int64_t tokens, int64_t top_k, int64_t experts, DType dtype) {
  const RandomStream random(7, "assignments");
  std::vector<int32_t> ids;
  std::vector<double> weights;
  for (int64_t n = 0; n < tokens * top_k; n++) {
    const uint64_t bits = random.bits(static_cast<uint64_t>(n));
    const bool none = n / top_k % 9 == 4 || bits % 11 == 0;
    ids.push_back(none ? -1 : static_cast<int32_t>(bits / 16 % static_cast<uint64_t>(experts)));
    weights.push_back(static_cast<double>(bits / 1024 % 5) / 4);
  }
  return {Tensor::from(ids, {tokens, top_k}), as(Tensor::from(weights, {tokens, top_k}), dtype)};
}

void expect_drops_like_cpu(const Tensors& inputs, int64_t experts, const CapacitySpec& spec) {
  const auto body = [&](const Tensors& in) {
    const Tensor ids = in[0].clone(), weights = in[1].clone();
    const Tensor dropped = drop_over_capacity(ids, weights, experts, spec);
    return Tensors{ids, weights, dropped};
  };
  const Tensors got = device_results(inputs, body), want = body(inputs);
  for (size_t i = 0; i < got.size(); i++) {
    EXPECT_TRUE(same_bits(got[i], want[i])) << "result " << i << " of " << inputs[0].shape() << ", factor "
                                            << spec.factor << ", group " << spec.tokens_per_group;
  }
}

TEST(CudaCapacity, DropsAreThoseOfTheCpu) {
  struct Case {
    int64_t tokens, top_k, experts, group;
    double factor;
    DType dtype;
  };
  const Case cases[] = {{0, 2, 3, 0, 1, DType::f32},     {1, 1, 1, 1, 1, DType::f32},
                        {60, 3, 5, 20, 0.7, DType::f64}, {24, 8, 30, 4, 1.1, DType::f32},
                        {90, 1, 3, 0, 0.9, DType::f32},  {12, 2, 4, 6, 0, DType::f32}};
  const NarrowLaunches narrow;
  for (const auto policy : {DropPolicy::position, DropPolicy::probability}) {
    for (const Case& c : cases) {
      expect_drops_like_cpu(assignments(c.tokens, c.top_k, c.experts, c.dtype), c.experts,
                            {c.factor, policy, c.group});
    }
  }
}

TEST(CudaCapacity, ManyExpertsOfManyGroups) {  // more bins than a pass of the sort has digits
  const NarrowLaunches narrow;
  expect_drops_like_cpu(assignments(48, 4, 300, DType::f32), 300, {20, DropPolicy::position, 6});
}

TEST(CudaCapacity, NanAndMinusInfinityLoseAndZerosAreEqual) {
  const double inf = INFINITY;
  const Tensor weights =
      Tensor::from(std::vector<double>{NAN, -inf, -1, -0.0, 0, inf, 1, -2, NAN, 0}, {10, 1});
  const Tensor ids = Tensor::zeros({10, 1}, DType::i32);
  const NarrowLaunches narrow;
  for (const int kept : {4, 7, 9})  // between the zeros, the negative ones, the infinite one and NaN
    expect_drops_like_cpu({ids, as(weights, DType::f32)}, 1, {0.1 * kept, DropPolicy::probability, 0});
  expect_drops_like_cpu({ids, weights}, 1, {0.4, DropPolicy::probability, 0});
}

}  // namespace
}  // namespace shoal::testing
