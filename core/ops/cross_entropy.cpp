#include "core/ops/cross_entropy.h"

#include <algorithm>

#include "core/autograd/tape.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/elementwise.h"
#include "core/ops/linear.h"

namespace shoal {

namespace {

// The loss: total (f64) * scale as a scalar of `dtype`.
Tensor loss_of(const Tensor& total, double scale, DType dtype) {
  scale_fwd(total.device(), total, scale, total);
  Tensor loss = Tensor::empty({}, dtype, total.device());
  cast_fwd(total.device(), total, loss);
  return loss;
}

class CrossEntropyFunction final : public Function {
 public:
  explicit CrossEntropyFunction(double scale) : scale_(scale) {}
  const char* name() const override { return "cross_entropy"; }

  Tensor forward(const Tensor& logits, const Tensor& labels) {
    SHOAL_CHECK(labels.dtype() == DType::i32 && labels.numel() == logits.num_rows(),
                "cross_entropy: expected i32 labels, one for each of the ", logits.num_rows(),
                " rows of logits ", logits.shape(), ", got ", labels.dtype(), ' ', labels.shape());
    const Tensor total = Tensor::zeros({}, DType::f64, logits.device());
    cross_entropy_fwd(logits.device(), CrossEntropy{logits, labels, scale_, needs_grad(0), total});
    if (needs_grad(0)) dlogits_ = logits;
    return loss_of(total, scale_, stats_dtype(logits.dtype()));
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    scale_by(dlogits_.device(), dlogits_, dy[0]);
    return {dlogits_, {}};
  }

 private:
  double scale_;
  Tensor dlogits_;
};

/// Inputs: x, weight, labels.
class LinearCrossEntropyFunction final : public Function {
 public:
  LinearCrossEntropyFunction(double scale, PackedWeight copies, VocabPart part)
      : scale_(scale), copies_(std::move(copies)), part_(std::move(part)) {}
  const char* name() const override { return "linear_cross_entropy"; }

  Tensor forward(const Tensor& x, const Tensor& weight, const Tensor& labels) {
    const int64_t num_tokens = x.num_rows(), vocab = weight.size(0);
    SHOAL_CHECK(weight.dims() == 2 && weight.size(1) == x.row_size() && labels.dtype() == DType::i32 &&
                    labels.numel() == num_tokens,
                name(), ": expected x [T, D], weight [V, D] and T i32 labels, got x ", x.shape(), ", weight ",
                weight.shape(), " and labels ", labels.dtype(), ' ', labels.shape());
    const DType stats = stats_dtype(x.dtype());
    const bool want_grad = needs_grad(0) || needs_grad(1);
    if (needs_grad(0)) dx_ = Tensor::empty(x.shape(), x.dtype(), x.device());
    GradTarget dweight;
    if (needs_grad(1)) {
      dweight = grad_target(1, weight.shape(), stats, weight.device());
      if (num_tokens == 0 && !dweight.accumulate) dweight.grad.set_zero();
      into_leaf_ = dweight.is_leaf;
      dweight_ = dweight.delivered();
    }
    // Parts differ in their number of rows, but not in their blocks.
    const int64_t block = logits_block(num_tokens, part_.gather ? part_.block_vocab : vocab, stats);
    const Tensor logits = Tensor::empty({block, vocab}, stats, x.device());
    const Tensor total = Tensor::zeros({}, DType::f64, x.device());
    for (int64_t t = 0; t < num_tokens; t += block) {
      const int64_t count = std::min(block, num_tokens - t);
      const Tensor x_block = x.view({num_tokens, x.row_size()}).rows(t, t + count);
      const Tensor block_logits = logits.rows(0, count);
      multiply(x_block, weight, block_logits);
      lose(
          CrossEntropy{block_logits, labels.view({num_tokens}).rows(t, t + count), scale_, want_grad, total});
      if (want_grad) multiply_back(x_block, weight, block_logits, t, dweight);
      dweight.accumulate = true;
    }
    copies_ = {};
    if (into_leaf_) end_use(1);
    return loss_of(total, scale_, stats);
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    if (into_leaf_) {
      expect_seed(dy[0].device(), dy[0]);
    } else {
      for (const Tensor& grad : {dx_, dweight_})
        if (grad.defined()) scale_by(grad.device(), grad, dy[0]);
    }
    return {dx_, dweight_, {}};
  }

 private:
  void lose(const CrossEntropy& args) const {
    const Device device = args.logits_TV.device();
    if (!part_.gather) return cross_entropy_fwd(device, args);
    const Tensor mine = Tensor::empty({3, args.labels_T.numel()}, DType::f64, device);
    vocab_stats_fwd(device, args.logits_TV, args.labels_T, part_.rows, mine);
    vocab_cross_entropy_fwd(device, args, part_.rows, part_.gather(mine));
  }

  void multiply(const Tensor& x, const Tensor& weight, const Tensor& logits) const {
    const int64_t count = x.size(0);
    if (x.dtype() == DType::bf16)
      return packed_gemm_rows(x.device(), PackedUse::forward, x, copies_.forward, logits, {&count, 1});
    gemm(x.device(), {.transpose_b = true}, x, weight, logits);
  }

  void multiply_back(const Tensor& x, const Tensor& weight, const Tensor& dlogits, int64_t first,
                     const GradTarget& dweight) const {
    const int64_t count = x.size(0);
    const Tensor dx =
        dx_.defined() ? dx_.view({dx_.num_rows(), dx_.row_size()}).rows(first, first + count) : Tensor{};
    if (x.dtype() != DType::bf16) {
      if (dx.defined()) gemm(x.device(), {}, dlogits, weight, dx);
      if (dweight.grad.defined())
        gemm(x.device(), {.transpose_a = true, .accumulate = dweight.accumulate}, dlogits, x, dweight.grad);
      return;
    }
    const Tensor low = Tensor::empty(dlogits.shape(), DType::bf16, x.device());
    cast_fwd(x.device(), dlogits, low);
    if (dx.defined())
      packed_gemm_rows(x.device(), PackedUse::backward, low, copies_.backward, dx, {&count, 1});
    if (dweight.grad.defined())
      bf16_gemm_reduce(x.device(), dweight.accumulate, low, x, dweight.grad, {&count, 1});
  }

  double scale_;
  PackedWeight copies_;
  VocabPart part_;  // without gather: the weight has all rows
  bool into_leaf_ = false;
  Tensor dx_, dweight_;
};

}  // namespace

int64_t logits_block(int64_t num_tokens, int64_t vocab, DType stats) {
  // Each block passes over the whole weight and its gradient three times: fewer tokens would cost more in
  // those than they save where the logits leave the caches.
  constexpr int64_t kBytes = int64_t{16} << 20, kMinTokens = 256;
  const int64_t fit = kBytes / std::max<int64_t>(1, vocab * dtype_size(stats));
  return std::min(num_tokens, std::max(fit / kMinTokens * kMinTokens, kMinTokens));
}

Tensor linear_cross_entropy(const Tensor& x_TD, const Tensor& weight_VD, const Tensor& labels_T,
                            double scale) {
  return linear_cross_entropy(x_TD, weight_VD, labels_T, scale, {});
}

Tensor linear_cross_entropy(const Tensor& x_TD, const Tensor& weight_VD, const Tensor& labels_T, double scale,
                            const VocabPart& part) {
  PackedWeight copies;
  if (x_TD.dtype() == DType::bf16) copies = packed_weight(weight_VD);
  return apply(LinearCrossEntropyFunction(scale, std::move(copies), part), x_TD, weight_VD, labels_T);
}

Tensor cross_entropy(const Tensor& logits_TV, const Tensor& labels_T, double scale) {
  return apply(CrossEntropyFunction(scale), logits_TV, labels_T);
}

}  // namespace shoal
