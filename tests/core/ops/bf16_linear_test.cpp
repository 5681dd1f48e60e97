#include "core/ops/bf16_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "tests/support/bf16_tensor.h"
#include "tests/support/expect_close.h"

namespace shoal {
namespace {

using testing::bf16_tensor;
using testing::close;
using testing::random_tensor;
using testing::to_doubles;

double rounded(double v) {
  return static_cast<float>(BFloat16(static_cast<float>(v)));
}

struct Sizes {
  std::vector<int64_t> rows;
  int64_t n, k;
  int64_t total() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  int64_t groups() const { return static_cast<int64_t>(rows.size()); }
};
// Widths around the panel (64), the vectors and the pairs; the last ones are summed in several blocks of
// inputs.
const std::vector<Sizes> kSizes = {{{1}, 1, 1},        {{3, 0, 17, 1}, 64, 64}, {{3, 0, 17, 1}, 65, 33},
                                   {{0, 0}, 5, 7},     {{7, 13}, 7, 130},       {{5}, 63, 2},
                                   {{300}, 100, 31},   {{2, 5}, 17, 4101},      {{6, 1}, 4099, 18},
                                   {{520, 1}, 70, 66}, {{4}, 129, 128}};

/// y[rows of g] = a[rows of g] * m[g]^T in double.
std::vector<double> naive_rows(const Sizes& c, const Tensor& a, const Tensor& m, int64_t outputs,
                               int64_t inputs, bool transposed) {
  const std::vector<double> x = to_doubles(a), w = to_doubles(m);
  std::vector<double> y;
  int64_t row = 0;
  for (int64_t g = 0; g < c.groups(); g++) {
    for (int64_t r = 0; r < c.rows[static_cast<size_t>(g)]; r++, row++) {
      for (int64_t o = 0; o < outputs; o++) {
        double sum = 0;
        for (int64_t i = 0; i < inputs; i++) {
          const int64_t at = g * outputs * inputs + (transposed ? i * outputs + o : o * inputs + i);
          sum += x[static_cast<size_t>(row * inputs + i)] * rounded(w[static_cast<size_t>(at)]);
        }
        y.push_back(sum);
      }
    }
  }
  return y;
}

TEST(Bf16Products, MatchDoubleSumsOfTheRoundedOperands) {
  for (const Sizes& c : kSizes) {
    const Tensor weight = random_tensor({c.groups(), c.n, c.k}, DType::f32, 1);
    const Tensor x = bf16_tensor({c.total(), c.k}, 2), dy = bf16_tensor({c.total(), c.n}, 3);
    const PackedWeight copies = packed_weight(weight);
    const Tensor y = Tensor::empty({c.total(), c.n}, DType::f32),
                 dx = Tensor::empty({c.total(), c.k}, DType::f32);
    packed_gemm_rows(Device{}, PackedUse::forward, x, copies.forward, y, c.rows);
    packed_gemm_rows(Device{}, PackedUse::backward, dy, copies.backward, dx, c.rows);
    const double scale = 3e-7 * std::sqrt(static_cast<double>(std::max(c.n, c.k)));
    EXPECT_TRUE(close(to_doubles(y), naive_rows(c, x, weight, c.n, c.k, false), {1e-6, 10 * scale}))
        << c.n << ' ' << c.k;
    EXPECT_TRUE(close(to_doubles(dx), naive_rows(c, dy, weight, c.k, c.n, true), {1e-6, 10 * scale}))
        << c.n << ' ' << c.k;
    const Tensor low = Tensor::empty({c.total(), c.n}, DType::bf16);
    packed_gemm_rows(Device{}, PackedUse::forward, x, copies.forward, low, c.rows);
    EXPECT_EQ(to_doubles(low), to_doubles(cast(y, DType::bf16))) << "rounded once";
  }
}

TEST(Bf16Products, WeightGradientsSumOverTheRowsOfTheirGroup) {
  for (const Sizes& c : kSizes) {
    const Tensor x = bf16_tensor({c.total(), c.k}, 2), dy = bf16_tensor({c.total(), c.n}, 3);
    const std::vector<double> a = to_doubles(dy), b = to_doubles(x);
    std::vector<double> want;
    for (int64_t g = 0, row = 0; g < c.groups(); row += c.rows[static_cast<size_t>(g)], g++) {
      for (int64_t n = 0; n < c.n; n++) {
        for (int64_t k = 0; k < c.k; k++) {
          double sum = 0;
          for (int64_t r = row; r < row + c.rows[static_cast<size_t>(g)]; r++)
            sum += a[static_cast<size_t>(r * c.n + n)] * b[static_cast<size_t>(r * c.k + k)];
          want.push_back(sum);
        }
      }
    }
    const Tensor grad = Tensor::empty({c.groups(), c.n, c.k}, DType::f32);
    fill(Device{}, grad, std::numeric_limits<double>::quiet_NaN());  // written, never read
    bf16_gemm_reduce(Device{}, false, dy, x, grad, c.rows);
    EXPECT_TRUE(close(to_doubles(grad), want, {1e-5, 1e-4})) << c.n << ' ' << c.k;
    const Tensor sum = random_tensor({c.groups(), c.n, c.k}, DType::f32, 9);
    std::vector<double> want_sum = to_doubles(sum);
    for (size_t i = 0; i < want.size(); i++) want_sum[i] += want[i];
    bf16_gemm_reduce(Device{}, true, dy, x, sum, c.rows);
    EXPECT_TRUE(close(to_doubles(sum), want_sum, {1e-5, 1e-4})) << c.n << ' ' << c.k;
  }
}

TEST(Bf16Products, BitsDoNotDependOnThreadsOrOnNeighbouringRows) {
  const Sizes c{{700, 3, 0, 91}, 200, 96};
  const Tensor weight = random_tensor({4, c.n, c.k}, DType::f32, 1), x = bf16_tensor({c.total(), c.k}, 2);
  const Tensor dy = bf16_tensor({c.total(), c.n}, 3);
  const PackedWeight copies = packed_weight(weight);
  const auto run = [&](int threads) {
    set_num_threads(threads);
    const Tensor y = Tensor::empty({c.total(), c.n}, DType::f32),
                 grad = Tensor::empty({4, c.n, c.k}, DType::f32);
    packed_gemm_rows(Device{}, PackedUse::forward, x, copies.forward, y, c.rows);
    bf16_gemm_reduce(Device{}, false, dy, x, grad, c.rows);
    set_num_threads(1);
    return std::pair(y.to_vector<float>(), grad.to_vector<float>());
  };
  const auto one = run(1);
  EXPECT_EQ(run(2), one);
  EXPECT_EQ(run(5), one);
  const std::vector<int64_t> last{1};
  const Tensor alone = Tensor::empty({1, c.n}, DType::f32);
  packed_gemm_rows(Device{}, PackedUse::forward, x.rows(702, 703), packed_weight(weight.rows(1, 2)).forward,
                   alone, last);
  EXPECT_EQ(alone.to_vector<float>(),
            std::vector<float>(one.first.begin() + 702 * c.n, one.first.begin() + 703 * c.n));
}

TEST(Bf16Products, ANaNStaysInItsRow) {
  const Sizes c{{2}, 5, 7};  // odd: the last pair of row 0 must not reach into row 1
  const Tensor x = bf16_tensor({2, c.k}, 2), weight = random_tensor({c.n, c.k}, DType::f32, 1);
  x.data<BFloat16>()[c.k] = BFloat16(std::numeric_limits<float>::quiet_NaN());
  const Tensor y = Tensor::empty({2, c.n}, DType::f32);
  packed_gemm_rows(Device{}, PackedUse::forward, x, packed_weight(weight).forward, y, c.rows);
  for (int64_t n = 0; n < c.n; n++) {
    EXPECT_TRUE(std::isfinite(y.data<float>()[n]));
    EXPECT_TRUE(std::isnan(y.data<float>()[c.n + n]));
  }
}

TEST(Bf16Linear, ValuesAndGradientsAreThoseOfDoubleOnTheSameRoundedNumbers) {
  const std::vector<int64_t> rows{5, 0, 9};
  const auto exact = [](const Tensor& t) { return cast(t, DType::f64).detach(); };
  const Tensor weight = cast(bf16_tensor({3, 10, 24}, 1), DType::f32);  // values that bf16 holds
  const Tensor bias = random_tensor({3, 10}, DType::f32, 2), x = bf16_tensor({14, 24}, 3),
               dy = bf16_tensor({14, 10}, 4);
  const auto run = [&](Tensor w, Tensor b, Tensor in, const Tensor& seed, std::vector<Leaf>& leaves) {
    Tape tape;
    const DType dtype = w.dtype();
    leaves = std::vector<Leaf>(3);
    for (Leaf& leaf : leaves) leaf.grad_dtype = dtype;
    w.grad_ref.leaf = &leaves[0];
    b.grad_ref.leaf = &leaves[1];
    in.grad_ref.leaf = &leaves[2];
    const Tensor y = grouped_linear(in, w, rows, b);
    tape.backward({y}, {seed});
    return y.detach();
  };
  std::vector<Leaf> got, want;
  const Tensor y = run(weight, bias, x, dy, got);
  const Tensor y64 = run(exact(weight), exact(bias), exact(x), exact(dy), want);
  EXPECT_EQ(y.dtype(), DType::bf16);
  EXPECT_TRUE(close(y, y64, {1.0 / 128, 1.0 / 128}));  // two roundings: product, then sum with the bias
  EXPECT_TRUE(close(got[0].grad, want[0].grad, {1e-5, 1e-5}));
  EXPECT_TRUE(close(got[1].grad, want[1].grad, {1e-5, 1e-5}));
  EXPECT_TRUE(close(got[2].grad, want[2].grad, {1.0 / 256, 1e-5}));  // rounded once
}

TEST(Bf16Linear, CopiesOfALeafAreKeptUntilItsValueChanges) {
  Tensor weight = random_tensor({4, 6}, DType::f32, 1);
  Leaf leaf;
  weight.grad_ref.leaf = &leaf;
  const Tensor x = bf16_tensor({3, 6}, 2);
  const Tensor before = linear(x, weight);
  const std::byte* copies = leaf.packed.forward.bytes();
  fill(Device{}, weight, 0);
  EXPECT_EQ(to_doubles(linear(x, weight)), to_doubles(before)) << "nobody said that the value changed";
  leaf.packed_fresh = false;
  for (const double v : to_doubles(linear(x, weight))) EXPECT_EQ(v, 0);
  EXPECT_EQ(leaf.packed.forward.bytes(), copies) << "the space is used again";
}

TEST(Bf16Linear, KeepsLeadingDimensionsAndGivesF32WhenAsked) {
  const Tensor x = bf16_tensor({2, 3, 8}, 1), weight = random_tensor({5, 8}, DType::f32, 2);
  EXPECT_EQ(linear(x, weight).shape(), Shape({2, 3, 5}));
  const Tensor y = linear_f32(x, weight);
  EXPECT_EQ(y.dtype(), DType::f32);
  EXPECT_EQ(to_doubles(cast(y, DType::bf16)), to_doubles(linear(x, weight)));
}

TEST(Bf16Linear, ErrorsNameShapes) {
  const Tensor x = bf16_tensor({2, 8}, 1),
               copies = packed_weight(random_tensor({5, 8}, DType::f32, 2)).forward;
  const std::vector<int64_t> rows{2}, wrong{3};
  const Tensor y = Tensor::empty({2, 5}, DType::f32), narrow = Tensor::empty({2, 4}, DType::f32);
  EXPECT_THROW(packed_gemm_rows(Device{}, PackedUse::forward, x, copies, y, wrong), Error);
  EXPECT_THROW(packed_gemm_rows(Device{}, PackedUse::forward, cast(x, DType::f32), copies, y, rows), Error);
  EXPECT_THROW(packed_gemm_rows(Device{}, PackedUse::forward, x,
                                packed_weight(random_tensor({99, 8}, DType::f32, 2)).forward, narrow, rows),
               Error);
  EXPECT_THROW(packed_weight(random_tensor({5, 8}, DType::f64, 2)), Error);
  EXPECT_THROW(linear(x, random_tensor({5, 8}, DType::f64, 2)), Error);
}

}  // namespace
}  // namespace shoal
