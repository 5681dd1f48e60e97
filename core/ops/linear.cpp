#include "core/ops/linear.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/autograd/late_weights.h"
#include "core/autograd/tape.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/exact_parts.h"

namespace shoal {

namespace {

/// x as a matrix of its rows.
Tensor as_matrix(const Tensor& x) {
  return x.view({x.num_rows(), x.row_size()});
}

struct Linear final : Function, LateWeights {
  Saved x;
  Tensor weight, bias;

  const char* name() const override { return "linear"; }

  Tensor forward(const Tensor& x_in, const Tensor& weight_in, const Tensor& bias_in) {
    Shape shape = x_in.shape();
    shape.set(-1, weight_in.size(0));
    const Tensor y = Tensor::empty(shape, x_in.dtype(), x_in.device());
    gemm(y.device(), {.transpose_b = true}, as_matrix(x_in), weight_in, as_matrix(y));
    const int64_t num_rows = y.num_rows();
    if (bias_in) add_bias(y.device(), y, bias_in, {&num_rows, 1});
    // The shapes are needed even where the values are not; a handle costs nothing when the tensor lives on
    // anyway, as parameters do.
    weight = weight_in;
    bias = bias_in;
    if (needs_grad(1)) x = x_in;
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const Device device = dy.device();
    Tensor dx, dweight, dbias;
    if (needs_grad(0)) {
      Shape shape = dy.shape();
      shape.set(-1, weight.size(1));
      dx = Tensor::empty(shape, dy.dtype(), device);
      gemm(device, {}, as_matrix(dy), weight, as_matrix(dx));
    }
    if (weights_later()) {
      late_dy = dy;
    } else {
      std::tie(dweight, dbias) = weight_gradients(dy);
    }
    return {dx, dweight, dbias};
  }

  uint32_t late_inputs() const override { return 0b110; }
  void backward_weights() override { weight_gradients(std::exchange(late_dy, {})); }

  std::pair<Tensor, Tensor> weight_gradients(const Tensor& dy) {
    const Device device = dy.device();
    Tensor dweight, dbias;
    if (needs_grad(1)) {
      const GradTarget to = grad_target(1, weight.shape(), dy.dtype(), device);
      gemm(device, {.transpose_a = true, .accumulate = to.accumulate}, as_matrix(dy), as_matrix(x.get()),
           to.grad);
      dweight = to.delivered();
    }
    if (needs_grad(2)) {
      const int64_t num_rows = dy.num_rows();
      const GradTarget to = grad_target(2, bias.shape(), dy.dtype(), device);
      if (!to.accumulate) to.grad.set_zero();
      bias_bwd(device, dy, to.grad, {&num_rows, 1});
      dbias = to.delivered();
    }
    return {dweight, dbias};
  }

 private:
  Tensor late_dy;
};

struct AddRowBias final : Function {
  Shape bias_shape;
  const char* name() const override { return "add_row_bias"; }

  Tensor forward(const Tensor& x, const Tensor& bias) {
    const int64_t num_rows = x.num_rows();
    bias_shape = bias.shape();
    const Tensor y = x.detach().clone();
    add_bias(y.device(), y, bias, {&num_rows, 1});
    return y;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    Tensor dbias;
    if (needs_grad(1)) {
      const int64_t num_rows = dy[0].num_rows();
      const GradTarget to = grad_target(1, bias_shape, stats_dtype(dy[0].dtype()), dy[0].device());
      if (!to.accumulate) to.grad.set_zero();
      bias_bwd(dy[0].device(), dy[0], to.grad, {&num_rows, 1});
      dbias = to.delivered();
    }
    return {dy[0], dbias};
  }
};

struct GroupedLinear final : Function, LateWeights {
  std::vector<int64_t> rows, parts;
  Saved x;
  Tensor weight, bias;

  const char* name() const override { return "grouped_linear"; }

  Tensor forward(const Tensor& x_in, const Tensor& weight_in, const Tensor& bias_in) {
    const Tensor y = Tensor::empty({x_in.size(0), weight_in.size(1)}, x_in.dtype(), x_in.device());
    grouped_gemm_rows(y.device(), {.transpose_b = true}, x_in, weight_in, y, rows);
    if (bias_in) add_bias(y.device(), y, bias_in, rows);
    weight = weight_in;
    bias = bias_in;
    if (needs_grad(1)) x = x_in;
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const Device device = dy.device();
    Tensor dx, dweight, dbias;
    if (needs_grad(0)) {
      dx = Tensor::empty({dy.size(0), weight.size(2)}, dy.dtype(), device);
      grouped_gemm_rows(device, {}, dy, weight, dx, rows);
    }
    if (weights_later()) {
      late_dy = dy;
    } else {
      std::tie(dweight, dbias) = weight_gradients(dy);
    }
    return {dx, dweight, dbias};
  }

  uint32_t late_inputs() const override { return 0b110; }
  void backward_weights() override { weight_gradients(std::exchange(late_dy, {})); }

  std::pair<Tensor, Tensor> weight_gradients(const Tensor& dy) {
    const Device device = dy.device();
    Tensor dweight, dbias;
    if (exact_sum(1) || exact_sum(2)) {
      add_to_exact_sums(dy);
      return {};
    }
    if (needs_grad(1)) {
      const GradTarget to = grad_target(1, weight.shape(), dy.dtype(), device);
      grouped_gemm_reduce(device, {.accumulate = to.accumulate}, dy, x.get(), to.grad, rows);
      dweight = to.delivered();
    }
    if (needs_grad(2)) {
      const GradTarget to = grad_target(2, bias.shape(), dy.dtype(), device);
      if (!to.accumulate) to.grad.set_zero();
      bias_bwd(device, dy, to.grad, rows);
      dbias = to.delivered();
    }
    return {dweight, dbias};
  }

 private:
  void add_to_exact_sums(const Tensor& dy) const {
    const Device device = dy.device();
    const int64_t groups = weight.size(0), n = weight.size(1), k = weight.size(2);
    if (const ExactSum sum = exact_sum(1)) {
      const Tensor rows_of_x = x.get();
      add_parts(sum, groups, parts, {n, k}, dy.dtype(), [&](int64_t first, int64_t last, const Tensor& out) {
        gemm(device, {.transpose_a = true}, dy.rows(first, last), rows_of_x.rows(first, last), out);
      });
    }
    if (const ExactSum sum = exact_sum(2)) {
      add_parts(sum, groups, parts, {1, n}, dy.dtype(), [&](int64_t first, int64_t last, const Tensor& out) {
        const int64_t count = last - first;
        out.set_zero();
        bias_bwd(device, dy.rows(first, last), out, {&count, 1});
      });
    }
  }

  Tensor late_dy;
};

/// bf16_linear of one group, keeping the leading dimensions of x.
Tensor bf16_rows(const Tensor& x, const Tensor& weight, const Tensor& bias, DType result) {
  Shape shape = x.shape();
  shape.set(-1, weight.size(0));
  const int64_t num_rows = x.num_rows();
  return bf16_linear(as_matrix(x), weight, {&num_rows, 1}, bias, result).view(shape);
}

void check_parts(std::span<const int64_t> rows_per_group, std::span<const int64_t> rows_per_part) {
  if (rows_per_part.empty()) return;
  const size_t groups = rows_per_group.size(), parts = groups == 0 ? 0 : rows_per_part.size() / groups;
  bool fits = groups > 0 && parts * groups == rows_per_part.size();
  for (size_t g = 0; fits && g < groups; g++) {
    const auto of_group = rows_per_part.subspan(g * parts, parts);
    fits = std::accumulate(of_group.begin(), of_group.end(), int64_t{0}) == rows_per_group[g];
  }
  SHOAL_CHECK(fits, "grouped_linear: expected rows of as many parts for each of ", groups,
              " groups that sum to the group's rows, got ", rows_per_part.size(), " parts");
}

}  // namespace

double used_bytes(const Tensor& stack, std::span<const int64_t> rows) {
  const auto used = std::ranges::count_if(rows, [](int64_t count) { return count > 0; });
  return rows.empty() ? 0 : bytes_of(stack) * static_cast<double>(used) / static_cast<double>(rows.size());
}

Tensor linear(const Tensor& x_TK, const Tensor& weight_NK, const Tensor& bias_N) {
  SHOAL_CHECK(x_TK.dims() >= 1 && weight_NK.dims() == 2 && x_TK.size(-1) == weight_NK.size(1),
              "linear: expected x [..., K] and weight [N, K], got x ", x_TK.shape(), " and weight ",
              weight_NK.shape());
  SHOAL_CHECK(!bias_N || (bias_N.dims() == 1 && bias_N.size(0) == weight_NK.size(0)),
              "linear: expected bias [N] for weight ", weight_NK.shape(), ", got ", bias_N.shape());
  if (x_TK.dtype() == DType::bf16) return bf16_rows(x_TK, weight_NK, bias_N, DType::bf16);
  return apply(Linear{}, x_TK, weight_NK, bias_N);
}

Tensor add_row_bias(const Tensor& x_TN, const Tensor& bias_N) {
  SHOAL_CHECK(bias_N.dims() == 1 && bias_N.size(0) == x_TN.size(-1), "add_row_bias: expected bias [N] for x ",
              x_TN.shape(), ", got ", bias_N.shape());
  return apply(AddRowBias{}, x_TN, bias_N);
}

Tensor linear_f32(const Tensor& x_TK, const Tensor& weight_NK) {
  if (x_TK.dtype() == DType::bf16) return bf16_rows(x_TK, weight_NK, {}, DType::f32);
  return linear(x_TK, weight_NK);
}

Tensor grouped_linear(const Tensor& x_RK, const Tensor& weight_GNK, std::span<const int64_t> rows_per_group,
                      const Tensor& bias_GN, std::span<const int64_t> rows_per_part) {
  const auto groups = static_cast<int64_t>(rows_per_group.size());
  SHOAL_CHECK(x_RK.dims() == 2 && weight_GNK.dims() == 3 && weight_GNK.size(2) == x_RK.size(1) &&
                  weight_GNK.size(0) == groups,
              "grouped_linear: expected x [R, K] and weight [", groups, " groups, N, K], got x ",
              x_RK.shape(), " and weight ", weight_GNK.shape());
  SHOAL_CHECK(!bias_GN || bias_GN.shape() == Shape({groups, weight_GNK.size(1)}),
              "grouped_linear: expected bias [", groups, ", ", weight_GNK.size(1), "], got ",
              bias_GN.shape());
  check_parts(rows_per_group, rows_per_part);
  if (x_RK.dtype() == DType::bf16)
    return bf16_linear(x_RK, weight_GNK, rows_per_group, bias_GN, DType::bf16, rows_per_part);
  GroupedLinear function;
  function.rows.assign(rows_per_group.begin(), rows_per_group.end());
  const auto parts = rows_per_part.empty() ? rows_per_group : rows_per_part;
  function.parts.assign(parts.begin(), parts.end());
  return apply(std::move(function), x_RK, weight_GNK, bias_GN);
}

}  // namespace shoal
