// Lion (Chen et al., arXiv:2302.06675, algorithm 2): the sign of an interpolated momentum. One state tensor.
//   c = b1 m + (1 - b1) g;  p = p - lr * (sign(c) + weight_decay * p);  m = b2 m + (1 - b2) g
// The loop is plain host code; a device kernel would go to core/ops/optimizer.h like AdamW's.
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
  int64_t state_bytes_per_element() const override { return 4; }

 protected:
  void update(const Block& block, double learning_rate, double grad_scale) override {
    const Parameter& p = *parameters()[block.index];
    SHOAL_CHECK(p.value.device().type == DeviceType::cpu, "lion: expected parameters on cpu, got ",
                p.value.device(), "; use optimizer: adamw");
    dispatch_float(p.value.dtype(), "lion",
                   [&]<class T>() { update_typed<T>(p, block, learning_rate, grad_scale); });
  }

 private:
  template <class T>
  void update_typed(const Parameter& parameter, const Block& block, double learning_rate,
                    double grad_scale) const {
    T* p = parameter.value.data<T>();
    T* m = m_[block.index].data<T>();
    const T* grad = parameter.leaf.grad.data<T>();
    const T b1 = static_cast<T>(options_.beta1), b2 = static_cast<T>(options_.beta2), one = 1;
    const T lr = static_cast<T>(learning_rate), decay = static_cast<T>(options_.decay.of(parameter));
    const T scale = static_cast<T>(grad_scale);
    for (int64_t i = block.begin; i < block.end; i++) {
      const T g = scale * grad[i], c = b1 * m[i] + (one - b1) * g;
      const T sign = static_cast<T>((c > 0) - (c < 0));
      p[i] -= lr * (sign + decay * p[i]);
      m[i] = b2 * m[i] + (one - b2) * g;
    }
  }

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
