// Squared ReLU (So et al., arXiv:2109.08668, section 3): max(x, 0)^2.
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "models/ffn.h"

namespace shoal {

namespace {

class ReluSquared final : public FfnActivation {
 public:
  bool gated() const override { return false; }
  Tensor forward(const Tensor& h) const override {
    const Tensor positive = activate(h, Activation::relu);
    return mul(positive, positive);
  }
};

const bool registered =
    FfnActivationRegistry::add<NoOptions>("relu_squared", "max(x, 0)^2 (arXiv:2109.08668)",
                                          [](const NoOptions&) { return std::make_unique<ReluSquared>(); });

}  // namespace

}  // namespace shoal
