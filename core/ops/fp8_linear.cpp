#include "core/ops/fp8_linear.h"

#include <utility>
#include <vector>

#include "core/autograd/tape.h"
#include "core/ops/linear.h"

namespace shoal {

namespace {

/// Rows of a group that are summed are padded to this: what cublasLt takes, and whole vectors.
int64_t pad_of(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::tensor ? 16 : kFp8Block;
}
Fp8Scales kind_of_rows(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::tensor ? Fp8Scales::matrix : Fp8Scales::vector;
}

/// One scale for each group of rows of x, as it is now; undefined where each operand has its own.
Tensor current_scales(const Tensor& x, std::span<const int64_t> rows, Fp8Format format, Fp8Scaling scaling) {
  if (scaling == Fp8Scaling::block) return {};
  const Tensor scales = Tensor::empty({static_cast<int64_t>(rows.size())}, DType::f32, x.device());
  fp8_scales(x.device(), x, rows, format, scales);
  return scales;
}

/// An operand with these scales, when they are defined.
Fp8Operand with_scales(Fp8Operand operand, const Tensor& scales) {
  if (scales) operand.scales = scales;
  return operand;
}

Fp8Weight make_copies(const Tensor& weight, Fp8Scaling scaling) {
  const ProfileSection section("weight packing");
  const int64_t N = weight.size(1), K = weight.size(2);
  const std::vector<int64_t> rows(static_cast<size_t>(weight.size(0)), N);
  const Tensor x = weight.detach().view({weight.size(0) * N, K});
  const Fp8Scales kind = scaling == Fp8Scaling::tensor ? Fp8Scales::matrix : Fp8Scales::block;
  const Tensor scales = current_scales(x, rows, Fp8Format::e4m3, scaling);
  const Device device = x.device();
  const Fp8Weight copies{with_scales(fp8_along_rows(rows, K, Fp8Format::e4m3, kind, device), scales),
                         with_scales(fp8_along_columns(rows, K, Fp8Format::e4m3, kind, 1, device), scales)};
  fp8_quantize(device, x, rows, copies.forward, copies.backward);
  return copies;
}

/// Fresh copies of the weight.
Fp8Weight copies_of(const Tensor& weight, Fp8Scaling scaling, const std::shared_ptr<Fp8Weight>& kept) {
  Leaf* leaf = weight.grad_ref.leaf;
  // The optimizer fills bf16 copies itself, and then says that copies are fresh.
  const bool keep = kept != nullptr && leaf != nullptr && leaf->keep_packed && !leaf->packed.forward;
  if (!keep) return make_copies(weight, scaling);
  if (!leaf->packed_fresh || !kept->forward) *kept = make_copies(weight, scaling);
  leaf->packed_fresh = true;
  return *kept;
}

struct Fp8Linear final : Function {
  std::vector<int64_t> rows;
  Tensor source;  // the weight with its leaf
  Fp8Scaling scaling = Fp8Scaling::tensor;
  std::shared_ptr<Fp8Weight> kept;
  Saved x;
  Tensor x_scales;
  Shape bias_shape;

  Fp8Linear(std::span<const int64_t> rows_per_group, const Tensor& weight, Fp8Scaling how,
            std::shared_ptr<Fp8Weight> copies)
      : rows(rows_per_group.begin(), rows_per_group.end()),
        source(weight),
        scaling(how),
        kept(std::move(copies)) {}
  const char* name() const override { return "fp8_linear"; }

  Tensor forward(const Tensor& x_in, const Tensor& weight, const Tensor& bias) {
    const Device device = x_in.device();
    const Tensor y = Tensor::empty({x_in.size(0), weight.size(1)}, x_in.dtype(), device);
    const Tensor scales = current_scales(x_in, rows, Fp8Format::e4m3, scaling);
    const Fp8Operand a = with_scales(
        fp8_along_rows(rows, x_in.size(1), Fp8Format::e4m3, kind_of_rows(scaling), device), scales);
    fp8_quantize(device, x_in, rows, a, {});
    fp8_gemm(device, false, a, copies_of(source, scaling, kept).forward, y);
    if (bias) {
      add_bias(device, y, bias, rows);
      bias_shape = bias.shape();
    }
    if (needs_grad(1)) {
      x = x_in;
      x_scales = scales;
    }
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const Device device = dy.device();
    const Shape& weight_shape = source.shape();
    const Fp8Format format = scaling == Fp8Scaling::tensor ? Fp8Format::e5m2 : Fp8Format::e4m3;
    const Tensor scales = current_scales(dy, rows, format, scaling);
    Fp8Operand along_rows, along_columns;
    if (needs_grad(0)) {
      along_rows =
          with_scales(fp8_along_rows(rows, dy.size(1), format, kind_of_rows(scaling), device), scales);
    }
    if (needs_grad(1)) along_columns = with_scales(columns(dy, format), scales);
    fp8_quantize(device, dy, rows, along_rows, along_columns);
    Tensor dx, dweight, dbias;
    if (needs_grad(0)) {
      dx = Tensor::empty({dy.size(0), weight_shape[2]}, dy.dtype(), device);
      fp8_gemm(device, false, along_rows, copies_of(source, scaling, kept).backward, dx);
      along_rows = {};
    }
    if (needs_grad(1)) {
      const Tensor x_in = x.get();
      const Fp8Operand b = with_scales(columns(x_in, Fp8Format::e4m3), x_scales);
      fp8_quantize(device, x_in, rows, {}, b);
      const GradTarget to = grad_target(1, weight_shape, DType::f32, device);
      fp8_gemm(device, to.accumulate, along_columns, b, to.grad);
      dweight = to.delivered();
    }
    if (needs_grad(2)) {
      const GradTarget to = grad_target(2, bias_shape, DType::f32, device);
      if (!to.accumulate) to.grad.set_zero();
      bias_bwd(device, dy, to.grad, rows);
      dbias = to.delivered();
    }
    return {dx, dweight, dbias};
  }

 private:
  /// Memory for the transposed rows of each group: what a weight gradient sums.
  Fp8Operand columns(const Tensor& of, Fp8Format format) const {
    return fp8_along_columns(rows, of.size(1), format, kind_of_rows(scaling), pad_of(scaling), of.device());
  }
};

}  // namespace

void check_fp8_gemm(bool accumulate, const Fp8Operand& a, const Fp8Operand& b, const Tensor& c) {
  const char* where = "fp8_gemm";
  SHOAL_CHECK(a.matrices.size() == b.matrices.size(), where, ": ", a.matrices.size(), " groups times ",
              b.matrices.size());
  int64_t results = 0;
  for (size_t g = 0; g < a.matrices.size(); g++) {
    const Fp8Matrix &of_a = a.matrices[g], &of_b = b.matrices[g];
    SHOAL_CHECK(of_a.sum == of_b.sum, where, ": shapes of group ", g, " do not fit: [", of_a.outer, ", ",
                of_a.sum, "] x [", of_b.outer, ", ", of_b.sum, "]^T");
    results += of_a.outer * of_b.outer;
  }
  SHOAL_CHECK(c.numel() == results && (c.dtype() == DType::f32 || (c.dtype() == DType::bf16 && !accumulate)),
              where, ": expected ", results, " results of f32, or bf16 that nothing is added to, got ",
              c.dtype(), ' ', c.shape());
  SHOAL_CHECK((a.kind == Fp8Scales::matrix) == (b.kind == Fp8Scales::matrix) &&
                  (a.kind != Fp8Scales::block || b.kind != Fp8Scales::block),
              where, ": one operand has a scale per matrix and the other has not, or both have blocks");
}

Tensor fp8_grouped_linear(const Tensor& x_RK, const Tensor& weight_GNK,
                          std::span<const int64_t> rows_per_group, const Tensor& bias_GN, Fp8Scaling scaling,
                          const std::shared_ptr<Fp8Weight>& kept) {
  const auto groups = static_cast<int64_t>(rows_per_group.size());
  SHOAL_CHECK(x_RK.dims() == 2 && weight_GNK.dims() == 3 && weight_GNK.size(2) == x_RK.size(1) &&
                  weight_GNK.size(0) == groups,
              "fp8_grouped_linear: expected x [R, K] and weight [", groups, " groups, N, K], got x ",
              x_RK.shape(), " and weight ", weight_GNK.shape());
  SHOAL_CHECK((x_RK.dtype() == DType::bf16 || x_RK.dtype() == DType::f32) && weight_GNK.dtype() == DType::f32,
              "fp8_grouped_linear: expected x of bf16 or f32 and an f32 weight, got ", x_RK.dtype(), " and ",
              weight_GNK.dtype(), "; f64 has no fp8 products");
  SHOAL_CHECK(!bias_GN || bias_GN.shape() == Shape({groups, weight_GNK.size(1)}),
              "fp8_grouped_linear: expected bias [", groups, ", ", weight_GNK.size(1), "], got ",
              bias_GN.shape());
  return apply(Fp8Linear(rows_per_group, weight_GNK, scaling, kept), x_RK, weight_GNK, bias_GN);
}

}  // namespace shoal
