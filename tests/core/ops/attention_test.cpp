#include "core/ops/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "tests/support/attention_cases.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using testing::attention_cases;
using testing::close;
using testing::documents;
using testing::gradcheck;
using testing::make_spec;
using testing::packed_shape;
using testing::random_tensor;
using testing::to_doubles;

/// Attention by the definition, in double.
std::vector<double> naive(const Tensor& qkv, const AttentionSpec& spec) {
  const std::vector<double> x = to_doubles(qkv);
  const int64_t per_group = spec.heads / spec.kv_heads, c = spec.head_size;
  const auto at = [&](int64_t b, int64_t s, int64_t g, int64_t h, int64_t i) {
    return x[static_cast<size_t>((((b * spec.seq + s) * spec.kv_heads + g) * (per_group + 2) + h) * c + i)];
  };
  std::vector<int32_t> ids;
  if (spec.document_BS) ids = spec.document_BS.to_vector<int32_t>();
  std::vector<float> slopes;
  if (spec.alibi_slopes_H) slopes = spec.alibi_slopes_H.to_vector<float>();
  const double scale = spec.scale != 0 ? spec.scale : 1 / std::sqrt(static_cast<double>(c));
  std::vector<double> y;
  for (int64_t b = 0; b < spec.batch; b++) {
    for (int64_t q = 0; q < spec.seq; q++) {
      for (int64_t head = 0; head < spec.heads; head++) {
        const int64_t g = head / per_group, h = head % per_group;
        std::vector<double> p(static_cast<size_t>(spec.seq), 0);
        double total = 0;
        for (int64_t k = 0; k < spec.seq; k++) {
          const auto id = [&](int64_t s) { return ids[static_cast<size_t>(b * spec.seq + s)]; };
          if ((spec.causal && k > q) || (!ids.empty() && id(q) != id(k))) continue;
          double score = 0;
          for (int64_t i = 0; i < c; i++) score += at(b, q, g, h, i) * at(b, k, g, per_group, i);
          score *= scale;
          if (!slopes.empty()) score -= slopes[static_cast<size_t>(head)] * static_cast<double>(q - k);
          total += p[static_cast<size_t>(k)] = std::exp(score);
        }
        for (int64_t i = 0; i < c; i++) {
          double sum = 0;
          for (int64_t k = 0; k < spec.seq; k++) {
            sum += p[static_cast<size_t>(k)] / total * at(b, k, g, per_group + 1, i);
          }
          y.push_back(sum);
        }
      }
    }
  }
  return y;
}

TEST(Attention, MatchesTheDefinitionForAllMasksAndOddSizes) {
  for (const AttentionSpec& spec : attention_cases()) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Tensor qkv = random_tensor(packed_shape(spec), dtype, 1);
      const testing::Tolerance tolerance =
          dtype == DType::f32 ? testing::Tolerance{2e-5, 2e-6} : testing::Tolerance{1e-12, 1e-13};
      const Tensor y = attention(qkv, spec);
      EXPECT_EQ(y.shape(), Shape({spec.batch * spec.seq, spec.heads * spec.head_size}));
      EXPECT_TRUE(close(to_doubles(y), naive(qkv, spec), tolerance))
          << dtype << " B " << spec.batch << " S " << spec.seq << " H " << spec.heads << " G "
          << spec.kv_heads << " C " << spec.head_size << " causal " << spec.causal << " documents "
          << spec.document_BS.defined() << " alibi " << spec.alibi_slopes_H.defined();
    }
  }
}

TEST(Attention, GradientMatchesNumericForAllMasks) {
  std::vector<AttentionSpec> cases = {make_spec(1, 1, 2, 1, 3), make_spec(2, 5, 4, 2, 3),
                                      make_spec(1, 11, 3, 1, 4), make_spec(1, 6, 2, 2, 5, false)};
  for (const bool causal : {true, false}) {
    AttentionSpec masked = make_spec(2, 9, 2, 1, 4, causal);
    masked.document_BS = documents(2, {1, 5, 3});
    cases.push_back(masked);
    masked.alibi_slopes_H = Tensor::from(alibi_slopes(2), {2});
    masked.scale = 0.7;
    cases.push_back(masked);
  }
  for (const AttentionSpec& spec : cases) {
    const auto body = [&](const std::vector<Tensor>& in) { return std::vector{attention(in[0], spec)}; };
    EXPECT_TRUE(gradcheck(body, {random_tensor(packed_shape(spec), DType::f64, 1)}))
        << "S " << spec.seq << " causal " << spec.causal;
  }
}

/// Gradient of sum(y * dy) with respect to qkv.
Tensor gradient(const Tensor& qkv, const AttentionSpec& spec, uint64_t seed = 9) {
  Tensor x = qkv.clone();
  Leaf leaf;
  leaf.grad_dtype = qkv.dtype();
  x.grad_ref.leaf = &leaf;
  Tape tape;
  const Tensor y = attention(x, spec);
  tape.backward({y}, {random_tensor(y.shape(), y.dtype(), seed)});
  return leaf.grad;
}

/// The same by the chain rule on whole matrices, in double.
std::vector<double> naive_gradient(const Tensor& qkv, const AttentionSpec& spec, uint64_t seed = 9) {
  const std::vector<double> x = to_doubles(qkv);
  const int64_t n = spec.heads / spec.kv_heads, c = spec.head_size, seq = spec.seq;
  const auto dy = to_doubles(random_tensor({spec.batch * seq, spec.heads * c}, qkv.dtype(), seed));
  std::vector<int32_t> ids;
  if (spec.document_BS) ids = spec.document_BS.to_vector<int32_t>();
  const double scale = 1 / std::sqrt(static_cast<double>(c));
  std::vector<double> dx(x.size(), 0);
  for (int64_t b = 0; b < spec.batch; b++) {
    for (int64_t head = 0; head < spec.heads; head++) {
      const int64_t g = head / n;
      const auto at = [&](int64_t s, int64_t h) {
        return static_cast<size_t>((((b * seq + s) * spec.kv_heads + g) * (n + 2) + h) * c);
      };
      for (int64_t q = 0; q < seq; q++) {
        std::vector<double> p(static_cast<size_t>(seq), 0), dp(static_cast<size_t>(seq), 0);
        double total = 0, delta = 0;
        for (int64_t k = 0; k < seq; k++) {
          const auto id = [&](int64_t s) { return ids[static_cast<size_t>(b * seq + s)]; };
          if ((spec.causal && k > q) || (!ids.empty() && id(q) != id(k))) continue;
          double score = 0;
          for (int64_t i = 0; i < c; i++) {
            const auto o = static_cast<size_t>(i);
            score += x[at(q, head % n) + o] * x[at(k, n) + o];
            dp[static_cast<size_t>(k)] +=
                dy[static_cast<size_t>(((b * seq + q) * spec.heads + head) * c) + o] * x[at(k, n + 1) + o];
          }
          total += p[static_cast<size_t>(k)] = std::exp(score * scale);
        }
        for (size_t k = 0; k < p.size(); k++) delta += (p[k] /= total) * dp[k];
        for (int64_t k = 0; k < seq; k++) {
          const double pk = p[static_cast<size_t>(k)], ds = pk * (dp[static_cast<size_t>(k)] - delta) * scale;
          for (int64_t i = 0; i < c; i++) {
            const auto o = static_cast<size_t>(i);
            dx[at(q, head % n) + o] += ds * x[at(k, n) + o];
            dx[at(k, n) + o] += ds * x[at(q, head % n) + o];
            dx[at(k, n + 1) + o] += pk * dy[static_cast<size_t>(((b * seq + q) * spec.heads + head) * c) + o];
          }
        }
      }
    }
  }
  return dx;
}

TEST(Attention, GradientMatchesTheDefinitionAcrossManyBlocks) {
  for (const bool causal : {true, false}) {
    for (const bool packed : {true, false}) {
      AttentionSpec spec = make_spec(2, 215, 4, 2, 20, causal);
      if (packed) spec.document_BS = documents(2, {70, 1, 100, 44});
      for (const DType dtype : {DType::f32, DType::f64}) {
        const Tensor qkv = random_tensor(packed_shape(spec), dtype, 4);
        const testing::Tolerance tolerance =
            dtype == DType::f32 ? testing::Tolerance{1e-4, 1e-5} : testing::Tolerance{1e-11, 1e-12};
        EXPECT_TRUE(close(to_doubles(gradient(qkv, spec)), naive_gradient(qkv, spec), tolerance))
            << dtype << " causal " << causal << " packed " << packed;
      }
    }
  }
}

TEST(Attention, IsBitEqualForAnyNumberOfThreadsAndWhenRanksRunAtOnce) {
  const AttentionSpec spec = make_spec(2, 150, 4, 2, 16);
  const Tensor qkv = random_tensor(packed_shape(spec), DType::f32, 1);
  const auto y = attention(qkv, spec).to_vector<float>(), dx = gradient(qkv, spec).to_vector<float>();
  set_num_threads(2);
  EXPECT_EQ(attention(qkv, spec).to_vector<float>(), y);
  EXPECT_EQ(gradient(qkv, spec).to_vector<float>(), dx);
  set_num_threads(1);
  std::vector<std::vector<float>> results(3);
  std::vector<std::thread> ranks;
  for (auto& result : results) ranks.emplace_back([&] { result = gradient(qkv, spec).to_vector<float>(); });
  for (std::thread& rank : ranks) rank.join();
  for (const auto& result : results) EXPECT_EQ(result, dx);
}

TEST(Attention, EditingOneDocumentLeavesTheOthersBitUnchanged) {
  AttentionSpec spec = make_spec(1, 180, 2, 1, 16);
  spec.document_BS = documents(1, {50, 130});
  const Tensor qkv = random_tensor(packed_shape(spec), DType::f32, 1);
  Tensor edited = qkv.clone();
  edited.rows(0, 50).copy_from(random_tensor({50, 1, 4, 16}, DType::f32, 2, 30));
  const auto check = [](const Tensor& a, const Tensor& b) {
    EXPECT_EQ(a.rows(50, 180).clone().to_vector<float>(), b.rows(50, 180).clone().to_vector<float>());
    EXPECT_NE(a.rows(0, 50).clone().to_vector<float>(), b.rows(0, 50).clone().to_vector<float>());
  };
  check(attention(qkv, spec), attention(edited, spec));
  check(gradient(qkv, spec), gradient(edited, spec));
}

TEST(Attention, LargeScoresNeitherOverflowNorLoseTheMaximum) {
  const AttentionSpec spec = make_spec(1, 120, 1, 1, 8, false);
  const Tensor qkv = random_tensor(packed_shape(spec), DType::f32, 1, 40);
  EXPECT_TRUE(close(to_doubles(attention(qkv, spec)),
                    [&] {
                      // exp of raw scores overflows even double: compare with the f64 kernel instead.
                      const auto v = to_doubles(qkv);
                      return to_doubles(attention(Tensor::from(v, qkv.shape()), spec));
                    }(),
                    {1e-3, 2e-2}));
  const Tensor dx = gradient(qkv, spec);
  for (const float g : dx.to_vector<float>()) EXPECT_TRUE(std::isfinite(g));
}

TEST(Attention, NanInAQueryReachesItsOutput) {
  const AttentionSpec spec = make_spec(1, 3, 1, 1, 4);
  auto values = random_tensor(packed_shape(spec), DType::f32, 1).to_vector<float>();
  values[12] = std::nanf("");  // query of token 1
  const auto y = attention(Tensor::from(values, packed_shape(spec)), spec).to_vector<float>();
  EXPECT_TRUE(std::isfinite(y[0]) && std::isnan(y[4]) && std::isfinite(y[8]));
}

TEST(Attention, ExtraMemoryIsLinearInTheSequence) {
  const AttentionSpec spec = make_spec(1, 2048, 2, 1, 16);
  const Tensor qkv = random_tensor(packed_shape(spec), DType::f32, 1);
  DeviceRuntime& runtime = device_runtime(DeviceType::cpu);
  runtime.reset_peak();
  const int64_t before = runtime.stats().current_bytes;
  gradient(qkv, spec);
  const int64_t growth = runtime.stats().peak_bytes - before;
  // qkv copy, its gradient twice, y, dy, and tiles of a few hundred KiB; one score matrix would be 16 MiB.
  EXPECT_LT(growth, int64_t{4} << 20);
}

TEST(Attention, DecodingTokenByTokenOrInChunksEqualsTheWholeSequence) {
  for (const bool alibi : {false, true}) {
    AttentionSpec whole = make_spec(2, 131, 4, 2, 12);
    if (alibi) whole.alibi_slopes_H = Tensor::from(alibi_slopes(4), {4});
    const Tensor qkv = random_tensor(packed_shape(whole), DType::f64, 1);
    const Tensor expected = attention(qkv, whole);
    const Tensor cache_k = Tensor::zeros({2, 140, 2, 12}, DType::f64), cache_v = Tensor::zeros_like(cache_k);
    int64_t length = 0;
    for (const int64_t count : {70, 1, 1, 40, 19}) {
      AttentionSpec step = whole;
      step.seq = count;
      const Tensor rows = Tensor::empty(packed_shape(step), DType::f64);
      const Tensor y = Tensor::empty({2 * count, 48}, DType::f64);
      for (int64_t b = 0; b < 2; b++) {
        rows.rows(b * count, (b + 1) * count).copy_from(qkv.rows(b * 131 + length, b * 131 + length + count));
      }
      attention_decode(Device{}, {rows, cache_k, cache_v, y, length}, step);
      for (int64_t b = 0; b < 2; b++) {
        EXPECT_TRUE(close(y.rows(b * count, (b + 1) * count).clone(),
                          expected.rows(b * 131 + length, b * 131 + length + count).clone(), {1e-12, 1e-13}))
            << "at " << length;
      }
      length += count;
    }
    AttentionSpec too_long = whole;
    too_long.seq = 10;
    EXPECT_THROW(attention_decode(Device{},
                                  {Tensor::empty(packed_shape(too_long), DType::f64), cache_k, cache_v,
                                   Tensor::empty({20, 48}, DType::f64), length},
                                  too_long),
                 Error);
  }
}

TEST(Attention, AlibiSlopesAreTheSeriesOfThePaper) {
  EXPECT_EQ(alibi_slopes(4), (std::vector<float>{0.25F, 0.0625F, 0.015625F, 0.00390625F}));
  EXPECT_EQ(alibi_slopes(1), (std::vector<float>{0.00390625F}));
  const auto six = alibi_slopes(6);
  ASSERT_EQ(six.size(), 6U);
  EXPECT_EQ(six[3], 0.00390625F);
  EXPECT_EQ(six[4], 0.5F);
  EXPECT_EQ(six[5], 0.125F);
}

TEST(Attention, ErrorsNameTheExpectedLayout) {
  const AttentionSpec spec = make_spec(2, 3, 4, 2, 8);
  try {
    attention(random_tensor({6, 4, 3, 8}, DType::f32, 1), spec);
    FAIL() << "expected Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("[6, 2, 4, 8], got [6, 4, 3, 8]"), std::string::npos)
        << error.what();
  }
  AttentionSpec unsorted = spec;
  unsorted.document_BS = Tensor::from(std::vector<int32_t>{0, 1, 1, 2, 1, 2}, {2, 3});
  try {
    attention(random_tensor(packed_shape(spec), DType::f32, 1), unsorted);
    FAIL() << "expected Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("row 1 has 2 before 1 at position 1"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(attention(random_tensor({6, 2, 4, 8}, DType::f32, 1), make_spec(2, 3, 4, 3, 8)), Error);
}

}  // namespace
}  // namespace shoal
