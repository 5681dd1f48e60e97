#include "models/ffn.h"

#include "core/autograd/saved.h"
#include "core/base/profiler.h"
#include "core/ops/activation.h"
#include "core/ops/linear.h"

namespace shoal {

namespace {

class Plain final : public FfnActivation {
 public:
  explicit Plain(Activation f) : f_(f) {}
  bool gated() const override { return false; }
  Tensor forward(const Tensor& h) const override { return activate(h, f_); }

 private:
  Activation f_;
};

class Gated final : public FfnActivation {
 public:
  explicit Gated(Activation f) : f_(f) {}
  bool gated() const override { return true; }
  Tensor forward(const Tensor& h) const override { return gated_activate(h, f_); }

 private:
  Activation f_;
};

template <class A>
bool add(const char* name, const char* doc, Activation f) {
  return FfnActivationRegistry::add<NoOptions>(name, doc,
                                               [f](const NoOptions&) { return std::make_unique<A>(f); });
}
const bool registered[] = {
    add<Gated>("swiglu", "silu(gate) * up (arXiv:2002.05202)", Activation::silu),
    add<Gated>("geglu", "gelu(gate) * up (arXiv:2002.05202)", Activation::gelu),
    add<Plain>("silu", "x * sigmoid(x)", Activation::silu),
    add<Plain>("gelu", "x * Phi(x), exact", Activation::gelu),
    add<Plain>("relu", "max(x, 0)", Activation::relu),
};

}  // namespace

int64_t auto_ffn_hidden(int64_t hidden_size, bool gated) {
  return gated ? (hidden_size * 8 + 3 * 128 - 1) / (3 * 128) * 128 : 4 * hidden_size;
}

Ffn::Ffn(const FfnShape& shape, const Choice& activation, const TokenSplit& split,
         const BuildContext& context)
    : shape_(shape), split_(split), activation_(FfnActivationRegistry::make(activation)) {
  const int64_t D = shape.hidden_size, F = shape.ffn_hidden;
  const bool gated = activation_->gated();
  const Placement cut = Placement::tensor(gated ? 1 : 0);
  w1_ = &add_parameter(context, "w1", gated ? Shape{2, F, D} : Shape{F, D}, Init::normal(shape.init_std),
                       ParamKind::matrix, cut);
  w1_->stacked_dims = gated ? 1 : 0;
  if (shape.bias) {
    b1_ = &add_parameter(context, "b1", gated ? Shape{2, F} : Shape{F}, Init::zeros(), ParamKind::bias, cut);
  }
  w2_ = &add_parameter(context, "w2", Shape{D, F}, Init::normal(shape.output_init_std), ParamKind::matrix,
                       Placement::tensor(1));
  if (shape.bias) b2_ = &add_parameter(context, "b2", Shape{D}, Init::zeros(), ParamKind::bias);
}

Tensor Ffn::forward(const Tensor& x_TD, int64_t num_tokens) const {
  const ProfileSection section("ffn");
  const int64_t D = shape_.hidden_size, up = w1_->value.numel() / D;
  const Tensor b1 = b1_ ? b1_->value.view({up}) : Tensor{};
  const Tensor b2 = b2_ ? b2_->value : Tensor{};
  const auto project_up = [w1 = w1_->value.view({up, D}), b1](const Tensor& x) { return linear(x, w1, b1); };
  const auto activate = [this](const Tensor& h) { return activation_->forward(h); };
  const Tensor a = apply_again(
      shape_.recompute.activations,
      apply_again(shape_.recompute.up_projections, split_.gather(x_TD, num_tokens), project_up), activate);
  return split_.linear_scatter(a, w2_->value, b2);
}

}  // namespace shoal
