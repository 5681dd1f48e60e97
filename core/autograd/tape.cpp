#include "core/autograd/tape.h"

#include <algorithm>
#include <atomic>

#include "core/autograd/accumulate.h"
#include "core/autograd/late_weights.h"

namespace shoal {

namespace {
thread_local Tape* active_tape = nullptr;
thread_local int replay_depth = 0;
std::atomic<uint64_t> next_tape_id{1};

/// A place in a forward pass.
struct Passage final : Function {
  std::function<void()> passed;
  const char* name() const override { return "passage"; }
  bool runs_without_gradient() const override { return true; }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override {
    passed();
    return {};
  }
};

}  // namespace

Tensor& Leaf::grad_buffer(const Shape& shape, Device device) {
  if (!grad.defined() && make_grad) make_grad();
  if (!grad.defined()) {
    grad = Tensor::zeros(shape, grad_dtype, device);
  } else if (grad_is_zero) {
    grad.set_zero();
  }
  grad_is_zero = false;
  return grad;
}

void Leaf::end_use() {
  if (!exact_sum || !grad.defined() || grad_is_zero) return;
  exact_add(grad.device(), exact_sum, grad);
  grad_is_zero = true;
}

ExactSum Function::exact_sum(int input) const {
  const Leaf* leaf = inputs_.at(static_cast<size_t>(input)).leaf;
  return leaf != nullptr ? leaf->exact_sum : ExactSum{};
}

void Function::end_use(int input) const {
  if (Leaf* leaf = inputs_.at(static_cast<size_t>(input)).leaf; leaf != nullptr) leaf->end_use();
}

Function::GradTarget Function::grad_target(int input, const Shape& shape, DType dtype, Device device) const {
  Leaf* leaf = inputs_.at(static_cast<size_t>(input)).leaf;
  if (leaf == nullptr) return {Tensor::empty(shape, dtype, device), false, false};
  if (!leaf->grad.defined() && leaf->make_grad) leaf->make_grad();
  if (!leaf->grad.defined()) {
    leaf->grad = Tensor::empty(shape, leaf->grad_dtype, device);
    leaf->grad_is_zero = true;
  }
  const bool accumulate = !leaf->grad_is_zero;
  leaf->grad_is_zero = false;
  return {leaf->grad.view(shape), accumulate, true};
}

Tensor* Function::leaf_grad(int input, const Shape& shape, Device device) const {
  const auto i = static_cast<size_t>(input);
  Leaf* leaf = inputs_.at(i).leaf;
  if (leaf == nullptr) return nullptr;
  grad_views_.resize(inputs_.size());
  grad_views_[i] = leaf->grad_buffer(shape, device).view(shape);
  return &grad_views_[i];
}

Tape::Tape(Mode mode, bool replay) : id_(next_tape_id++), mode_(mode), replay_(replay || replaying()) {
  enter();
}

void Tape::enter() {
  previous_ = active_tape;
  active_tape = this;
  if (replay_) replay_depth++;
}

void Tape::leave() {
  active_tape = previous_;
  if (replay_) replay_depth--;
}

void Tape::park() {
  SHOAL_CHECK(active_tape == this, "Tape::park: expected the active tape");
  leave();
  parked_ = true;
}

Tape::~Tape() {
  if (!parked_) leave();
  // A pass that was never run backward (an error, or a forward-only use) must not leave uses counted.
  for (const Record& record : records_) {
    for (const GradRef& in : record.function->inputs_) {
      if (in.leaf != nullptr && !replay_) in.leaf->uses_left--;
    }
  }
  for (Leaf* leaf : counted_) leaf->uses_left--;
}

Tape* Tape::active() {
  return active_tape;
}
bool Tape::replaying() {
  return replay_depth > 0;
}

bool Tape::recording() {
  return active_tape != nullptr && active_tape->mode_ == Mode::record;
}

void Tape::on_backward(std::function<void()> passed) {
  if (!recording()) return;
  auto passage = std::make_unique<Passage>();
  passage->passed = std::move(passed);
  finish(std::move(passage), {}, {});
}

GradRef Tape::new_slot() {
  slots_.emplace_back();
  return GradRef{nullptr, id_, static_cast<int32_t>(slots_.size()) - 1};
}

bool Tape::prepare(Function& function, std::vector<GradRef> refs) {
  Tape* tape = active_tape;
  if (tape == nullptr || tape->mode_ == Mode::off) return false;
  bool any = false;
  for (size_t i = 0; i < refs.size(); i++) {
    // Slots of an outer tape are constants here (recompute detaches its inputs; see recompute.cpp).
    const bool wanted = refs[i].leaf != nullptr || refs[i].slot >= 0;
    any |= wanted;
    if (wanted && tape->mode_ == Mode::record) function.needs_ |= 1U << i;
  }
  function.inputs_ = std::move(refs);
  return any && tape->mode_ == Mode::record;
}

void Tape::count_uses(const Function& function) {
  Tape* tape = active_tape;
  if (tape == nullptr || tape->mode_ != Mode::count_uses || tape->replay_) return;
  for (const GradRef& in : function.inputs_) {
    if (in.leaf == nullptr) continue;
    in.leaf->uses_left++;
    tape->counted_.push_back(in.leaf);
  }
}

void Tape::finish(std::unique_ptr<Function> function, const std::vector<Tensor*>& outputs,
                  const std::vector<const Tensor*>& inputs) {
  for (const GradRef& in : function->inputs_) {
    if (in.leaf != nullptr && !active_tape->replay_) in.leaf->uses_left++;
  }
  Record record{std::move(function), {}, {}, {}, {}, 0};
  if (const Profiler* profiler = Profiler::active()) record.scope = profiler->node();
  for (Tensor* output : outputs) {
    output->grad_ref = output->defined() && is_float(output->dtype()) ? active_tape->new_slot() : GradRef{};
    record.outputs.push_back(output->grad_ref);
    record.output_shapes.push_back(output->shape());
  }
  for (const Tensor* input : inputs) {
    record.input_shapes.push_back(input->shape());
    record.input_devices.push_back(input->device());
  }
  active_tape->records_.push_back(std::move(record));
}

void Tape::deliver(const GradRef& to, const Tensor& grad, const Shape& shape, Device device) {
  if (to.leaf != nullptr) {
    accumulate(device, to.leaf->grad_buffer(shape, device), grad);
    return;
  }
  SHOAL_CHECK(to.tape == id_,
              "Tape::backward: a gradient belongs to another tape; was a tensor kept from an earlier pass?");
  Tensor& slot = slots_[static_cast<size_t>(to.slot)];
  if (!slot.defined()) {
    slot = grad;
  } else {
    // backward may return one tensor for several inputs (add does), so a slot can share its storage.
    if (!slot.is_sole_owner()) slot = slot.clone();
    accumulate(device, slot, grad);
  }
}

void Tape::run(Record& record) {
  std::vector<Tensor> grad_outputs(record.outputs.size());
  bool any = record.function->runs_without_gradient();
  for (size_t o = 0; o < record.outputs.size(); o++) {
    const int32_t slot = record.outputs[o].slot;
    if (slot < 0 || !slots_[static_cast<size_t>(slot)].defined()) continue;
    grad_outputs[o] = std::exchange(slots_[static_cast<size_t>(slot)], {}).view(record.output_shapes[o]);
    any = true;
  }
  const std::vector<GradRef> inputs = record.function->inputs_;
  std::vector<Tensor> grads(inputs.size());
  // Parameters whose gradients are put off: none unless all of the function's late inputs are parameters.
  std::vector<Leaf*> late;
  auto* later =
      any && WeightQueue::active() != nullptr ? dynamic_cast<LateWeights*>(record.function.get()) : nullptr;
  uint32_t late_inputs = later != nullptr ? later->late_inputs() & record.function->needs_ : 0;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (late_inputs >> i & 1U) late.push_back(inputs[i].leaf);
  }
  if (std::ranges::find(late, nullptr) != late.end()) late.clear();
  if (late.empty()) late_inputs = 0;
  if (any) {
    if (later != nullptr) later->weights_later_ = !late.empty();
    grads = record.function->backward(grad_outputs);
    SHOAL_CHECK(grads.size() == inputs.size(), record.function->name(), ": backward returned ", grads.size(),
                " gradients for ", inputs.size(), " inputs");
  }
  if (late.empty()) {
    record.function.reset();  // what forward saved is free from here on
  } else {
    WeightQueue::active()->entries_.push_back({std::move(record.function), later, late});
  }
  grad_outputs.clear();
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i]) continue;
    if (grads[i].defined()) deliver(inputs[i], grads[i], record.input_shapes[i], record.input_devices[i]);
    grads[i] = {};
    Leaf* leaf = inputs[i].leaf;
    if (leaf == nullptr || (late_inputs >> i & 1U) != 0) continue;  // a late use ends later
    leaf->end_use();
    if (--leaf->uses_left == 0 && leaf->on_grad_ready) leaf->on_grad_ready();
  }
}

Tensor Tape::unit_gradient(const Tensor& loss) {
  SHOAL_CHECK(loss.numel() == 1, "Tape::backward: expected a scalar loss, got shape ", loss.shape());
  if (loss.dtype() == DType::f64)
    return Tensor::from(std::vector<double>(1, 1.0), loss.shape(), loss.device());
  SHOAL_CHECK(loss.dtype() == DType::f32, "Tape::backward: expected an f32 or f64 loss, got ", loss.dtype());
  return Tensor::from(std::vector<float>(1, 1.0F), loss.shape(), loss.device());
}

void Tape::backward(const Tensor& loss) {
  backward({loss}, {unit_gradient(loss)});
}

void Tape::backward(const std::vector<Tensor>& outputs, const std::vector<Tensor>& grads) {
  SHOAL_CHECK(outputs.size() == grads.size(), "Tape::backward: ", outputs.size(), " outputs but ",
              grads.size(), " gradients");
  struct Active {
    explicit Active(Tape& t) : tape(t) {
      if (tape.parked_) tape.enter();
    }
    ~Active() {
      if (tape.parked_) tape.leave();
    }
    Tape& tape;
  } const active(*this);
  for (size_t i = 0; i < outputs.size(); i++) {
    const GradRef& ref = outputs[i].grad_ref;
    if (!grads[i].defined() || !ref) continue;
    deliver(ref, grads[i].grad_ref ? grads[i].detach() : grads[i], outputs[i].shape(), outputs[i].device());
  }
  run_all();
  slots_.clear();
}

void Tape::run_all() {
  Profiler* profiler = Profiler::active();
  if (profiler != nullptr) profiler->enter_phase(Profiler::Phase::backward);
  const int depth = profiler != nullptr ? profiler->depth() : 0;
  while (!records_.empty()) {
    Record record = std::move(records_.back());
    records_.pop_back();
    if (profiler != nullptr) profiler->move_to(record.scope, depth);
    run(record);
  }
  if (profiler != nullptr) profiler->leave_to(depth - 1);
}

}  // namespace shoal
