#include "core/ops/activation.h"

#include "core/autograd/tape.h"

namespace shoal {

namespace {

class ActivateFunction final : public Function {
 public:
  explicit ActivateFunction(Activation f) : f_(f) {}
  const char* name() const override { return "activate"; }

  Tensor forward(const Tensor& x) {
    Tensor y = Tensor::empty_like(x);
    activate_fwd(x.device(), x, f_, y);
    if (needs_grad(0)) x_ = x;
    return y;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor x = x_.take();
    Tensor dx = dy[0].is_sole_owner() ? dy[0] : Tensor::empty_like(x);
    activate_bwd(x.device(), dy[0], x, f_, dx);
    return {dx};
  }

 private:
  Activation f_;
  Saved x_;
};

class GatedActivateFunction final : public Function {
 public:
  explicit GatedActivateFunction(Activation f) : f_(f) {}
  const char* name() const override { return "gated_activate"; }

  Tensor forward(const Tensor& x) {
    SHOAL_CHECK(x.dims() >= 1 && x.size(-1) % 2 == 0,
                "gated_activate: expected rows of even size (gate half, up half), got shape ", x.shape());
    Shape y_shape = x.shape();
    y_shape.set(-1, x.size(-1) / 2);
    Tensor y = Tensor::empty(y_shape, x.dtype(), x.device());
    gated_activate_fwd(x.device(), x, f_, y);
    if (needs_grad(0)) x_ = x;
    return y;
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    // x is the widest activation of the layer; its memory takes the gradient when nobody else reads it.
    const Tensor x = x_.take();
    Tensor dx = x.is_sole_owner() ? x : Tensor::empty_like(x);
    gated_activate_bwd(x.device(), dy[0], x, f_, dx);
    return {dx};
  }

 private:
  Activation f_;
  Saved x_;
};

}  // namespace

Tensor activate(const Tensor& x, Activation f) {
  return apply(ActivateFunction(f), x);
}

Tensor gated_activate(const Tensor& x_R2F, Activation f) {
  return apply(GatedActivateFunction(f), x_R2F);
}

}  // namespace shoal
