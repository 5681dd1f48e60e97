#include "launch/pipeline.h"

#include <deque>
#include <utility>

#include "core/autograd/late_weights.h"
#include "core/base/profiler.h"

namespace shoal {

using Kind = PipelineAction::Kind;

struct Pipeline::Message {
  Tensor tensor;
  Work work;
};

/// Uses that the forward pass of a micro-batch has opened. Where each backward is reduced, they are counted
/// apart from those of other micro-batches.
struct Pipeline::OpenUses {
  std::vector<std::pair<Leaf*, int>> counts;

  OpenUses() = default;
  OpenUses(OpenUses&& other) noexcept : counts(std::exchange(other.counts, {})) {}
  OpenUses& operator=(OpenUses&& other) noexcept {
    std::swap(counts, other.counts);
    return *this;
  }
  ~OpenUses() { give_back(); }
  void take(const std::vector<Parameter*>& parameters) {
    for (Parameter* p : parameters)
      if (p->leaf.uses_left != 0) counts.emplace_back(&p->leaf, std::exchange(p->leaf.uses_left, 0));
  }
  void give_back() {
    for (const auto& [leaf, count] : std::exchange(counts, {})) leaf->uses_left += count;
  }
};

struct Pipeline::Pass {
  std::span<const ModelBatch> batches;
  const ForwardContext& context;
  const OnTerms& on_terms;
  bool trains;  // else forward alone

  /// A forward pass whose backward has not run.
  struct Open {
    std::unique_ptr<Tape> tape;
    std::unique_ptr<Leaf> input;  // collects the gradient of what the stage before has sent
    Shape input_shape;
    Device device;
    Tensor result, loss;  // what backward starts from; values of `result` are not kept
    OpenUses uses;        // the last member: given back before the tape goes
  };
  /// Weight gradients put off.
  struct Late {
    WeightQueue queue;
    OpenUses uses;
  };
  using Place = std::pair<int, int>;  // stage, micro-batch
  std::map<Place, Open> open;
  std::map<Place, Late> weights;
  std::map<std::pair<bool, Place>, Message> arriving;  // gradient?, of the stage that made it
  std::deque<Message> leaving;
};

Pipeline::Pipeline(Model& model, const Mesh& mesh, GradReducer& reducer)
    : model_(model),
      mesh_(mesh),
      reducer_(reducer),
      parameters_(model.parameters()),
      links_(mesh.comm(Axis::pp), mesh.layout().pipeline.virtual_stages > 1) {}
Pipeline::~Pipeline() = default;

PipelineShape Pipeline::shape(size_t num_micro_batches) const {
  return {mesh_.layout().pp, mesh_.layout().pipeline.virtual_stages, static_cast<int>(num_micro_batches)};
}

void Pipeline::train(std::span<const ModelBatch> micro_batches, const ForwardContext& context,
                     const OnTerms& on_terms) {
  std::vector<PipelineStep>& steps = train_steps_[micro_batches.size()];
  if (steps.empty() && !micro_batches.empty()) {
    steps =
        pipeline_steps(make_pipeline_schedule(mesh_.layout().pipeline.schedule, shape(micro_batches.size())),
                       mesh_.coords()[Axis::pp].index);
  }
  Pass pass{micro_batches, context, on_terms, /*trains=*/true, {}, {}, {}, {}};
  run(steps, pass);
}

void Pipeline::forward(std::span<const ModelBatch> micro_batches, const ForwardContext& context,
                       const OnTerms& on_terms) {
  std::vector<PipelineStep>& steps = forward_steps_[micro_batches.size()];
  if (steps.empty() && !micro_batches.empty())
    steps =
        pipeline_steps(make_forward_schedule(shape(micro_batches.size())), mesh_.coords()[Axis::pp].index);
  const NoGrad no_grad;
  Pass pass{micro_batches, context, on_terms, /*trains=*/false, {}, {}, {}, {}};
  run(steps, pass);
}

void Pipeline::run(const std::vector<PipelineStep>& steps, Pass& pass) {
  for (const PipelineStep& step : steps) {
    start_receives(step, pass);
    const bool each = pass.trains && reducer_.reduces_each_backward(),
               ends_uses = step.action.kind == Kind::backward || step.action.kind == Kind::backward_weight;
    if (each && ends_uses) reducer_.begin_backward(step.action.stage);
    if (pass.trains && !each && &step == &steps.back()) reducer_.begin_last_backward();
    const Tensor message = run_action(step.action, pass);
    if (step.action.kind != Kind::backward_weight) send(step, message, pass);
    if (each && ends_uses) reducer_.end_backward();
  }
  for (Message& message : pass.leaving) message.work.wait();
}

/// Returns what goes to another stage, if the action makes something for one.
Tensor Pipeline::run_action(const PipelineAction& action, Pass& pass) {
  if (action.kind == Kind::forward) return run_forward(action, pass);
  if (action.kind != Kind::backward_weight) return run_backward(action, pass);
  run_weights(action, pass);
  return {};
}

void Pipeline::start_receives(const PipelineStep& step, Pass& pass) {
  for (const PipelineTransfer& t : step.receives) {
    const PipelineAction& made_by = t.made_by;
    Message message{model_.make_stage_input(pass.batches[static_cast<size_t>(made_by.micro_batch)]), {}};
    message.work = links_.receive(message.tensor, t.from);
    pass.arriving.emplace(
        std::pair{made_by.kind != Kind::forward, Pass::Place{made_by.stage, made_by.micro_batch}},
        std::move(message));
  }
}

/// What another stage has made for this one.
Tensor Pipeline::received(Kind kind, int stage, int micro_batch, Pass& pass) {
  const auto at = pass.arriving.find({kind != Kind::forward, {stage, micro_batch}});
  SHOAL_CHECK(at != pass.arriving.end(), "pipeline: nothing was received from the ",
              PipelineAction{kind, stage, micro_batch}.text());
  Message message = std::move(at->second);
  pass.arriving.erase(at);
  const ProfileSection section("pipeline", ProfileSection::kWhole);
  message.work.wait();
  return std::move(message.tensor);
}

void Pipeline::send(const PipelineStep& step, const Tensor& message, Pass& pass) {
  while (!pass.leaving.empty() && pass.leaving.front().work.test()) {
    pass.leaving.front().work.wait();
    pass.leaving.pop_front();
  }
  for (const PipelineTransfer& t : step.sends) pass.leaving.push_back({message, links_.send(message, t.to)});
}

/// Returns what goes to the next stage.
Tensor Pipeline::run_forward(const PipelineAction& action, Pass& pass) {
  const auto& [kind, stage, b] = action;
  const ModelBatch& batch = pass.batches[static_cast<size_t>(b)];
  Tensor x_TD = stage > 0 ? received(Kind::forward, stage - 1, b, pass) : Tensor{};
  if (!pass.trains) {
    const StageResult result = model_.forward_stage(stage, x_TD, batch, pass.context);
    if (pass.on_terms) pass.on_terms(result.terms);
    return result.x_TD;
  }
  Pass::Open open;
  if (x_TD.defined()) {
    open.input = std::make_unique<Leaf>();
    open.input->grad_dtype = x_TD.dtype();
    open.input->uses_left = 1 << 20;  // never "ready": it is no parameter
    open.input_shape = x_TD.shape();
    open.device = x_TD.device();
    x_TD.grad_ref.leaf = open.input.get();
  }
  open.tape = std::make_unique<Tape>();
  StageResult result = [&] {
    const ProfileForward phase;
    return model_.forward_stage(stage, x_TD, batch, pass.context);
  }();
  open.tape->park();
  pass.on_terms(result.terms);
  open.loss = result.terms.total;
  if (result.x_TD.defined()) {
    open.result = Tensor::empty(Shape{0}, result.x_TD.dtype(), result.x_TD.device());
    open.result.grad_ref = result.x_TD.grad_ref;
  }
  if (reducer_.reduces_each_backward()) open.uses.take(parameters_);
  pass.open.emplace(Pass::Place{stage, b}, std::move(open));
  return result.x_TD.defined() ? result.x_TD.detach() : Tensor{};
}

void Pipeline::run_weights(const PipelineAction& action, Pass& pass) {
  const auto at = pass.weights.find({action.stage, action.micro_batch});
  SHOAL_CHECK(at != pass.weights.end(), "pipeline: ", action.text(), " without what it needs");
  at->second.uses.give_back();
  at->second.queue.run();
  pass.weights.erase(at);
}

/// Returns the gradient of what came from the stage before.
Tensor Pipeline::run_backward(const PipelineAction& action, Pass& pass) {
  const auto& [kind, stage, b] = action;
  const auto at = pass.open.find({stage, b});
  SHOAL_CHECK(at != pass.open.end(), "pipeline: ", action.text(), " without a forward");
  Pass::Open open = std::move(at->second);
  pass.open.erase(at);
  open.uses.give_back();
  std::vector<Tensor> outputs, gradients;
  if (open.result.defined()) {
    outputs.push_back(open.result);
    gradients.push_back(received(kind, stage + 1, b, pass));
  }
  if (open.loss.defined()) {
    outputs.push_back(open.loss);
    gradients.push_back(Tape::unit_gradient(open.loss));
  }
  if (kind == Kind::backward_input) {
    Pass::Late& late = pass.weights[{stage, b}];
    const WeightQueue::Scope scope(late.queue);
    open.tape->backward(outputs, gradients);
    if (reducer_.reduces_each_backward()) late.uses.take(parameters_);
  } else {
    open.tape->backward(outputs, gradients);
  }
  if (!open.input) return {};
  return open.input->grad_buffer(open.input_shape, open.device);
}

}  // namespace shoal
