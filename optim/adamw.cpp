// AdamW (Loshchilov & Hutter, arXiv:1711.05101).
#include <cmath>

#include "core/ops/optimizer.h"
#include "optim/optimizer.h"

namespace shoal {

namespace {

struct AdamwOptions final : Options {
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  DecayRule decay;
  void fields(FieldVisitor& v) override {
    v("beta1", beta1, "decay of the first moment", in_range(0, 0.999999));
    v("beta2", beta2, "decay of the second moment", in_range(0, 0.99999999));
    v("eps", eps, "added to the root of the second moment", in_range(kMinFactor, 1));
    decay.fields(v);
  }
};

class Adamw final : public Optimizer {
 public:
  Adamw(const AdamwOptions& options, const std::vector<Parameter*>& params)
      : Optimizer(params), options_(options) {
    for (const Parameter* p : params) {
      m_.push_back(make_state(*p));
      v_.push_back(make_state(*p));
    }
  }
  void visit_state(const StateVisitor& visit) override {
    for (size_t i = 0; i < m_.size(); i++) {
      visit("m", *parameters()[i], m_[i]);
      visit("v", *parameters()[i], v_[i]);
    }
  }
  int64_t state_bytes_per_element(ParamKind /*kind*/) const override { return 8; }

 protected:
  void update(const Block& block, double learning_rate, double grad_scale) override {
    const auto t = static_cast<double>(num_steps());
    const Parameter& p = *parameters()[block.index];
    adamw_step(p.value.device(),
               AdamwStep{block.of(p.own_value()), block.of(p.own_grad()), block.of(m_[block.index]),
                         block.of(v_[block.index]), learning_rate, options_.beta1, options_.beta2,
                         options_.eps, options_.decay.of(p), 1 - std::pow(options_.beta1, t),
                         1 - std::pow(options_.beta2, t), grad_scale});
  }

 private:
  AdamwOptions options_;
  std::vector<Tensor> m_, v_;
};

const bool registered =
    OptimizerRegistry::add<AdamwOptions>("adamw", "Adam with decoupled weight decay (arXiv:1711.05101)",
                                         [](const AdamwOptions& o, const std::vector<Parameter*>& params) {
                                           return std::make_unique<Adamw>(o, params);
                                         });

}  // namespace

}  // namespace shoal
