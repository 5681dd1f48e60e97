#include "core/ops/embedding.h"

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

Tensor ids_tensor(const std::vector<int32_t>& ids) {
  return Tensor::from(ids, {static_cast<int64_t>(ids.size())});
}

TEST(Embedding, CopiesTheRowOfEachId) {
  const Tensor table = Tensor::from(std::vector<float>{0, 1, 10, 11, 20, 21}, {3, 2});
  EXPECT_EQ(embedding(table, ids_tensor({2, 0, 2})).to_vector<float>(),
            (std::vector<float>{20, 21, 0, 1, 20, 21}));
  EXPECT_EQ(embedding(table, ids_tensor({})).shape(), (Shape{0, 2}));
  const Tensor low = embedding(cast(table, DType::bf16), ids_tensor({1}));
  EXPECT_EQ(testing::to_doubles(low), (std::vector<double>{10, 11}));
}

TEST(Embedding, GradientMatchesNumericWithRepeatedAndUnusedIds) {
  for (const std::vector<int32_t>& ids : {std::vector<int32_t>{}, {1}, {3, 0, 3, 3, 1}}) {
    const Tensor table = random_tensor({5, 3}, DType::f64, 1);
    EXPECT_TRUE(gradcheck([&](auto& in) { return std::vector{embedding(in[0], ids_tensor(ids))}; }, {table}));
    EXPECT_TRUE(gradcheck([&](auto& in) { return std::vector{embedding(scale(in[0], 2), ids_tensor(ids))}; },
                          {table}));
  }
}

TEST(Embedding, GradientIsSummedInTokenOrderForAnyNumberOfThreads) {
  std::vector<int32_t> ids;
  const RandomStream random(1, "ids");
  for (uint64_t t = 0; t < 700; t++) ids.push_back(static_cast<int32_t>(random.below(t, 9)));
  const Tensor dy = random_tensor({700, 200}, DType::f32, 2);
  std::vector<float> want(static_cast<size_t>(9 * 200));
  const std::vector<float> dys = dy.to_vector<float>();
  for (size_t t = 0; t < ids.size(); t++) {
    for (size_t d = 0; d < 200; d++) want[static_cast<size_t>(ids[t]) * 200 + d] += dys[t * 200 + d];
  }
  expect_same_for_any_team([&] {
    const Tensor dweight = Tensor::zeros({9, 200}, DType::f32);
    embedding_bwd(Device{}, dy, ids_tensor(ids), dweight, TablePart::whole(dweight));
    EXPECT_EQ(dweight.to_vector<float>(), want);
    return std::vector{dweight};
  });
}

TEST(Embedding, Bf16GradientAddsIntoAnF32Table) {
  const Tensor dweight = Tensor::zeros({2, 2}, DType::f32);
  const Tensor dy = cast(Tensor::from(std::vector<float>{1, 2, 3, 4}, {2, 2}), DType::bf16);
  embedding_bwd(Device{}, dy, ids_tensor({1, 1}), dweight, TablePart::whole(dweight));
  EXPECT_EQ(dweight.to_vector<float>(), (std::vector<float>{0, 0, 4, 6}));
}

TEST(Embedding, APartOfTheTableGivesZerosForOtherIdsAndNoGradientOfThem) {
  const Tensor table = random_tensor({2, 3}, DType::f64, 1);
  const std::vector<int32_t> ids = {4, 2, 3, 0, 3};
  const TablePart part{2, 5};  // rows 2 and 3 of five
  const Tensor y = embedding(table, ids_tensor(ids), part);
  const std::vector<double> rows = testing::to_doubles(table), got = testing::to_doubles(y);
  for (size_t t = 0; t < ids.size(); t++) {
    for (size_t d = 0; d < 3; d++) {
      const bool here = ids[t] == 2 || ids[t] == 3;
      EXPECT_EQ(got[t * 3 + d], here ? rows[static_cast<size_t>(ids[t] - 2) * 3 + d] : 0.0);
    }
  }
  EXPECT_TRUE(
      gradcheck([&](auto& in) { return std::vector{embedding(in[0], ids_tensor(ids), part)}; }, {table}));
}

TEST(Embedding, ErrorNamesTheIdItsPositionAndTheTableSize) {
  const Tensor table = Tensor::zeros({5, 3}, DType::f32);
  EXPECT_NE(error_of([&] {
              embedding(table, ids_tensor({0, 4, 5}));
            }).find("embedding: expected ids in [0, 5), got 5 at position 2"),
            std::string::npos);
  EXPECT_NE(error_of([&] { embedding(table, ids_tensor({-1})); }).find("got -1 at position 0"),
            std::string::npos);
  EXPECT_NE(error_of([&] { embedding(table, Tensor::zeros({1}, DType::i64)); }).find("expected i32 ids"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal
