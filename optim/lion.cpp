// Lion (core/ops/optimizer.h): the sign of an interpolated momentum. One state tensor.
#include "core/ops/optimizer.h"

#include "optim/optimizer.h"

namespace shoal {

namespace {

struct LionOptions final : Options {
  double beta1 = 0.9, beta2 = 0.99;
  DecayRule decay;
  void fields(FieldVisitor& v) override {
    v("beta1", beta1, "weight of the momentum in the update", in_range(0, 0.999999));
    v("beta2", beta2, "decay of the momentum", in_range(0, 0.999999));
    decay.fields(v);
  }
};

class Lion final : public Optimizer {
 public:
  Lion(const LionOptions& options, const std::vector<Parameter*>& params)
      : Optimizer(params), options_(options) {
    for (const Parameter* p : params) m_.push_back(make_state(*p));
  }
  void visit_state(const StateVisitor& visit) override {
    for (size_t i = 0; i < m_.size(); i++) visit("m", *parameters()[i], m_[i]);
  }
  int64_t state_bytes_per_element(ParamKind /*kind*/) const override { return 4; }

 protected:
  void update(const Block& block, double learning_rate, double grad_scale) override {
    const Parameter& p = *parameters()[block.index];
    lion_step(p.value.device(), {.param = block.of(p.own_value()),
                                 .grad = block.of(p.own_grad()),
                                 .m = block.of(m_[block.index]),
                                 .learning_rate = learning_rate,
                                 .beta1 = options_.beta1,
                                 .beta2 = options_.beta2,
                                 .weight_decay = options_.decay.of(p),
                                 .grad_scale = grad_scale});
  }

 private:
  LionOptions options_;
  std::vector<Tensor> m_;
};

const bool registered =
    OptimizerRegistry::add<LionOptions>("lion", "sign of an interpolated momentum (arXiv:2302.06675)",
                                        [](const LionOptions& o, const std::vector<Parameter*>& params) {
                                          return std::make_unique<Lion>(o, params);
                                        });

}  // namespace

}  // namespace shoal
