#include "core/ops/bf16_linear.h"

#include <tuple>
#include <utility>
#include <vector>

#include "core/autograd/late_weights.h"
#include "core/autograd/tape.h"
#include "core/base/threads.h"
#include "core/ops/elementwise.h"
#include "core/ops/exact_parts.h"
#include "core/ops/linear.h"

namespace shoal {

namespace {

PackedWeight make_copies(const Tensor& weight, PackedUse use) {
  const int64_t groups = weight.dims() == 3 ? weight.size(0) : 1, n = weight.size(-2), k = weight.size(-1);
  const Device device = weight.device();
  PackedWeight copies;
  copies.shape = weight.shape();
  if (packs_in_order(device, weight.shape())) {
    copies.forward = copies.backward =
        Tensor::empty({packed_size(device, groups, n, k)}, DType::bf16, device);
    return copies;
  }
  if (use != PackedUse::backward)
    copies.forward = Tensor::empty({packed_size(device, groups, n, k)}, DType::bf16, device);
  if (use != PackedUse::forward)
    copies.backward = Tensor::empty({packed_size(device, groups, k, n)}, DType::bf16, device);
  return copies;
}

struct Bf16Linear final : Function, LateWeights {
  std::vector<int64_t> rows, parts;
  Tensor source;  // the weight with its leaf, whose copies are used
  DType result = DType::bf16;
  Saved x;
  Shape weight_shape, bias_shape;

  Bf16Linear(const Tensor& weight, std::span<const int64_t> rows_per_group, DType result_dtype)
      : rows(rows_per_group.begin(), rows_per_group.end()), source(weight), result(result_dtype) {}
  const char* name() const override { return "bf16_linear"; }

  Tensor forward(const Tensor& x_in, const Tensor& weight, const Tensor& bias) {
    const Tensor y = Tensor::empty({x_in.size(0), weight.size(-2)}, result, x_in.device());
    packed_gemm_rows(y.device(), PackedUse::forward, x_in, packed_weight(source, PackedUse::forward).forward,
                     y, rows);
    if (bias) add_bias(y.device(), y, bias, rows);
    weight_shape = weight.shape();
    if (bias) bias_shape = bias.shape();
    if (needs_grad(1)) x = x_in;
    return y;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& given = grad_outputs[0];
    const Device device = given.device();
    Tensor dy = given, dx, dweight, dbias;
    if (dy.dtype() != DType::bf16) {
      dy = Tensor::empty(given.shape(), DType::bf16, device);
      cast_fwd(device, given, dy);
    }
    if (needs_grad(0)) {
      dx = Tensor::empty({dy.size(0), weight_shape[-1]}, DType::bf16, device);
      packed_gemm_rows(device, PackedUse::backward, dy, packed_weight(source, PackedUse::backward).backward,
                       dx, rows);
    }
    if (weights_later()) {
      late_dy = dy;
      late_given = given;
    } else {
      std::tie(dweight, dbias) = weight_gradients(dy, given);
    }
    return {dx, dweight, dbias};
  }

  uint32_t late_inputs() const override { return 0b110; }
  void backward_weights() override {
    weight_gradients(std::exchange(late_dy, {}), std::exchange(late_given, {}));
  }

  /// dy: in bf16; given: before it was rounded.
  std::pair<Tensor, Tensor> weight_gradients(const Tensor& dy, const Tensor& given) {
    const Device device = dy.device();
    Tensor dweight, dbias;
    if (exact_sum(1) || exact_sum(2)) {
      add_to_exact_sums(dy, given);
      return {};
    }
    if (needs_grad(1)) {
      const GradTarget to = grad_target(1, weight_shape, DType::f32, device);
      bf16_gemm_reduce(device, to.accumulate, dy, x.get(), to.grad, rows);
      dweight = to.delivered();
    }
    if (needs_grad(2)) {
      const GradTarget to = grad_target(2, bias_shape, DType::f32, device);
      if (!to.accumulate) to.grad.set_zero();
      bias_bwd(device, given, to.grad, rows);
      dbias = to.delivered();
    }
    return {dweight, dbias};
  }

 private:
  void add_to_exact_sums(const Tensor& dy, const Tensor& given) const {
    const Device device = dy.device();
    const auto groups = std::ssize(rows);
    const int64_t n = weight_shape[-2], k = weight_shape[-1];
    if (const ExactSum sum = exact_sum(1)) {
      const Tensor rows_of_x = x.get();
      add_parts(sum, groups, parts, {1, n, k}, DType::f32,
                [&](int64_t first, int64_t last, const Tensor& out) {
                  const int64_t count = last - first;
                  bf16_gemm_reduce(device, false, dy.rows(first, last), rows_of_x.rows(first, last), out,
                                   {&count, 1});
                });
    }
    if (const ExactSum sum = exact_sum(2)) {
      add_parts(sum, groups, parts, {1, n}, DType::f32, [&](int64_t first, int64_t last, const Tensor& out) {
        const int64_t count = last - first;
        out.set_zero();
        bias_bwd(device, given.rows(first, last), out, {&count, 1});
      });
    }
  }

  Tensor late_dy, late_given;
};

}  // namespace

PackedWeight packed_weight(const Tensor& weight, PackedUse use) {
  SHOAL_CHECK(weight.dtype() == DType::f32 && (weight.dims() == 2 || weight.dims() == 3),
              "packed_weight: expected an f32 weight [N, K] or [G, N, K], got ", weight.dtype(), ' ',
              weight.shape());
  Leaf* leaf = weight.grad_ref.leaf;
  const bool keep = leaf != nullptr && leaf->keep_packed;
  if (keep && leaf->packed_fresh && leaf->packed.forward) return leaf->packed;
  const PackedWeight copies =
      keep && leaf->packed.forward ? leaf->packed : make_copies(weight, keep ? PackedUse::both : use);
  const ProfileSection section("weight packing");
  const Tensor values = weight.detach();
  std::vector<std::pair<int64_t, int64_t>> blocks;
  if (packs_in_order(values.device(), values.shape())) {
    blocks.emplace_back(0, values.num_rows());
  } else {
    for_each_pack_block(copies.shape, [&](int64_t first, int64_t last) { blocks.emplace_back(first, last); });
  }
  parallel_tasks(std::ssize(blocks), [&](int64_t i) {
    const auto& [first, last] = blocks[static_cast<size_t>(i)];
    pack_rows(values.device(), values, copies, first, last);
  });
  if (keep) {
    leaf->packed = copies;
    leaf->packed_fresh = true;
  }
  return copies;
}

Tensor bf16_linear(const Tensor& x_RK, const Tensor& weight, std::span<const int64_t> rows_per_group,
                   const Tensor& bias, DType result, std::span<const int64_t> rows_per_part) {
  SHOAL_CHECK(result == DType::bf16 || result == DType::f32,
              "bf16_linear: expected a result of bf16 or f32, got ", result);
  Bf16Linear function(weight, rows_per_group, result);
  const auto parts = rows_per_part.empty() ? rows_per_group : rows_per_part;
  function.parts.assign(parts.begin(), parts.end());
  return apply(std::move(function), x_RK, weight, bias);
}

}  // namespace shoal
