#include "core/autograd/recompute.h"

#include "core/autograd/tape.h"

namespace shoal {

/// The inputs are held here rather than passed to apply(), because their number is not fixed.
class RecomputeFunction final : public Function {
 public:
  explicit RecomputeFunction(RecomputeBody body) : body_(std::move(body)) {}
  RecomputeFunction(const RecomputeFunction&) = delete;
  RecomputeFunction& operator=(const RecomputeFunction&) = delete;
  ~RecomputeFunction() override {
    for (Leaf* leaf : counted_) leaf->uses_left--;
  }
  const char* name() const override { return "recompute"; }
  bool runs_without_gradient() const override { return true; }

  std::vector<Tensor> run_forward(const std::vector<Tensor>& inputs) {
    inputs_kept_.clear();
    for (const Tensor& t : inputs) inputs_kept_.push_back(t.detach());
    Tape dry(Tape::Mode::count_uses);
    std::vector<Tensor> outputs = body_(inputs_kept_);
    counted_ = std::exchange(dry.counted_, {});
    for (Tensor& t : outputs) t = t.detach();
    return outputs;
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    counted_.clear();  // the inner tape closes these uses
    Tape inner(Tape::Mode::record, /*replay=*/true);
    // Each input is a leaf of the inner tape; its gradient is handed to the outer one.
    std::vector<Leaf> leaves(inputs_kept_.size());
    std::vector<Tensor> inputs = inputs_kept_;
    for (size_t i = 0; i < inputs.size(); i++) {
      if (!inputs[i].defined() || !is_float(inputs[i].dtype()) || !needs_grad(static_cast<int>(i))) continue;
      leaves[i].grad_dtype = inputs[i].dtype();
      leaves[i].uses_left = 1 << 20;  // never "ready": the outer tape reports readiness
      inputs[i].grad_ref.leaf = &leaves[i];
    }
    const std::vector<Tensor> outputs = body_(inputs);
    inner.backward(outputs, grad_outputs);
    std::vector<Tensor> grads(inputs.size());
    for (size_t i = 0; i < inputs.size(); i++) grads[i] = leaves[i].grad;
    return grads;
  }

  static std::vector<Tensor> apply_to(RecomputeBody body, const std::vector<Tensor>& inputs) {
    SHOAL_CHECK(inputs.size() <= 32, "recompute: expected at most 32 inputs, got ", inputs.size());
    auto function = std::make_unique<RecomputeFunction>(std::move(body));
    std::vector<GradRef> refs;
    std::vector<const Tensor*> pointers;
    for (const Tensor& t : inputs) {
      refs.push_back(t.grad_ref);
      pointers.push_back(&t);
    }
    // Parameters are used inside the body even when no input wants a gradient (the first layer).
    Tape* tape = Tape::active();
    if (tape == nullptr || tape->mode_ != Tape::Mode::record) return function->body_(inputs);
    Tape::prepare(*function, std::move(refs));
    std::vector<Tensor> outputs = function->run_forward(inputs);
    std::vector<Tensor*> out;
    for (Tensor& t : outputs) out.push_back(&t);
    Tape::finish(std::move(function), std::move(out), pointers);
    return outputs;
  }

 private:
  RecomputeBody body_;
  std::vector<Tensor> inputs_kept_;
  std::vector<Leaf*> counted_;  // parameters used inside; their uses are open until backward
};

std::vector<Tensor> recompute(RecomputeBody body, const std::vector<Tensor>& inputs) {
  return RecomputeFunction::apply_to(std::move(body), inputs);
}

}  // namespace shoal
