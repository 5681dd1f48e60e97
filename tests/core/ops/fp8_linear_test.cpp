#include "core/ops/fp8_linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "core/autograd/tape.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::close;
using testing::error_of;
using testing::random_tensor;
using testing::to_doubles;
using Rows = std::vector<int64_t>;
using Doubles = std::vector<double>;

constexpr Fp8Scaling kScalings[] = {Fp8Scaling::tensor, Fp8Scaling::block};

struct Fp8Case {
  Rows rows;
  int64_t n, k;
  int64_t total() const { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }
  int64_t groups() const { return static_cast<int64_t>(rows.size()); }
  int64_t first(size_t g) const {
    return std::accumulate(rows.begin(), rows.begin() + static_cast<int64_t>(g), int64_t{0});
  }
};
const Fp8Case kFp8Cases[] = {
    {{7, 0, 3}, 16, 32}, {{130, 1, 259}, 144, 272}, {{0, 0}, 16, 16}, {{5}, 7, 9}, {{}, 16, 16}};

struct Fp8Inputs {
  Tensor x, weight, bias, dy;
};
/// Rows of x and dy, and columns, differ by orders of magnitude, as those of real activations do.
Fp8Inputs inputs_of(const Fp8Case& c, DType dtype) {
  const auto spread = [](Tensor t) {
    auto* values = t.data<float>();
    const int64_t width = t.row_size();
    for (int64_t i = 0; i < t.numel(); i++)
      values[i] *= std::ldexp(1.0F, static_cast<int>((i / width * 7 + i % width * 3) % 9) - 4);
    return t;
  };
  const auto made = [&](const Shape& shape, uint64_t seed) {
    const Tensor t = spread(random_tensor(shape, DType::f32, seed));
    return dtype == DType::f32 ? t : cast(t, dtype);
  };
  return {made({c.total(), c.k}, 1), random_tensor({c.groups(), c.n, c.k}, DType::f32, 2, 0.1),
          random_tensor({c.groups(), c.n}, DType::f32, 3), made({c.total(), c.n}, 4)};
}

struct Fp8Results {
  Tensor y, dx, dweight, dbias;
};
Fp8Results train(const Fp8Case& c, const Fp8Inputs& in, Fp8Scaling scaling,
                 const std::shared_ptr<Fp8Weight>& kept = nullptr) {
  Leaf x_leaf, weight_leaf, bias_leaf;
  Tensor x = in.x.detach(), weight = in.weight.detach(), bias = in.bias.detach();
  x.grad_ref.leaf = &x_leaf;
  weight.grad_ref.leaf = &weight_leaf;
  bias.grad_ref.leaf = &bias_leaf;
  Tape tape;
  const Tensor y = fp8_grouped_linear(x, weight, c.rows, bias, scaling, kept);
  tape.backward({y}, {in.dy});
  return {y.detach(), x_leaf.grad, weight_leaf.grad, bias_leaf.grad};
}

/// The numbers that quantisation makes of values [rows, width], by its definition: rows [r0, r1) and columns
/// [c0, c1) share a scale.
struct Grid {
  const Doubles& values;
  int64_t width;
  Fp8Format format;
  std::map<std::pair<int64_t, int64_t>, double> scales = {};  // by r0, c0

  double scale(int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    const auto [found, added] = scales.try_emplace({r0, c0}, 0);
    if (!added) return found->second;
    double most = 0;
    for (int64_t r = r0; r < r1; r++) {
      for (int64_t c = c0; c < std::min(width, c1); c++)
        most = std::max(most, std::abs(values[static_cast<size_t>(r * width + c)]));
    }
    const double largest = format == Fp8Format::e4m3 ? 448 : 57344;
    return found->second = std::exp2(std::max(-100.0, std::ceil(std::log2(most / largest))));
  }
  double number(int64_t row, int64_t column, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    const double shared = scale(r0, r1, c0, c1);
    const double value = values[static_cast<size_t>(row * width + column)];
    return from_fp8(to_fp8(static_cast<float>(value / shared), format), format) * shared;
  }
};

/// All values of one operand as its products see them. along_rows: vectors run along a row.
Doubles seen(const Fp8Case& c, const Doubles& values, int64_t width, Fp8Format format, Fp8Scaling scaling,
             bool along_rows) {
  Doubles out(values.size());
  Grid grid{values, width, format};
  for (size_t g = 0; g < c.rows.size(); g++) {
    const int64_t first = c.first(g), last = first + c.rows[g];
    for (int64_t r = first; r < last; r++) {
      for (int64_t column = 0; column < width; column++) {
        const int64_t r0 = first + (r - first) / 128 * 128, c0 = column / 128 * 128;
        double& to = out[static_cast<size_t>(r * width + column)];
        if (scaling == Fp8Scaling::tensor) {
          to = grid.number(r, column, first, last, 0, width);
        } else if (along_rows) {
          to = grid.number(r, column, r, r + 1, c0, c0 + 128);
        } else {
          to = grid.number(r, column, r0, std::min(last, r0 + 128), column, column + 1);
        }
      }
    }
  }
  return out;
}

/// The weights as their products see them.
Doubles seen_weight(const Fp8Case& c, const Doubles& weight, Fp8Scaling scaling) {
  Doubles out;
  Fp8Case one{{c.n}, c.n, c.k};
  for (int64_t g = 0; g < c.groups(); g++) {
    const Doubles matrix(weight.begin() + g * c.n * c.k, weight.begin() + (g + 1) * c.n * c.k);
    Doubles part;
    if (scaling == Fp8Scaling::tensor) {
      part = seen(one, matrix, c.k, Fp8Format::e4m3, scaling, true);
    } else {
      Grid grid{matrix, c.k, Fp8Format::e4m3};
      for (int64_t r = 0; r < c.n; r++) {
        for (int64_t k = 0; k < c.k; k++) {
          const int64_t r0 = r / 128 * 128, k0 = k / 128 * 128;
          part.push_back(grid.number(r, k, r0, std::min(c.n, r0 + 128), k0, k0 + 128));
        }
      }
    }
    out.insert(out.end(), part.begin(), part.end());
  }
  return out;
}

struct Sums {
  Doubles y, dx, dweight;
};
/// y = x w^T, dx = dy w, dw = dy^T x in f64; x and dy may be other ones for the sums along their rows.
Sums multiply(const Fp8Case& c, const Doubles& x, const Doubles& w, const Doubles& dy,
              const Doubles& x_columns, const Doubles& dy_columns) {
  Sums out{Doubles(static_cast<size_t>(c.total() * c.n)), Doubles(static_cast<size_t>(c.total() * c.k)),
           Doubles(static_cast<size_t>(c.groups() * c.n * c.k))};
  for (size_t g = 0; g < c.rows.size(); g++) {
    for (int64_t r = c.first(g); r < c.first(g) + c.rows[g]; r++) {
      for (int64_t n = 0; n < c.n; n++) {
        const auto at_y = static_cast<size_t>(r * c.n + n);
        for (int64_t k = 0; k < c.k; k++) {
          const auto at_x = static_cast<size_t>(r * c.k + k),
                     at_w = static_cast<size_t>((static_cast<int64_t>(g) * c.n + n) * c.k + k);
          out.y[at_y] += x[at_x] * w[at_w];
          out.dx[at_x] += dy[at_y] * w[at_w];
          out.dweight[at_w] += dy_columns[at_y] * x_columns[at_x];
        }
      }
    }
  }
  return out;
}
Doubles with_bias(const Fp8Case& c, Doubles y, const Tensor& bias) {
  const Doubles b = to_doubles(bias);
  for (size_t g = 0; g < c.rows.size(); g++) {
    for (int64_t i = c.first(g) * c.n; i < (c.first(g) + c.rows[g]) * c.n; i++)
      y[static_cast<size_t>(i)] += b[g * static_cast<size_t>(c.n) + static_cast<size_t>(i % c.n)];
  }
  return y;
}

double norm(const Doubles& v) {
  double sum = 0;
  for (const double x : v) sum += x * x;
  return std::sqrt(sum);
}
/// Norm of the difference over norm of `want`.
double distance(const Tensor& got, const Doubles& want) {
  Doubles difference = to_doubles(got);
  for (size_t i = 0; i < want.size(); i++) difference[i] -= want[i];
  return want.empty() || norm(want) == 0 ? norm(difference) : norm(difference) / norm(want);
}

TEST(Fp8Linear, ProductsAreThoseOfTheQuantisedOperandsAndNearTheExactOnes) {
  for (const Fp8Case& c : kFp8Cases) {
    for (const Fp8Scaling scaling : kScalings) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Fp8Inputs in = inputs_of(c, dtype);
        const Fp8Results got = train(c, in, scaling);
        EXPECT_EQ(got.y.dtype(), dtype);
        const Doubles x = to_doubles(in.x), w = to_doubles(in.weight), dy = to_doubles(in.dy);
        const Fp8Format low = scaling == Fp8Scaling::tensor ? Fp8Format::e5m2 : Fp8Format::e4m3;
        const Sums want =
            multiply(c, seen(c, x, c.k, Fp8Format::e4m3, scaling, true), seen_weight(c, w, scaling),
                     seen(c, dy, c.n, low, scaling, true), seen(c, x, c.k, Fp8Format::e4m3, scaling, false),
                     seen(c, dy, c.n, low, scaling, false));
        const std::string what = str(c.total(), " rows, ", c.n, " x ", c.k, ", ", dtype,
                                     scaling == Fp8Scaling::tensor ? ", tensor" : ", block");
        // Sums in f32, of up to some hundred terms, and one rounding to bf16.
        const double rounding = dtype == DType::f32 ? 1e-6 : 3e-3;
        EXPECT_LE(distance(got.y, with_bias(c, want.y, in.bias)), rounding) << what;
        EXPECT_LE(distance(got.dx, want.dx), rounding) << what;
        EXPECT_LE(distance(got.dweight, want.dweight), 1e-6) << what;
        // Each factor is rounded by up to 2^-4 (e4m3) or 2^-3 (e5m2) of itself, by 0.42 of that on average:
        // two of them are about 3.7 % or 5.9 % apart from the exact product.
        const Sums exact = multiply(c, x, w, dy, x, dy);
        const double backward = scaling == Fp8Scaling::tensor ? 0.08 : 0.05;
        EXPECT_LE(distance(got.y, with_bias(c, exact.y, in.bias)), 0.05) << what;
        EXPECT_LE(distance(got.dx, exact.dx), backward) << what;
        EXPECT_LE(distance(got.dweight, exact.dweight), backward) << what;
        if (c.total() > 0) {
          EXPECT_GT(distance(got.dx, exact.dx), 0.005) << what << ": nothing was rounded";
        }
      }
    }
  }
}

TEST(Fp8Linear, ABiasGradientIsNotRoundedAndGradientsAreAddedToALeaf) {
  const Fp8Case c{{6, 2}, 16, 32};
  const Fp8Inputs in = inputs_of(c, DType::f32);
  for (const Fp8Scaling scaling : kScalings) {
    const Fp8Results once = train(c, in, scaling);
    const Doubles dy = to_doubles(in.dy), dbias = to_doubles(once.dbias);
    for (size_t g = 0; g < 2; g++) {
      for (int64_t n = 0; n < c.n; n++) {
        double sum = 0;
        for (int64_t r = c.first(g); r < c.first(g) + c.rows[g]; r++)
          sum += dy[static_cast<size_t>(r * c.n + n)];
        EXPECT_NEAR(dbias[g * 16 + static_cast<size_t>(n)], sum, 1e-4);
      }
    }
    Leaf leaf;
    Tensor weight = in.weight.detach();
    weight.grad_ref.leaf = &leaf;
    for (int i = 0; i < 2; i++) {
      Tape tape;
      tape.backward({fp8_grouped_linear(in.x, weight, c.rows, {}, scaling)}, {in.dy});
    }
    EXPECT_TRUE(close(leaf.grad, scale(once.dweight, 2), {1e-5, 1e-6}));
  }
}

TEST(Fp8Linear, ARowsResultDoesNotDependOnTheOtherRowsExceptFarBelowTheLargest) {
  const Fp8Case all{{200}, 32, 256}, part{{90}, 32, 256};
  const Fp8Inputs in = inputs_of(all, DType::bf16);
  const Fp8Inputs first{in.x.rows(0, 90), in.weight, in.bias, in.dy.rows(0, 90)};
  const Fp8Results whole = train(all, in, Fp8Scaling::block), some = train(part, first, Fp8Scaling::block);
  EXPECT_TRUE(testing::same_bits(whole.y.rows(0, 90), some.y));
  EXPECT_TRUE(testing::same_bits(whole.dx.rows(0, 90), some.dx));
  // With one scale for all rows the smallest numbers are rounded to other units.
  const Fp8Results one = train(all, in, Fp8Scaling::tensor), other = train(part, first, Fp8Scaling::tensor);
  EXPECT_LE(distance(other.y, to_doubles(one.y.rows(0, 90))), 2e-4);
  EXPECT_LE(distance(other.dx, to_doubles(one.dx.rows(0, 90))), 2e-4);
}

TEST(Fp8Linear, WhatIsNotFiniteStaysSo) {
  const Fp8Case c{{4, 4}, 16, 16};
  for (const Fp8Scaling scaling : kScalings) {
    for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
      Fp8Inputs in = inputs_of(c, DType::f32);
      in.x.data<float>()[2 * 16 + 3] = bad;
      in.dy.data<float>()[5 * 16 + 3] = bad;
      const Fp8Results got = train(c, in, scaling);
      const Doubles y = to_doubles(got.y), dx = to_doubles(got.dx), dw = to_doubles(got.dweight);
      for (int64_t r = 0; r < 8; r++) {
        for (int64_t i = 0; i < 16; i++) {
          EXPECT_EQ(std::isfinite(y[static_cast<size_t>(r * 16 + i)]), r != 2);
          EXPECT_EQ(std::isfinite(dx[static_cast<size_t>(r * 16 + i)]), r != 5);
        }
      }
      EXPECT_FALSE(std::isfinite(dw[3]));
      EXPECT_FALSE(std::isfinite(dw[256 + 3 * 16]));
    }
  }
}

TEST(Fp8Linear, CopiesOfAWeightAreKeptUntilItsValueChanges) {
  const Fp8Case c{{4, 4}, 16, 16};
  const Fp8Inputs in = inputs_of(c, DType::f32);
  const auto kept = std::make_shared<Fp8Weight>();
  Leaf leaf;
  Tensor weight = in.weight.clone();
  weight.grad_ref.leaf = &leaf;
  const auto run = [&](const std::shared_ptr<Fp8Weight>& copies) {
    return fp8_grouped_linear(in.x, weight, c.rows, {}, Fp8Scaling::tensor, copies).detach();
  };
  const Tensor before = run(kept);
  EXPECT_TRUE(leaf.packed_fresh);
  weight.copy_from(scale(in.weight, -2));
  EXPECT_TRUE(testing::same_bits(run(kept), before));  // nobody said that it changed
  leaf.packed_fresh = false;
  EXPECT_TRUE(testing::same_bits(run(kept), run(nullptr)));
  EXPECT_FALSE(testing::same_bits(run(kept), before));
  // Leaves that keep no copies, and those whose bf16 copies the optimizer keeps fresh.
  weight.copy_from(in.weight);
  leaf.keep_packed = false;
  EXPECT_TRUE(testing::same_bits(run(kept), before));
  leaf.keep_packed = true;
  linear(cast(in.x, DType::bf16), weight.rows(0, 1).view({16, 16}));
  grouped_linear(cast(in.x, DType::bf16), weight, c.rows);
  EXPECT_TRUE(leaf.packed.forward.defined());
  weight.copy_from(scale(in.weight, -2));
  EXPECT_TRUE(testing::same_bits(run(kept), run(nullptr)));
}

TEST(Fp8Linear, WhatItCannotMultiplyIsRefused) {
  const Tensor x = Tensor::zeros({4, 16}, DType::f32), w = Tensor::zeros({1, 8, 16}, DType::f32);
  const Rows four = {4}, five = {5}, minus = {5, -1};
  const auto refused = [&](const Tensor& input, const Tensor& weight, const Rows& rows,
                           const Tensor& bias = {}) {
    return error_of([&] { fp8_grouped_linear(input, weight, rows, bias, Fp8Scaling::tensor); });
  };
  EXPECT_EQ(refused(x, w, four), "");
  EXPECT_NE(refused(cast(x, DType::f64), w, four).find("f64 has no fp8 products"), std::string::npos);
  EXPECT_NE(refused(x, cast(w, DType::f64), four).find("an f32 weight, got f32 and f64"), std::string::npos);
  EXPECT_NE(refused(x, w.view({1, 16, 8}), four).find("expected x [R, K]"), std::string::npos);
  EXPECT_NE(refused(x, w, four, Tensor::zeros({1, 9}, DType::f32)).find("expected bias [1, 8]"),
            std::string::npos);
  EXPECT_NE(refused(x, w, five).find("rows per group sum to 5, but the operand is [4, 16]"),
            std::string::npos);
  EXPECT_NE(refused(x, Tensor::zeros({2, 8, 16}, DType::f32), minus).find("got -1"), std::string::npos);
  const Fp8Operand a = fp8_along_rows(four, 16, Fp8Format::e4m3, Fp8Scales::matrix, {}),
                   b = fp8_along_rows(four, 24, Fp8Format::e4m3, Fp8Scales::matrix, {}),
                   block = fp8_along_rows(four, 16, Fp8Format::e4m3, Fp8Scales::block, {}),
                   two = fp8_along_rows(Rows{2, 2}, 16, Fp8Format::e4m3, Fp8Scales::matrix, {});
  const auto product = [](bool accumulate, const Fp8Operand& left, const Fp8Operand& right, const Tensor& c) {
    return error_of([&] { fp8_gemm(Device{}, accumulate, left, right, c); });
  };
  const Tensor c = Tensor::zeros({4, 4}, DType::f32);
  EXPECT_NE(product(false, a, b, c).find("[4, 16] x [4, 24]^T"), std::string::npos);
  EXPECT_NE(product(false, a, two, c).find("1 groups times 2"), std::string::npos);
  EXPECT_NE(product(false, a, a, x).find("expected 16 results"), std::string::npos);
  EXPECT_NE(product(true, a, a, cast(c, DType::bf16)).find("got bf16"), std::string::npos);
  EXPECT_NE(product(false, a, block, c).find("one operand has a scale per matrix"), std::string::npos);
  EXPECT_NE(product(false, block, block, c).find("both have blocks"), std::string::npos);
}

}  // namespace
}  // namespace shoal
