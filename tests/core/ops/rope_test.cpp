#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "core/ops/attention.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using testing::close;
using testing::gradcheck;
using testing::random_tensor;
using testing::to_doubles;

constexpr RopeForm kForms[] = {RopeForm::half, RopeForm::adjacent};

AttentionSpec make_spec(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_size) {
  AttentionSpec spec;
  spec.seq = tokens;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.head_size = head_size;
  return spec;
}

Tensor positions_of(const std::vector<int32_t>& positions) {
  return Tensor::from(positions, {static_cast<int64_t>(positions.size())});
}

TEST(Rope, RP_07_MatchesTheDefinitionAndLeavesTheRestBitUnchanged) {
  for (const RopeForm form : kForms) {
    for (const int64_t rotary : {0, 6}) {
      const AttentionSpec spec = make_spec(5, 4, 2, 10);
      const RopeSpec rope_spec{form, rotary, 100};
      const int64_t size = rotary == 0 ? 10 : rotary;
      const std::vector<int32_t> positions{0, 3, 1, 7, 7};
      const Tensor qkv = random_tensor({5, 2, 4, 10}, DType::f64, 1);
      const std::vector<double> x = qkv.to_vector<double>();
      std::vector<double> expected = x;
      for (size_t t = 0; t < 5; t++) {
        for (size_t g = 0; g < 2; g++) {
          for (size_t h = 0; h < 3; h++) {  // not the value head
            const size_t base = ((t * 2 + g) * 4 + h) * 10;
            for (int64_t i = 0; i < size / 2; i++) {
              const double angle =
                  positions[t] * std::pow(100.0, -2.0 * static_cast<double>(i) / static_cast<double>(size));
              const size_t a = base + static_cast<size_t>(form == RopeForm::half ? i : 2 * i);
              const size_t b = base + static_cast<size_t>(form == RopeForm::half ? i + size / 2 : 2 * i + 1);
              expected[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
              expected[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
            }
          }
        }
      }
      const Tensor y = rope(qkv, spec, rope_spec, rope_table(rope_spec, 10, 8, DType::f64, Device{}),
                            positions_of(positions));
      EXPECT_TRUE(close(to_doubles(y), expected, {1e-14, 1e-14}));
      EXPECT_EQ(y.data<double>(), qkv.data<double>());  // in place
      const auto got = y.to_vector<double>();
      for (size_t row = 0; row < 40; row++) {
        const bool value_head = row % 4 == 3;
        for (size_t i = value_head ? 0 : static_cast<size_t>(size); i < 10; i++) {
          EXPECT_EQ(got[row * 10 + i], x[row * 10 + i]);
        }
      }
    }
  }
}

TEST(Rope, ScoresDependOnRelativePositionsOnly) {
  for (const RopeForm form : kForms) {
    const AttentionSpec spec = make_spec(2, 1, 1, 8);
    const RopeSpec rope_spec{form, 0, 10000};
    const Tensor table = rope_table(rope_spec, 8, 1000, DType::f64, Device{});
    const auto score = [&](int32_t query, int32_t key) {
      const Tensor qkv = random_tensor({2, 1, 3, 8}, DType::f64, 3);
      const auto y = rope(qkv, spec, rope_spec, table, positions_of({query, key})).to_vector<double>();
      double sum = 0;
      for (size_t i = 0; i < 8; i++) sum += y[i] * y[24 + 8 + i];  // query of row 0, key of row 1
      return sum;
    };
    EXPECT_NEAR(score(5, 2), score(905, 902), 1e-11);
    EXPECT_NEAR(score(0, 0), score(77, 77), 1e-11);
    EXPECT_GT(std::abs(score(5, 2) - score(5, 3)), 1e-3);
  }
}

TEST(Rope, GradientMatchesNumericForBothForms) {
  for (const RopeForm form : kForms) {
    for (const int64_t rotary : {0, 4}) {
      const AttentionSpec spec = make_spec(3, 2, 1, 6);
      const RopeSpec rope_spec{form, rotary, 10};
      const Tensor table = rope_table(rope_spec, 6, 4, DType::f64, Device{});
      const auto body = [&](const std::vector<Tensor>& in) {
        return std::vector{rope(in[0], spec, rope_spec, table, positions_of({1, 3, 0}))};
      };
      EXPECT_TRUE(gradcheck(body, {random_tensor({3, 1, 4, 6}, DType::f64, 1)}));
    }
  }
}

TEST(Rope, InFrontOfAttentionHasTheRightGradient) {
  const AttentionSpec spec = make_spec(5, 2, 1, 4);
  const RopeSpec rope_spec;
  const Tensor table = rope_table(rope_spec, 4, 5, DType::f64, Device{});
  const auto body = [&](const std::vector<Tensor>& in) {
    return std::vector{attention(rope(in[0], spec, rope_spec, table, positions_of({0, 1, 2, 3, 4})), spec)};
  };
  EXPECT_TRUE(gradcheck(body, {random_tensor({5, 1, 4, 4}, DType::f64, 1)}));
}

TEST(Rope, IsBitEqualForTwoThreads) {
  const AttentionSpec spec = make_spec(70, 2, 1, 16);
  const RopeSpec rope_spec;
  const Tensor table = rope_table(rope_spec, 16, 70, DType::f32, Device{});
  std::vector<int32_t> positions;
  for (int32_t t = 0; t < 70; t++) positions.push_back(t);
  const Tensor x = random_tensor({70, 1, 4, 16}, DType::f32, 1);
  const auto one = rope(x.clone(), spec, rope_spec, table, positions_of(positions)).to_vector<float>();
  set_num_threads(2);
  const auto two = rope(x.clone(), spec, rope_spec, table, positions_of(positions)).to_vector<float>();
  set_num_threads(1);
  EXPECT_EQ(one, two);
}

TEST(Rope, TableHasDoubleAnglesAtLargePositions) {
  const auto table = rope_table({}, 4, 200001, DType::f32, Device{}).to_vector<float>();
  EXPECT_EQ(table[2 * 200000], static_cast<float>(std::cos(200000.0)));
  EXPECT_EQ(table[2 * 200001 + 2 * 200000], static_cast<float>(std::sin(200000.0)));
}

TEST(Rope, BadSizesAndPositionsAreRefused) {
  const AttentionSpec spec = make_spec(2, 1, 1, 6);
  const Tensor qkv = random_tensor({2, 1, 3, 6}, DType::f32, 1);
  const Tensor table = rope_table({}, 6, 4, DType::f32, Device{});
  try {
    rope(qkv, spec, {}, table, positions_of({0, 4}));
    FAIL() << "expected Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("position 4 of token 1 is outside the table of 4 positions"),
              std::string::npos)
        << error.what();
  }
  EXPECT_THROW(rope_table({.rotary_size = 3}, 6, 4, DType::f32, Device{}), Error);
  EXPECT_THROW(rope_table({.rotary_size = 8}, 6, 4, DType::f32, Device{}), Error);
  EXPECT_THROW(rope(qkv, spec, {.rotary_size = 4}, table, positions_of({0, 1})), Error);
  EXPECT_THROW(rope(qkv, spec, {}, table, positions_of({0})), Error);
}

}  // namespace
}  // namespace shoal
