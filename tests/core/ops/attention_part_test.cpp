#include "core/ops/attention_part.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/ops/elementwise.h"
#include "tests/support/attention_cases.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using testing::close;
using testing::documents;
using testing::gradcheck;
using testing::make_spec;
using testing::part_cases;
using testing::PartCase;
using testing::random_tensor;
using testing::to_doubles;

/// By the definition, in double: y, then lse.
std::pair<std::vector<double>, std::vector<double>> naive(const Tensor& qkv, const Tensor& kv,
                                                          const PartCase& p) {
  const AttentionSpec& spec = p.spec;
  const std::vector<double> q = to_doubles(qkv), k = to_doubles(kv);
  const int64_t n = spec.heads / spec.kv_heads, c = spec.head_size, Lq = p.part.queries.rows(),
                Lk = p.part.keys.rows();
  std::vector<int32_t> ids;
  if (spec.document_BS) ids = spec.document_BS.to_vector<int32_t>();
  std::vector<float> slopes;
  if (spec.alibi_slopes_H) slopes = spec.alibi_slopes_H.to_vector<float>();
  const double scale = spec.scale != 0 ? spec.scale : 1 / std::sqrt(static_cast<double>(c));
  std::vector<double> y, lse;
  for (int64_t row = 0; row < spec.batch * Lq; row++) {
    const int64_t b = row / Lq, at = p.part.queries.position(row % Lq);
    for (int64_t head = 0; head < spec.heads; head++) {
      const int64_t g = head / n;
      const auto* query = q.data() + ((row * spec.kv_heads + g) * (n + 2) + head % n) * c;
      std::vector<double> sums(static_cast<size_t>(c), 0);
      double total = 0;
      for (int64_t j = 0; j < Lk; j++) {
        const int64_t key_at = p.part.keys.position(j);
        const auto id = [&](int64_t s) { return ids[static_cast<size_t>(b * spec.seq + s)]; };
        if ((spec.causal && key_at > at) || (!ids.empty() && id(key_at) != id(at))) continue;
        const auto* key = k.data() + ((b * Lk + j) * spec.kv_heads + g) * 2 * c;
        double score = 0;
        for (int64_t i = 0; i < c; i++) score += query[i] * key[i];
        score *= scale;
        if (!slopes.empty()) score -= slopes[static_cast<size_t>(head)] * static_cast<double>(at - key_at);
        total += std::exp(score);
        for (int64_t i = 0; i < c; i++) sums[static_cast<size_t>(i)] += std::exp(score) * key[c + i];
      }
      for (const double sum : sums) y.push_back(total == 0 ? 0 : sum / total);
      lse.push_back(std::log(total));
    }
  }
  return {y, lse};
}

struct Results {
  Tensor y, lse;
};
Results run(const Tensor& qkv, const Tensor& kv, const PartCase& p) {
  const int64_t rows = p.spec.batch * p.part.queries.rows();
  const Results out{Tensor::empty({rows, p.spec.heads * p.spec.head_size}, qkv.dtype()),
                    Tensor::empty({rows, p.spec.heads}, stats_dtype(qkv.dtype()))};
  const auto& kernel = qkv.dtype() == DType::bf16 ? bf16_attention_part_fwd : attention_part_fwd;
  kernel(Device{}, {qkv, kv, out.y, out.lse}, p.spec, p.part);
  return out;
}

TEST(AttentionPart, MatchesTheDefinitionForAllMasksAndRuns) {
  for (const PartCase& p : part_cases()) {
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      Tensor qkv = random_tensor(p.qkv_shape(), dtype == DType::f64 ? dtype : DType::f32, 1),
             kv = random_tensor(p.kv_shape(), qkv.dtype(), 2);
      if (dtype == DType::bf16) {
        qkv = cast(qkv, dtype);
        kv = cast(kv, dtype);
      }
      const Results got = run(qkv, kv, p);
      const auto [y, lse] = naive(qkv, kv, p);
      const testing::Tolerance tolerance = dtype == DType::f64   ? testing::Tolerance{1e-12, 1e-13}
                                           : dtype == DType::f32 ? testing::Tolerance{2e-5, 2e-6}
                                                                 : testing::Tolerance{2e-2, 2e-2};
      EXPECT_TRUE(close(to_doubles(got.y), y, tolerance)) << dtype << " " << p.text();
      const auto logs = to_doubles(got.lse);
      for (size_t i = 0; i < logs.size(); i++) {
        if (std::isinf(lse[i])) {
          EXPECT_EQ(logs[i], lse[i]) << p.text();
        } else {
          EXPECT_NEAR(logs[i], lse[i], dtype == DType::f64 ? 1e-12 : 1e-4) << p.text();
        }
      }
    }
  }
}

TEST(AttentionPart, GradientMatchesNumericForAllMasks) {
  for (const bool causal : {true, false}) {
    for (const bool masked : {true, false}) {
      PartCase p{make_spec(2, 12, 4, 2, 3, causal), {{{1, 6}, {3, 5}}, {{0, 8}, {3, 4}}}};
      if (masked) {
        p.spec.document_BS = documents(2, {2, 7, 3});
        p.spec.alibi_slopes_H = Tensor::from(alibi_slopes(4), {4});
      }
      const auto body = [&](const std::vector<Tensor>& in) {
        return std::vector{attention_part(in[0], in[1], p.spec, p.part)};
      };
      EXPECT_TRUE(gradcheck(
          body, {random_tensor(p.qkv_shape(), DType::f64, 1), random_tensor(p.kv_shape(), DType::f64, 2)}))
          << causal << masked;
    }
  }
}

// The bits of a row do not depend on which other queries there are.
TEST(AttentionPart, SomeQueriesToAllKeysHaveTheBitsOfTheWhole) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    AttentionSpec spec = make_spec(1, 210, 4, 2, 20);
    spec.document_BS = documents(1, {90, 120});
    const Tensor all = random_tensor(testing::packed_shape(spec), DType::f32, 1);
    const Tensor qkv = dtype == DType::bf16 ? cast(all, dtype) : all;
    const Tensor whole = attention(qkv, spec);
    const PartCase p{spec, {{{17, 150}, {40, 33}}, PositionRuns::all(210)}};
    const Tensor part_qkv = Tensor::empty(p.qkv_shape(), dtype), kv = Tensor::empty(p.kv_shape(), dtype);
    part_qkv.rows(0, 40).copy_from(qkv.rows(17, 57));
    part_qkv.rows(40, 73).copy_from(qkv.rows(150, 183));
    for (int64_t s = 0; s < 210; s++) {
      for (int64_t g = 0; g < 2; g++)
        kv.flat((s * 2 + g) * 40, 40).copy_from(qkv.flat((s * 2 + g) * 80 + 40, 40));
    }
    const Tensor y = run(part_qkv, kv, p).y;
    EXPECT_EQ(to_doubles(y.rows(0, 40).clone()), to_doubles(whole.rows(17, 57).clone()));
    EXPECT_EQ(to_doubles(y.rows(40, 73).clone()), to_doubles(whole.rows(150, 183).clone()));
  }
}

TEST(AttentionPart, ResultsOverDifferentKeysMergeIntoThatOverAll) {
  PartCase all{make_spec(1, 140, 4, 2, 8), {{{0, 90}, {20, 50}}, PositionRuns::all(140)}};
  const Tensor qkv = random_tensor(all.qkv_shape(), DType::f64, 1),
               kv = random_tensor(all.kv_shape(), DType::f64, 2);
  const Results want = run(qkv, kv, all);
  PartCase late = all, early = all;
  late.part.keys = {{100, 140}, {40, 0}};  // the first queries see none of these
  early.part.keys = {{0, 100}, {100, 0}};
  const Results got = run(qkv, kv.rows(100, 140).clone(), late);
  EXPECT_EQ(to_doubles(got.lse)[0], -std::numeric_limits<double>::infinity());
  const Results rest = run(qkv, kv.rows(0, 100).clone(), early);
  merge_attention(Device{}, {rest.y, rest.lse, got.y, got.lse});
  EXPECT_TRUE(close(to_doubles(got.y), to_doubles(want.y), {1e-12, 1e-13}));
  EXPECT_TRUE(close(to_doubles(got.lse), to_doubles(want.lse), {1e-12, 1e-13}));
}

TEST(AttentionPart, RunsThatOverlapAreAnError) {
  const PartCase p{make_spec(1, 12, 2, 1, 4), {{{0, 2}, {3, 1}}, PositionRuns::all(12)}};
  try {
    attention_part(Tensor::zeros(p.qkv_shape(), DType::f32), Tensor::zeros(p.kv_shape(), DType::f32), p.spec,
                   p.part);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("runs of ascending positions below 12"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace shoal
