#include "launch/engine.h"

#include <algorithm>
#include <cmath>

#include "core/autograd/accumulate.h"
#include "core/autograd/tape.h"
#include "core/base/profiler.h"
#include "core/ops/linear.h"
#include "data/batch_loader.h"
#include "launch/checkpoint_box.h"

namespace shoal {

namespace {

constexpr const char* kSums = "sums and counts";

enum Loss : int64_t { kLm = 0, kAux = 1, kZ = 2, kNumLosses = 3 };

}  // namespace

/// Sums of losses on the device.
class LossSums {
 public:
  LossSums(int64_t count, bool exact, Device device)
      : own_(Tensor::zeros({count}, DType::f64, device)),
        exact_(exact ? ExactSum::zeros(count, device) : ExactSum{}) {}
  /// Undefined: 0.
  void add(int64_t i, const Tensor& term) const {
    if (!term.defined()) return;
    accumulate(own_.device(), own_.flat(i, 1), term);
    if (exact_) exact_add(own_.device(), exact_.part(i, 1), term);
  }
  /// Of this rank.
  const Tensor& own() const { return own_; }
  /// Over all ranks, f64. To be called once. Collective.
  Tensor all(const Mesh& mesh) const {
    const Tensor sums = own_.clone();
    std::vector<Tensor> parts = {sums};
    if (exact_) parts = {exact_.high, exact_.low};
    for (const Tensor& part : parts) {
      mesh.tokens().all_reduce(part, ReduceOp::sum).wait();
      mesh.comm(Axis::pp).all_reduce(part, ReduceOp::sum).wait();  // each stage has some
    }
    if (exact_) exact_value(sums.device(), exact_, sums);
    return sums;
  }

 private:
  Tensor own_;
  ExactSum exact_;
};

TrainEngine::TrainEngine(const EngineOptions& options, const Mesh& mesh)
    : options_(options), stream_(make_stream(options.device)), mesh_(mesh) {
  if (options.rank_invariant && !rows_are_independent(options.device, options.dtype)) {
    throw UsageError(
        "config run.deterministic: rank_invariant needs matrix products whose rows do not depend on each "
        "other, "
        "which OpenBLAS does not give; set the environment variable SHOAL_GEMM=tiled");
  }
  ModelContext context;
  context.build = BuildContext{"", options.device, options.dtype, options.bf16, options.seed, mesh.coords()};
  context.build.fill_later = options.zero == ZeroStage::parameters;
  context.mesh = &mesh;
  context.dispatcher = &options_.dispatcher;
  context.vocab_size = options.vocab_size;
  context.seq_len = options.seq_len;
  context.rank_invariant = options.rank_invariant;
  model_ = ModelRegistry::make(options.model, context);
  parameters_ = model_->parameters();
  const auto bucket_bytes = static_cast<int64_t>(options.bucket_mb * 1024 * 1024);
  const std::vector<WeightUnit*> units = model_->weight_units();
  reducer_ = std::make_unique<GradReducer>(parameters_, mesh, bucket_bytes, options.zero, units,
                                           options.rank_invariant);
  weights_ = std::make_unique<WeightGather>(units, reducer_->buckets());
  pipeline_ = std::make_unique<Pipeline>(*model_, mesh, *reducer_);
  optimizer_ = OptimizerRegistry::make(options.optimizer, parameters_);
}

/// Labels, tokens and stop requests of all ranks.
std::vector<int64_t> TrainEngine::count_totals(std::span<const ModelBatch> micro_batches, bool request_stop) {
  const ProfileSection section(kSums, ProfileSection::kWhole);
  int64_t labels = 0, tokens = 0;
  for (const ModelBatch& batch : micro_batches) {
    labels += batch.count_labels();
    tokens += mesh_.speaks_for_sequences() ? batch.num_valid() : 0;
  }
  const Tensor sums = Tensor::from(std::vector<int64_t>{labels, tokens, request_stop ? 1 : 0}, Shape{3});
  mesh_.tokens().all_reduce(sums.flat(0, 2), ReduceOp::sum).wait();
  mesh_.world().all_reduce(sums.flat(2, 1), ReduceOp::sum).wait();  // ranks that share tokens may disagree
  return sums.to_vector<int64_t>();
}

/// Sums losses and squares over all ranks, and reads them: the only place of a step where the host waits for
/// numbers of the device, but for the counts of dispatches.
void TrainEngine::read_sums(const LossSums& losses, StepResult& result) {
  // Losses of this rank, of all, and the squares of the gradient.
  const Tensor sums = Tensor::zeros({2 * kNumLosses + 1}, DType::f64, options_.device);
  sums.flat(0, kNumLosses).copy_from(losses.own());
  {
    const ProfileSection section(kSums, ProfileSection::kWhole);
    sums.flat(kNumLosses, kNumLosses).copy_from(losses.all(mesh_));
  }
  const Tensor squares = sums.flat(2 * kNumLosses, 1);
  (options_.rank_invariant ? add_exact_grad_squares : add_grad_squares)(parameters_, mesh_, squares);
  const std::vector<double> values = sums.to_vector<double>();
  const double* all = values.data() + kNumLosses;
  result.own_loss_finite = std::all_of(values.data(), all, [](double v) { return std::isfinite(v); });
  result.loss = all[kLm];
  result.aux_loss = all[kAux];
  result.z_loss = all[kZ];
  result.grad_norm = std::sqrt(values.back());
}

/// What the model is run on: with rank_invariant single sequences, as many on every rank.
std::vector<ModelBatch> TrainEngine::as_passes(std::span<const ModelBatch> micro_batches) const {
  if (!options_.rank_invariant) return {micro_batches.begin(), micro_batches.end()};
  std::vector<ModelBatch> passes = single_sequences(micro_batches);
  const int64_t most = mesh_.world().max(std::ssize(passes));
  passes.resize(static_cast<size_t>(std::max<int64_t>(1, most)),
                empty_batch(options_.seq_len, options_.device));
  return passes;
}

StepResult TrainEngine::accumulate_gradients(std::span<const ModelBatch> given, bool request_stop) {
  const std::vector<ModelBatch> passes = as_passes(given);
  const std::span<const ModelBatch> micro_batches = passes;
  // The denominators come first, so that losses and gradients are plain sums from here on.
  const std::vector<int64_t> totals = count_totals(micro_batches, request_stop);
  StepResult result;
  result.labels = totals[0];
  result.tokens = totals[1];
  result.stop_requested = totals[2] > 0;

  ForwardContext context;
  const auto n = static_cast<int64_t>(micro_batches.size());
  context.totals = StepTotals{std::max<int64_t>(1, result.labels), std::max<int64_t>(1, result.tokens), n};
  if (model_->needs_measure(n)) {
    context.pass = Pass::measure;
    const ProfileScope scope("measure");
    pipeline_->forward(micro_batches, context, {});
    model_->end_measure();
    context.pass = Pass::train;
  }

  reducer_->zero();
  const LossSums losses(kNumLosses, options_.rank_invariant, options_.device);
  const auto add_terms = [&](const LossTerms& terms) {
    losses.add(kLm, terms.lm);
    for (const Tensor& aux : terms.aux) losses.add(kAux, aux);
    for (const Tensor& z : terms.z) losses.add(kZ, z);
  };
  pipeline_->train(micro_batches, context, add_terms);
  reducer_->finish();

  read_sums(losses, result);
  return result;
}

StepResult TrainEngine::step(std::span<const ModelBatch> micro_batches, double learning_rate,
                             bool request_stop) {
  StepResult result = accumulate_gradients(micro_batches, request_stop);
  // All of these have the same bits on every rank, so all ranks decide alike.
  const bool finite = std::isfinite(result.loss) && std::isfinite(result.aux_loss) &&
                      std::isfinite(result.z_loss) && std::isfinite(result.grad_norm);
  result.updated = finite && result.labels > 0;
  if (result.updated) {
    const bool clip = options_.clip_norm > 0 && result.grad_norm > options_.clip_norm;
    const ProfileSection section("optimizer", ProfileSection::kWhole);
    weights_->settle();
    optimizer_->step(learning_rate, clip ? options_.clip_norm / result.grad_norm : 1);
    weights_->start_updated();
  }
  result.moe = model_->end_step(result.updated);
  return result;
}

TrainEngine::LossSum TrainEngine::evaluate(std::span<const ModelBatch> batches) {
  const ProfileSection section("evaluation", ProfileSection::kWhole);
  ForwardContext context;
  context.pass = Pass::evaluate;
  const LossSums losses(1, options_.rank_invariant, options_.device);
  pipeline_->forward(as_passes(batches), context, [&](const LossTerms& terms) { losses.add(0, terms.lm); });
  int64_t labels = 0;
  for (const ModelBatch& batch : batches) labels += batch.count_labels();
  return {losses.all(mesh_).item(), mesh_.tokens().sum(labels)};
}

const std::vector<Parameter*>& TrainEngine::parameters() {
  weights_->settle();
  return parameters_;
}

std::vector<StateTensor> TrainEngine::state() {
  weights_->settle();
  std::vector<StateTensor> all;
  for (Parameter* p : parameters_) p->leaf.packed_fresh = false;  // the caller may write
  const auto ends_of = [&](const Parameter& p) {  // which of the stages that hold it this rank is
    return p.on_both_ends ? AxisCoord{mesh_.ends().rank(), mesh_.ends().size()} : AxisCoord{};
  };
  auto add = [&](const std::string& name, const Parameter& p, const Tensor& value) {
    const Communicator& replicas = mesh_.replicas(p.placement);
    const auto [end, ends] = ends_of(p);
    all.push_back({name, value.detach(), p.global_shape, p.box, end * replicas.size() + replicas.rank(),
                   ends * replicas.size()});
  };
  auto add_piece = [&](const std::string& name, const Parameter& p, const Tensor& value) {
    all.push_back({name,
                   value,
                   p.global_shape,
                   {},
                   ends_of(p).index,
                   ends_of(p).size,
                   /*is_flat=*/true,
                   boxes_of_range(p.box, *p.piece)});
  };
  for (const Parameter* p : parameters_) {
    if (p->value_divided)
      add_piece("model/" + p->name, *p, p->own_value());
    else
      add("model/" + p->name, *p, p->value);
  }
  for (const Buffer* b : model_->buffers()) {  // all ranks hold them, those of other stages too
    all.push_back({"buffer/" + b->name, b->value, b->value.shape(), Box::whole(b->value.shape()),
                   mesh_.world().rank(), mesh_.world().size()});
  }
  optimizer_->visit_state([&](const std::string& name, Parameter& p, const Tensor& state) {
    const std::string full_name = "optim/" + name + "/" + p.name;
    if (p.piece)
      add_piece(full_name, p, state);
    else
      add(full_name, p, state);
  });
  return all;
}

ModelBatch to_model_batch(const Batch& batch, bool mask_documents, AxisCoord cp, Device device) {
  ModelBatch out;
  out.batch = batch.B;
  out.seq = batch.S;
  const Shape rows{batch.B * batch.S};
  out.tokens_T = Tensor::from(batch.tokens_BS, rows, device);
  out.labels_T = Tensor::from(batch.labels_BS, rows, device);
  out.num_labels = std::ranges::count_if(batch.labels_BS, [](int32_t label) { return label >= 0; });
  out.positions_T = Tensor::from(batch.positions_BS, rows, device);
  if (mask_documents) out.document_BS = Tensor::from(batch.document_BS, Shape{batch.B, batch.S}, device);
  return cut_sequences(out, cp);
}

}  // namespace shoal
