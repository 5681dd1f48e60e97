// Capacity and drops of core/ops/routing.h.
#include "core/base/random.h"
#include "core/ops/elementwise.h"
#include "core/ops/routing.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

int64_t dropped_of(const Tensor& ids, const Tensor& weights, int64_t num_experts, const CapacitySpec& spec) {
  return drop_over_capacity(ids, weights, num_experts, spec).to_vector<int64_t>()[0];
}

using testing::error_of;
using testing::expect_same_for_any_team;
using testing::random_tensor;
using testing::to_doubles;

Tensor ids_tensor(const std::vector<int32_t>& ids, int64_t top_k) {
  return Tensor::from(ids, {static_cast<int64_t>(ids.size()) / top_k, top_k});
}

TEST(Capacity, CAP_03_IsRoundedUpAndClampedToTheTokens) {
  EXPECT_EQ(expert_capacity(1, 2, 8, 4), 4);
  EXPECT_EQ(expert_capacity(1, 2, 9, 4), 5);
  EXPECT_EQ(expert_capacity(1.1, 2, 10, 2), 10);    // 11 before the clamp
  EXPECT_EQ(expert_capacity(1.1, 1, 100, 10), 11);  // not 12 by rounding
  EXPECT_EQ(expert_capacity(2, 2, 8, 2), 8);
  EXPECT_EQ(expert_capacity(1, 2, 0, 4), 0);
  const Tensor ids = ids_tensor({0, 1, 0, 1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0}, 2);
  const Tensor weights = random_tensor({8, 2}, DType::f32, 1);
  EXPECT_EQ(dropped_of(ids, weights, 2, {.factor = 2}), 0);
}

TEST(Capacity, CAP_05_KeepsTheFirstOrTheLargestGates) {
  const std::vector<float> gates = {.4F, .9F, .6F, .8F};
  const auto kept = [&](DropPolicy policy) {
    const Tensor ids = ids_tensor({0, 0, 0, 0}, 1), weights = Tensor::from(gates, {4, 1});
    EXPECT_EQ(dropped_of(ids, weights, 2, {1, policy, 0}), 2);
    return std::pair(to_doubles(ids), weights.to_vector<float>());
  };
  EXPECT_EQ(kept(DropPolicy::position).first, (std::vector<double>{0, 0, -1, -1}));
  EXPECT_EQ(kept(DropPolicy::probability).first, (std::vector<double>{-1, 0, -1, 0}));
  EXPECT_EQ(kept(DropPolicy::probability).second, (std::vector<float>{0, .9F, 0, .8F}));
}

TEST(Capacity, ProbabilityTiesKeepTheEarlierToken) {
  const Tensor ids = ids_tensor({1, 1, 1, 1}, 1);
  const Tensor weights = Tensor::from(std::vector<float>{.5F, .5F, .5F, .5F}, {4, 1});
  EXPECT_EQ(dropped_of(ids, weights, 2, {1, DropPolicy::probability, 0}), 2);
  EXPECT_EQ(to_doubles(ids), (std::vector<double>{1, 1, -1, -1}));
}

TEST(Capacity, PositionPlacesAllFirstChoicesBeforeAnySecondChoice) {
  // Expert 0: second choice of token 0, first choice of tokens 1 and 2; capacity 2.
  const Tensor ids = ids_tensor({1, 0, 0, 2, 0, 3}, 2);
  const Tensor weights = random_tensor({3, 2}, DType::f32, 1);
  EXPECT_EQ(dropped_of(ids, weights, 4, {1.3, DropPolicy::position, 0}), 1);
  EXPECT_EQ(to_doubles(ids), (std::vector<double>{1, -1, 0, 2, 0, 3}));
}

TEST(Capacity, CAP_05_PermutingTheTokensDoesNotChangeWhatProbabilityKeeps) {
  std::vector<int32_t> ids, shuffled_ids;
  std::vector<float> weights, shuffled_weights;
  const RandomStream random(3, "capacity");
  for (uint64_t n = 0; n < 60; n++) {
    ids.push_back(static_cast<int32_t>(random.below(n, 3)));
    weights.push_back(static_cast<float>(random.uniform(n)));
  }
  for (uint64_t n = 0; n < 60; n++) {
    const uint64_t from = permute_index(n, 60, 1, 2);
    shuffled_ids.push_back(ids[from]);
    shuffled_weights.push_back(weights[from]);
  }
  const Tensor a = ids_tensor(ids, 1), b = ids_tensor(shuffled_ids, 1);
  const CapacitySpec spec{0.6, DropPolicy::probability, 0};
  dropped_of(a, Tensor::from(weights, {60, 1}), 3, spec);
  dropped_of(b, Tensor::from(shuffled_weights, {60, 1}), 3, spec);
  for (uint64_t n = 0; n < 60; n++) {
    EXPECT_EQ(b.to_vector<int32_t>()[n], a.to_vector<int32_t>()[permute_index(n, 60, 1, 2)]);
  }
}

TEST(Capacity, CAP_07_OtherWeightsStayAsTheyWere) {
  const Tensor ids = ids_tensor({0, 1, 0, 1, 0, 2}, 2);
  const Tensor weights = random_tensor({3, 2}, DType::f32, 1);
  const std::vector<float> before = weights.to_vector<float>();
  EXPECT_EQ(dropped_of(ids, weights, 3, {0.5, DropPolicy::position, 0}), 3);
  const std::vector<float> after = weights.to_vector<float>();
  EXPECT_EQ(to_doubles(ids), (std::vector<double>{0, 1, -1, -1, -1, 2}));
  for (size_t n = 0; n < 6; n++) {
    EXPECT_EQ(after[n], ids.to_vector<int32_t>()[n] < 0 ? 0.0F : before[n]) << n;
  }
}

TEST(Capacity, CAP_09_AFactorBelowOneOverKDropsCleanly) {
  for (const DropPolicy policy : {DropPolicy::position, DropPolicy::probability}) {
    for (const auto& [factor, capacity] : {std::pair{0.0, 0}, std::pair{0.01, 1}, std::pair{0.3, 2}}) {
      const Tensor ids = ids_tensor({0, 1, 1, 0, 0, 1, 1, 0}, 2);  // each expert is wanted four times
      const Tensor weights = random_tensor({4, 2}, DType::f64, 1);
      EXPECT_EQ(dropped_of(ids, weights, 2, {factor, policy, 0}), 2 * (4 - capacity));
    }
  }
}

TEST(Capacity, CountsOnlyValidTokensOfEachGroup) {
  // Group 0 has one valid token (capacity 1), group 1 has two (capacity 1): padding adds no room.
  const std::vector<int32_t> ids_in = {0, -1, 0, 0};
  for (const DropPolicy policy : {DropPolicy::position, DropPolicy::probability}) {
    const Tensor ids = ids_tensor(ids_in, 1);
    const Tensor weights = Tensor::from(std::vector<float>{.5F, 0, .9F, .5F}, {4, 1});
    EXPECT_EQ(dropped_of(ids, weights, 2, {1, policy, 2}), 1);
    EXPECT_EQ(to_doubles(ids), (std::vector<double>{0, -1, 0, -1}));
  }
}

TEST(Capacity, GroupsAreIndependentOfTheirNeighboursAndOfTheTeam) {
  const RandomStream random(4, "capacity");
  std::vector<int32_t> ids;
  for (uint64_t n = 0; n < 1200; n++) {
    ids.push_back(n % 2 == 0 ? static_cast<int32_t>(random.below(n, 4))
                             : static_cast<int32_t>(4 + random.below(n, 4)));
  }
  for (const DropPolicy policy : {DropPolicy::position, DropPolicy::probability}) {
    const CapacitySpec spec{0.8, policy, 20};
    expect_same_for_any_team([&] {
      const Tensor whole = ids_tensor(ids, 2), weights = random_tensor({600, 2}, DType::f32, 1);
      int64_t dropped = dropped_of(whole, weights, 8, spec);
      const Tensor part = ids_tensor(ids, 2).rows(300, 600),
                   part_weights = random_tensor({600, 2}, DType::f32, 1);
      dropped_of(part, part_weights.rows(300, 600), 8, spec);
      EXPECT_EQ(to_doubles(part), to_doubles(whole.rows(300, 600)));
      EXPECT_GT(dropped, 0);
      return std::vector{whole, weights, Tensor::from(std::vector<int64_t>{dropped}, {1})};
    });
  }
}

TEST(Capacity, RouteGradientKeepsDroppedScoresInTheNormalisation) {
  // The dropped weight is a constant 0, but its score stays in the divisor of the kept one.
  EXPECT_TRUE(testing::gradcheck(
      [](auto& in) {
        const Routed r = route(in[0], {}, {}, {}, {});
        dropped_of(r.expert_ids_TK, r.weights_TK, 4, {0.5, DropPolicy::position, 0});
        std::vector<double> kept;
        for (const int32_t id : r.expert_ids_TK.template to_vector<int32_t>()) kept.push_back(id < 0 ? 0 : 1);
        return std::vector{mul(r.weights_TK, Tensor::from(kept, r.weights_TK.shape()))};
      },
      {random_tensor({6, 4}, DType::f64, 1)}));
}

TEST(Capacity, NoRowsDropNothing) {
  for (const DropPolicy policy : {DropPolicy::position, DropPolicy::probability}) {
    EXPECT_EQ(
        dropped_of(Tensor::empty({0, 2}, DType::i32), Tensor::empty({0, 2}, DType::f32), 4, {1, policy, 0}),
        0);
  }
  EXPECT_NE(error_of([] {
              dropped_of(Tensor::zeros({3, 2}, DType::i32), Tensor::zeros({3, 2}, DType::f32), 4,
                         {1, DropPolicy::position, 2});
            }).find("tokens_per_group must divide the 3 rows, got 2"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
