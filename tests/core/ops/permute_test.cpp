#include "core/ops/permute.h"

#include "core/ops/elementwise.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::close;
using testing::error_of;
using testing::expect_same_for_any_team;
using testing::gradcheck;
using testing::random_tensor;
using testing::to_doubles;

/// A random assignment of T tokens to K slots each; about a quarter of the slots dropped.
struct Plan {
  Tensor row_N, choice_N, slots_TK;
  int64_t num_rows = 0;
};
Plan make_plan(int64_t num_tokens, int64_t top_k, uint64_t seed) {
  const RandomStream random(seed, "plan");
  std::vector<std::pair<uint32_t, int64_t>> order;
  for (int64_t n = 0; n < num_tokens * top_k; n++) {
    const uint32_t bits = random.bits(static_cast<uint64_t>(n));
    if (bits % 4 != 0) order.emplace_back(bits, n);
  }
  std::sort(order.begin(), order.end());
  std::vector<int64_t> row, choice, slots(static_cast<size_t>(num_tokens * top_k), -1);
  for (const auto& [bits, n] : order) {
    slots[static_cast<size_t>(n)] = static_cast<int64_t>(row.size());
    row.push_back(n / top_k);
    choice.push_back(n % top_k);
  }
  const auto count = static_cast<int64_t>(row.size());
  return {Tensor::from(row, {count}), Tensor::from(choice, {count}), Tensor::from(slots, {num_tokens, top_k}),
          count};
}

struct Sizes {
  int64_t tokens, top_k, width;
};
constexpr Sizes kSizes[] = {{0, 2, 3}, {1, 1, 1}, {5, 2, 7}, {9, 3, 300}};

TEST(Permute, GatherAndCombineMatchPlainLoops) {
  for (const auto& [tokens, top_k, width] : kSizes) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Plan plan = make_plan(tokens, top_k, 3);
      const Tensor x = random_tensor({tokens, width}, dtype, 1);
      const Tensor gathered = gather_rows(x, plan.row_N, plan.slots_TK);
      const auto xs = to_doubles(x), ys = to_doubles(gathered);
      const auto row = plan.row_N.to_vector<int64_t>(), slots = plan.slots_TK.to_vector<int64_t>();
      for (size_t n = 0; n < row.size(); n++) {
        for (int64_t d = 0; d < width; d++) {
          EXPECT_EQ(ys[n * static_cast<size_t>(width) + static_cast<size_t>(d)],
                    xs[static_cast<size_t>(row[n] * width + d)]);
        }
      }
      const Tensor weights = random_tensor({tokens, top_k}, dtype, 2);
      const auto ws = to_doubles(weights);
      std::vector<double> want(static_cast<size_t>(tokens * width), 0.0);
      for (int64_t n = 0; n < tokens * top_k; n++) {
        const int64_t slot = slots[static_cast<size_t>(n)];
        for (int64_t d = 0; d < width && slot >= 0; d++) {
          want[static_cast<size_t>(n / top_k * width + d)] +=
              ws[static_cast<size_t>(n)] * ys[static_cast<size_t>(slot * width + d)];
        }
      }
      const Tensor y = combine_rows(gathered, weights, plan.slots_TK, plan.row_N, plan.choice_N);
      EXPECT_TRUE(close(to_doubles(y), want, {dtype == DType::f32 ? 1e-5 : 1e-13, 1e-6}));
    }
  }
}

TEST(Permute, GradientsMatchNumericOnes) {
  for (const auto& [tokens, top_k, width] : kSizes) {
    if (width > 100) continue;
    const Plan plan = make_plan(tokens, top_k, 3);
    const Tensor x = random_tensor({tokens, width}, DType::f64, 1);
    const Tensor rows = random_tensor({plan.num_rows, width}, DType::f64, 4);
    const Tensor weights = random_tensor({tokens, top_k}, DType::f64, 2);
    EXPECT_TRUE(
        gradcheck([&](auto& in) { return std::vector{gather_rows(in[0], plan.row_N, plan.slots_TK)}; }, {x}));
    const auto combine = [&](auto& in) {
      // scale makes a tensor that combine alone holds, so that backward may work in place.
      return std::vector{combine_rows(scale(in[0], 2), in[1], plan.slots_TK, plan.row_N, plan.choice_N)};
    };
    EXPECT_TRUE(gradcheck(combine, {rows, weights}));
    EXPECT_TRUE(gradcheck(
        [&](auto& in) {
          return std::vector{combine_rows(in[0], weights, plan.slots_TK, plan.row_N, plan.choice_N)};
        },
        {rows}));
    EXPECT_TRUE(gradcheck(
        [&](auto& in) {
          return std::vector{combine_rows(rows, in[0], plan.slots_TK, plan.row_N, plan.choice_N)};
        },
        {weights}));
    EXPECT_TRUE(gradcheck(
        [&](auto& in) {
          return std::vector{combine_rows(in[0], {}, plan.slots_TK, plan.row_N, plan.choice_N)};
        },
        {rows}));
  }
}

TEST(Permute, CAP_07_TokenWithoutAnySlotGetsZerosAndAFiniteGradient) {
  const Tensor slots = Tensor::from(std::vector<int64_t>{-1, -1, 0, -1}, {2, 2});
  const Tensor row = Tensor::from(std::vector<int64_t>{1}, {1}),
               choice = Tensor::from(std::vector<int64_t>{0}, {1});
  std::vector<Leaf> leaves(2);
  Tensor x = Tensor::from(std::vector<float>{3, 4}, {1, 2});
  Tensor weights = Tensor::from(std::vector<float>{0, 0, 0.5F, 0}, {2, 2});
  x.grad_ref.leaf = &leaves[0];
  weights.grad_ref.leaf = &leaves[1];
  Tape tape;
  const Tensor y = combine_rows(x, weights, slots, row, choice);
  EXPECT_EQ(y.to_vector<float>(),
            (std::vector<float>{0, 0, 1.5F, 2}));  // the kept weight is not renormalised
  tape.backward(sum(y));
  EXPECT_EQ(leaves[0].grad.to_vector<float>(), (std::vector<float>{0.5F, 0.5F}));
  EXPECT_EQ(leaves[1].grad.to_vector<float>(), (std::vector<float>{0, 0, 7, 0}));
}

TEST(Permute, PermuteRowsIsUndoneByItsInverse) {
  const Tensor index = Tensor::from(std::vector<int64_t>{2, 0, 1}, {3});
  const Tensor inverse = Tensor::from(std::vector<int64_t>{1, 2, 0}, {3});
  const Tensor x = random_tensor({3, 5}, DType::f64, 1);
  EXPECT_EQ(to_doubles(permute_rows(permute_rows(x, index, inverse), inverse, index)), to_doubles(x));
  EXPECT_EQ(to_doubles(permute_rows(x, index, inverse).rows(0, 1)), to_doubles(x.rows(2, 3)));
  EXPECT_TRUE(gradcheck([&](auto& in) { return std::vector{permute_rows(in[0], index, inverse)}; }, {x}));
}

TEST(Permute, Bf16RowsAreSummedInF32) {
  const Tensor slots = Tensor::from(std::vector<int64_t>{0, 1, 2}, {1, 3});
  const Tensor zero = Tensor::from(std::vector<int64_t>{0, 0, 0}, {3});
  const Tensor choice = Tensor::from(std::vector<int64_t>{0, 1, 2}, {3});
  const Tensor x = cast(Tensor::from(std::vector<float>{256, 1, 1}, {3, 1}), DType::bf16);
  const Tensor ones = Tensor::from(std::vector<float>{1, 1, 1}, {1, 3});
  EXPECT_EQ(to_doubles(combine_rows(x, ones, slots, zero, choice)), (std::vector<double>{258}));
  EXPECT_EQ(to_doubles(gather_rows(x.rows(0, 1), zero, slots)), (std::vector<double>{256, 256, 256}));
}

TEST(Permute, NM_03_IsBitEqualForAnyNumberOfThreads) {
  const Plan plan = make_plan(301, 3, 5);
  expect_same_for_any_team([&] {
    std::vector<Leaf> leaves(2);
    Tensor x = random_tensor({301, 130}, DType::f32, 1), weights = random_tensor({301, 3}, DType::f32, 2);
    x.grad_ref.leaf = &leaves[0];
    weights.grad_ref.leaf = &leaves[1];
    Tape tape;
    const Tensor y = combine_rows(gather_rows(x, plan.row_N, plan.slots_TK), weights, plan.slots_TK,
                                  plan.row_N, plan.choice_N);
    tape.backward({y}, {random_tensor(y.shape(), DType::f32, 3)});
    return std::vector{y.detach(), leaves[0].grad, leaves[1].grad};
  });
}

TEST(Permute, ErrorsNameTheBadIndexAndItsRange) {
  const Tensor x = Tensor::zeros({2, 3}, DType::f32);
  const Tensor bad = Tensor::from(std::vector<int64_t>{1, 2}, {2});
  EXPECT_NE(error_of([&] {
              permute_rows(x, bad, bad);
            }).find("gather_rows: expected row indices in [-1, 2), got 2 at 1"),
            std::string::npos);
  const Tensor slots = Tensor::from(std::vector<int64_t>{-2, 0}, {1, 2});
  EXPECT_NE(error_of([&] {
              combine_rows(x, {}, slots, bad, bad);
            }).find("combine_rows: expected row indices in [-1, 2), got -2 at 0"),
            std::string::npos);
  EXPECT_NE(error_of([&] { gather_rows(x, bad, slots); }).find("slots [T, K] for the 2 rows of x"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
