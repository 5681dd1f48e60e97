// SGD with optional momentum. Weight decay is the classic L2 form here (added to the gradient).
#include "core/ops/optimizer.h"
#include "optim/optimizer.h"

namespace shoal {

namespace {

struct SgdOptions final : Options {
  double momentum = 0.9;
  bool nesterov = false;
  DecayRule decay{.weight_decay = 0};
  void fields(FieldVisitor& v) override {
    v("momentum", momentum, "momentum factor; 0: plain SGD without state", in_range(0, 0.999999));
    v("nesterov", nesterov, "Nesterov momentum");
    decay.fields(v);
  }
  std::string conflict() const override {
    return nesterov && momentum == 0 ? "nesterov without momentum changes nothing; set momentum" : "";
  }
};

class Sgd final : public Optimizer {
 public:
  Sgd(const SgdOptions& options, const std::vector<Parameter*>& params)
      : Optimizer(params), options_(options) {
    if (options.momentum == 0) return;
    for (const Parameter* p : params) momentum_.push_back(make_state(*p));
  }
  void visit_state(const StateVisitor& visit) override {
    for (size_t i = 0; i < momentum_.size(); i++) visit("momentum", *parameters()[i], momentum_[i]);
  }
  int64_t state_bytes_per_element(ParamKind /*kind*/) const override {
    return options_.momentum == 0 ? 0 : 4;
  }

 protected:
  void update(const Block& block, double learning_rate, double grad_scale) override {
    const Parameter& p = *parameters()[block.index];
    sgd_step(p.value.device(),
             SgdStep{block.of(p.own_value()), block.of(p.own_grad()),
                     momentum_.empty() ? Tensor{} : block.of(momentum_[block.index]), learning_rate,
                     options_.momentum, options_.decay.of(p), grad_scale, options_.nesterov});
  }

 private:
  SgdOptions options_;
  std::vector<Tensor> momentum_;
};

const bool registered =
    OptimizerRegistry::add<SgdOptions>("sgd", "stochastic gradient descent with momentum",
                                       [](const SgdOptions& o, const std::vector<Parameter*>& params) {
                                         return std::make_unique<Sgd>(o, params);
                                       });

}  // namespace

}  // namespace shoal
