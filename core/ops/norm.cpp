#include "core/ops/norm.h"

#include "core/autograd/tape.h"

namespace shoal {

namespace {

enum class NormKind : uint8_t { rms, layer };

/// Inputs: x, residual (may be undefined), weight, bias (may be undefined).
/// Outputs: y, and the sum when there is a residual.
class NormFunction final : public Function {
 public:
  NormFunction(NormKind kind, double eps) : kind_(kind), eps_(eps) {}
  const char* name() const override { return kind_ == NormKind::rms ? "rms_norm" : "layer_norm"; }

  std::vector<Tensor> forward(const Tensor& x, const Tensor& residual, const Tensor& weight,
                              const Tensor& bias) {
    check(x, residual, weight, bias);
    NormForward args{x, residual, weight, bias, Tensor::empty_like(x), {}, {}, {}, eps_};
    if (residual.defined()) args.sum = Tensor::empty_like(x);
    args.rstd_T = Tensor::empty({x.num_rows()}, x.dtype(), x.device());
    if (kind_ == NormKind::layer) args.mean_T = Tensor::empty_like(args.rstd_T);
    (kind_ == NormKind::rms ? rms_norm_fwd : layer_norm_fwd)(x.device(), args);
    x_ = residual.defined() ? args.sum : x;
    weight_ = weight;
    mean_T_ = args.mean_T;
    rstd_T_ = args.rstd_T;
    if (residual.defined()) return {args.y, args.sum};
    return {args.y};
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    const Tensor& dy = grad_outputs[0];
    const Tensor dsum = grad_outputs.size() > 1 ? grad_outputs[1] : Tensor{};
    if (!dy.defined()) return {dsum, dsum, {}, {}};
    const bool reuse = dy.is_sole_owner();  // asked before args shares it
    NormBackward args{dy, dsum, x_, weight_, mean_T_, rstd_T_, {}, {}, {}};
    std::vector<Tensor> grads(4);
    if (needs_grad(0) || needs_grad(1)) {
      args.dx = grads[0] = grads[1] = reuse ? dy : Tensor::empty_like(x_);
    }
    args.dweight = sums_for(2, grads);
    args.dbias = sums_for(3, grads);
    (kind_ == NormKind::rms ? rms_norm_bwd : layer_norm_bwd)(x_.device(), args);
    return grads;
  }

 private:
  /// The buffer that the gradient of a weight is added to: the leaf's, or a new one, which is returned by
  /// backward.
  Tensor sums_for(int input, std::vector<Tensor>& grads) const {
    if (!needs_grad(input)) return {};
    if (const Tensor* leaf = leaf_grad(input, weight_.shape(), weight_.device())) return *leaf;
    return grads[static_cast<size_t>(input)] = Tensor::zeros_like(weight_);
  }

  void check(const Tensor& x, const Tensor& residual, const Tensor& weight, const Tensor& bias) const {
    const auto fits = [&](const Tensor& t) { return t.numel() == x.row_size() && t.dtype() == x.dtype(); };
    SHOAL_CHECK(fits(weight), name(), ": expected a weight of ", x.row_size(), " elements of ", x.dtype(),
                " like the rows of x ", x.shape(), ", got ", weight.dtype(), ' ', weight.shape());
    SHOAL_CHECK(!bias.defined() || fits(bias), name(), ": expected a bias of ", x.row_size(), " elements of ",
                x.dtype(), ", got ", bias.dtype(), ' ', bias.shape());
    SHOAL_CHECK(!residual.defined() || (residual.shape() == x.shape() && residual.dtype() == x.dtype()),
                name(), ": expected a residual like x, ", x.dtype(), ' ', x.shape(), ", got ",
                residual.dtype(), ' ', residual.shape());
  }

  NormKind kind_;
  double eps_;
  Tensor x_, weight_, mean_T_, rstd_T_;
};

}  // namespace

Tensor rms_norm(const Tensor& x_TD, const Tensor& weight_D, double eps) {
  return apply(NormFunction(NormKind::rms, eps), x_TD, Tensor{}, weight_D, Tensor{})[0];
}

Tensor layer_norm(const Tensor& x_TD, const Tensor& weight_D, const Tensor& bias_D, double eps) {
  return apply(NormFunction(NormKind::layer, eps), x_TD, Tensor{}, weight_D, bias_D)[0];
}

NormResult add_rms_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D, double eps) {
  const auto out = apply(NormFunction(NormKind::rms, eps), x_TD, residual_TD, weight_D, Tensor{});
  return {out[0], out[1]};
}

NormResult add_layer_norm(const Tensor& x_TD, const Tensor& residual_TD, const Tensor& weight_D,
                          const Tensor& bias_D, double eps) {
  const auto out = apply(NormFunction(NormKind::layer, eps), x_TD, residual_TD, weight_D, bias_D);
  return {out[0], out[1]};
}

}  // namespace shoal
