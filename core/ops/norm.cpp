#include "core/ops/norm.h"

#include "core/autograd/tape.h"
#include "core/ops/elementwise.h"

namespace shoal {

namespace {

enum class NormKind : uint8_t { rms, layer };
/// What is returned beside y.
enum class NormCarry : uint8_t { nothing, sum, input };

/// Inputs: x, residual (may be undefined), weight, bias (may be undefined).
/// Outputs: y, and what is carried on: the sum of x and the residual, or x.
class NormFunction final : public Function {
 public:
  NormFunction(NormKind kind, double eps, DType y_dtype, NormCarry carry)
      : kind_(kind), eps_(eps), y_dtype_(y_dtype), carry_(carry) {}
  const char* name() const override { return kind_ == NormKind::rms ? "rms_norm" : "layer_norm"; }

  std::vector<Tensor> forward(const Tensor& x, const Tensor& residual, const Tensor& weight,
                              const Tensor& bias) {
    check(x, residual, weight, bias);
    NormForward args{x,  residual, weight, bias, Tensor::empty(x.shape(), y_dtype_, x.device()),
                     {}, {},       {},     eps_};
    if (residual.defined()) args.sum = Tensor::empty_like(residual);
    args.rstd_T = Tensor::empty({x.num_rows()}, stats_dtype(x.dtype()), x.device());
    if (kind_ == NormKind::layer) args.mean_T = Tensor::empty_like(args.rstd_T);
    (kind_ == NormKind::rms ? rms_norm_fwd : layer_norm_fwd)(x.device(), args);
    x_ = residual.defined() ? args.sum : x;
    x_dtype_ = x.dtype();
    weight_ = weight;
    mean_T_ = args.mean_T;
    rstd_T_ = args.rstd_T;
    if (carry_ == NormCarry::nothing) return {args.y};
    return {args.y, x_};
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const Tensor dsum = grad_outputs.size() > 1 ? grad_outputs[1] : Tensor{};
    const bool mixed = x_dtype_ != x_.dtype();
    if (!dy.defined()) return {mixed ? lowered(dsum) : dsum, dsum, {}, {}};
    const bool reuse = dy.is_sole_owner() && dy.dtype() == x_.dtype();  // asked before args shares it
    NormBackward args{dy, dsum, x_, weight_, mean_T_, rstd_T_, {}, {}, {}, {}};
    std::vector<Tensor> grads(4);
    if (needs_grad(0) || needs_grad(1)) {
      args.dx = grads[0] = grads[1] = reuse ? dy : Tensor::empty_like(x_);
      if (mixed) args.dx_low = grads[0] = Tensor::empty(x_.shape(), x_dtype_, x_.device());
    }
    args.dweight = sums_for(2, grads);
    args.dbias = sums_for(3, grads);
    (kind_ == NormKind::rms ? rms_norm_bwd : layer_norm_bwd)(x_.device(), args);
    return grads;
  }

 private:
  Tensor lowered(const Tensor& gradient) const {
    if (!gradient.defined()) return {};
    const Tensor low = Tensor::empty(gradient.shape(), x_dtype_, gradient.device());
    cast_fwd(low.device(), gradient, low);
    return low;
  }

  /// The buffer that the gradient of a weight is added to: the leaf's, or a new one, which is returned by
  /// backward.
  Tensor sums_for(int input, std::vector<Tensor>& grads) const {
    if (!needs_grad(input)) return {};
    if (const Tensor* leaf = leaf_grad(input, weight_.shape(), weight_.device())) return *leaf;
    return grads[static_cast<size_t>(input)] = Tensor::zeros_like(weight_);
  }

  void check(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias) const {
    const DType stats = stats_dtype(x.dtype());
    const auto fits = [&](const Tensor& t) { return t.numel() == x.row_size() && t.dtype() == stats; };
    SHOAL_CHECK(fits(weight), name(), ": expected a weight of ", x.row_size(), " elements of ", stats,
                " like the rows of x ", x.shape(), ", got ", weight.dtype(), ' ', weight.shape());
    SHOAL_CHECK(!bias.defined() || fits(bias), name(), ": expected a bias of ", x.row_size(), " elements of ",
                stats, ", got ", bias.dtype(), ' ', bias.shape());
    const DType stream = residual.defined() ? residual.dtype() : x.dtype();
    const bool lowers = y_dtype_ == DType::bf16 && stream == DType::f32;
    SHOAL_CHECK(!residual.defined() || (residual.shape() == x.shape() &&
                                        (stream == x.dtype() || (lowers && x.dtype() == DType::bf16))),
                name(), ": expected a residual like x, ", x.dtype(), ' ', x.shape(), ", got ",
                residual.dtype(), ' ', residual.shape());
    SHOAL_CHECK(y_dtype_ == stream || lowers, name(), ": expected y of ", stream, ", or bf16 from f32, got ",
                y_dtype_);
  }

  NormKind kind_;
  double eps_;
  DType y_dtype_, x_dtype_ = DType::f32;
  NormCarry carry_;
  Tensor x_, weight_, mean_T_, rstd_T_;
};

}  // namespace

Tensor rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps, DType y_dtype) {
  return apply(NormFunction(NormKind::rms, eps, y_dtype, NormCarry::nothing), x_TD, Tensor{}, weight_D,
               Tensor{})[0];
}

Tensor layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps,
                  DType y_dtype) {
  return apply(NormFunction(NormKind::layer, eps, y_dtype, NormCarry::nothing), x_TD, Tensor{}, weight_D,
               bias_D)[0];
}

NormResult carry_rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps, DType y_dtype) {
  const auto out =
      apply(NormFunction(NormKind::rms, eps, y_dtype, NormCarry::input), x_TD, Tensor{}, weight_D, Tensor{});
  return {out[0], out[1]};
}

NormResult carry_layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps,
                            DType y_dtype) {
  const auto out =
      apply(NormFunction(NormKind::layer, eps, y_dtype, NormCarry::input), x_TD, Tensor{}, weight_D, bias_D);
  return {out[0], out[1]};
}

NormResult add_rms_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D, double eps) {
  const auto out = apply(NormFunction(NormKind::rms, eps, x_TD.dtype(), NormCarry::sum), x_TD, residual_TD,
                         weight_D, Tensor{});
  return {out[0], out[1]};
}

NormResult add_layer_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D,
                          const Tensor& bias_D, double eps) {
  const auto out = apply(NormFunction(NormKind::layer, eps, x_TD.dtype(), NormCarry::sum), x_TD, residual_TD,
                         weight_D, bias_D);
  return {out[0], out[1]};
}

}  // namespace shoal
