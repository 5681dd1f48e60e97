// What run.deterministic: rank_invariant builds on: a row of a result does not depend on how many rows there
// are, nor on its place among them, to the last bit. Experts get other rows on other layouts.
#include <gtest/gtest.h>

#include <functional>

#include "core/autograd/tape.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"
#include "core/ops/norm.h"
#include "models/ffn.h"
#include "tests/support/gradcheck.h"
#include "tests/support/rank_invariant.h"
#include "tests/support/same_bits.h"

namespace shoal::testing {
namespace {

constexpr int64_t kRows = 70;

using RowIndependence = RankInvariant;

Tensor numbers(const Shape& shape, DType dtype, uint64_t seed) {
  const Tensor x = random_tensor(shape, dtype == DType::f64 ? DType::f64 : DType::f32, seed);
  return x.dtype() == dtype ? x : cast(x, dtype).detach();
}

struct RowOp {
  std::string name;
  int64_t in, out;
  std::function<Tensor(const Tensor& x)> forward;
};

struct Both {
  Tensor y, dx;
};
Both run(const RowOp& op, const Tensor& x_rows, const Tensor& dy) {
  Leaf leaf;
  leaf.grad_dtype = x_rows.dtype();
  Tensor x = x_rows.clone();
  x.grad_ref.leaf = &leaf;
  Tape tape;
  const Tensor y = op.forward(x);
  tape.backward({y}, {dy.clone()});
  return {y.detach(), leaf.grad};
}

/// Every number of rows, at the beginning, at the end and at an odd place.
void expect_rows_alone(const RowOp& op, DType dtype) {
  const Tensor x = numbers({kRows, op.in}, dtype, 1), dy = numbers({kRows, op.out}, dtype, 2);
  const Both all = run(op, x, dy);
  for (int64_t n = 1; n <= kRows; n++) {
    for (const int64_t at : {int64_t{0}, kRows - n, (kRows - n) / 2 | 1}) {
      if (at + n > kRows) continue;
      const Both part = run(op, x.rows(at, at + n), dy.rows(at, at + n));
      ASSERT_TRUE(same_bits(part.y, all.y.rows(at, at + n)))
          << op.name << ' ' << dtype << " rows " << n << " at " << at;
      ASSERT_TRUE(same_bits(part.dx, all.dx.rows(at, at + n)))
          << op.name << ' ' << dtype << " gradient, rows " << n << " at " << at;
    }
  }
}

constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::bf16};
DType weights_of(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

TEST_F(RowIndependence, MatrixProducts) {
  for (const DType dtype : kDTypes) {
    for (const auto& [k, n] : {std::pair<int64_t, int64_t>{5, 7}, {24, 50}, {67, 33}, {600, 48}, {64, 192}}) {
      const Tensor weight = numbers({n, k}, weights_of(dtype), 3), bias = numbers({n}, weights_of(dtype), 4);
      expect_rows_alone(
          {str("linear ", n, " x ", k), k, n, [&](const Tensor& x) { return linear(x, weight, bias); }},
          dtype);
    }
  }
}

// An expert's rows lie between those of others.
TEST_F(RowIndependence, ProductsOfGroups) {
  for (const DType dtype : kDTypes) {
    for (const auto& [k, n] : {std::pair<int64_t, int64_t>{5, 7}, {67, 33}, {24, 50}}) {
      const Tensor one = numbers({1, n, k}, weights_of(dtype), 3),
                   bias = numbers({1, n}, weights_of(dtype), 4);
      Tensor three = Tensor::empty({3, n, k}, one.dtype(), {}),
             biases = Tensor::empty({3, n}, one.dtype(), {});
      for (int64_t g = 0; g < 3; g++) {
        three.rows(g, g + 1).copy_from(one);
        biases.rows(g, g + 1).copy_from(bias);
      }
      const Tensor x = numbers({kRows, k}, dtype, 1), dy = numbers({kRows, n}, dtype, 2);
      const std::vector<int64_t> whole = {kRows};
      const Both want =
          run({"", k, n, [&](const Tensor& rows) { return grouped_linear(rows, one, whole, bias); }}, x, dy);
      for (int64_t count = 0; count <= kRows; count++) {
        const int64_t before = (kRows - count) * 3 / 7;
        const std::vector<int64_t> rows = {before, count, kRows - before - count};
        const Both got =
            run({"", k, n, [&](const Tensor& of_all) { return grouped_linear(of_all, three, rows, biases); }},
                x, dy);
        ASSERT_TRUE(same_bits(got.y, want.y)) << dtype << ' ' << count;
        ASSERT_TRUE(same_bits(got.dx, want.dx)) << dtype << ' ' << count;
      }
    }
  }
}

TEST_F(RowIndependence, ActivationsOfFfns) {
  for (const DType dtype : kDTypes) {
    for (const std::string& name : FfnActivationRegistry::instance().names()) {
      const auto activation = FfnActivationRegistry::make(Choice{name, nullptr});
      for (const int64_t width : {3, 8, 21}) {
        const int64_t in = activation->gated() ? 2 * width : width;
        expect_rows_alone({name, in, width, [&](const Tensor& h) { return activation->forward(h); }}, dtype);
      }
    }
  }
}

TEST_F(RowIndependence, Norms) {
  for (const DType dtype : kDTypes) {
    for (const int64_t width : {5, 16, 43}) {
      const Tensor weight = numbers({width}, weights_of(dtype), 3),
                   bias = numbers({width}, weights_of(dtype), 4);
      expect_rows_alone(
          {"rms_norm", width, width, [&](const Tensor& x) { return rms_norm(x, weight, 1e-5); }}, dtype);
      expect_rows_alone(
          {"layer_norm", width, width, [&](const Tensor& x) { return layer_norm(x, weight, bias, 1e-5); }},
          dtype);
    }
  }
}

/// Weight gradients of any cut of the rows into sequences are those of the sequences.
TEST_F(RowIndependence, AWeightGradientOfSomeRowsIsThatOfTheseRowsAlone) {
  for (const DType dtype : kDTypes) {
    const int64_t K = 37, N = 29;
    const Tensor x = numbers({kRows, K}, dtype, 1), dy = numbers({kRows, N}, dtype, 2);
    const auto gradient = [&](int64_t first, int64_t last, bool amid_others) {
      Tensor weight = numbers({amid_others ? 3 : 1, N, K}, weights_of(dtype), 3);
      Leaf leaf;
      leaf.grad_dtype = weight.dtype();
      leaf.exact_sum = ExactSum::zeros(weight.numel(), {});
      weight.grad_ref.leaf = &leaf;
      Tape tape;
      const int64_t from = amid_others ? 0 : first, to = amid_others ? kRows : last;
      const std::vector<int64_t> rows = amid_others ? std::vector<int64_t>{first, last - first, kRows - last}
                                                    : std::vector<int64_t>{last - first};
      tape.backward({grouped_linear(x.rows(from, to), weight, rows)}, {dy.rows(from, to)});
      const Tensor out = Tensor::empty({N, K}, weight.dtype(), {});
      exact_value(Device{}, leaf.exact_sum.part(amid_others ? N * K : 0, N * K), out);
      return out;
    };
    for (int64_t n = 0; n <= kRows; n++)
      ASSERT_TRUE(same_bits(gradient((kRows - n) / 3, (kRows - n) / 3 + n, true),
                            gradient((kRows - n) / 3, (kRows - n) / 3 + n, false)))
          << dtype << ' ' << n;
  }
}

}  // namespace
}  // namespace shoal::testing
