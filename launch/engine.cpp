#include "launch/engine.h"

#include <algorithm>
#include <cmath>

#include "core/autograd/accumulate.h"
#include "core/autograd/tape.h"
#include "core/base/profiler.h"
#include "data/batch_loader.h"
#include "launch/checkpoint_box.h"

namespace shoal {

namespace {

constexpr const char* kSums = "sums and counts";

/// The sums of a step, f64 on the device, which the host reads once: losses of this rank and of all (each lm,
/// aux, z), and the squares of the gradient.
enum Sum : int64_t { kOwnLosses = 0, kLosses = 3, kSquares = 6, kNumSums = 7 };

/// sum += term, a loss; undefined: 0.
void add_term(const Tensor& sum, const Tensor& term) {
  if (term.defined()) accumulate(sum.device(), sum, term);
}

}  // namespace

TrainEngine::TrainEngine(const EngineOptions& options, const Mesh& mesh)
    : options_(options), stream_(make_stream(options.device)), mesh_(mesh) {
  ModelContext context;
  context.build = BuildContext{"", options.device, options.dtype, options.bf16, options.seed, mesh.coords()};
  context.build.fill_later = options.zero == ZeroStage::parameters;
  context.mesh = &mesh;
  context.dispatcher = &options_.dispatcher;
  context.vocab_size = options.vocab_size;
  context.seq_len = options.seq_len;
  model_ = ModelRegistry::make(options.model, context);
  parameters_ = model_->parameters();
  const auto bucket_bytes = static_cast<int64_t>(options.bucket_mb * 1024 * 1024);
  const std::vector<WeightUnit*> units = model_->weight_units();
  reducer_ = std::make_unique<GradReducer>(parameters_, mesh, bucket_bytes, options.zero, units);
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
void TrainEngine::read_sums(const Tensor& sums, StepResult& result) {
  {
    const ProfileSection section(kSums, ProfileSection::kWhole);
    sums.flat(kLosses, 3).copy_from(sums.flat(kOwnLosses, 3));
    mesh_.tokens().all_reduce(sums.flat(kLosses, 3), ReduceOp::sum).wait();
    mesh_.comm(Axis::pp).all_reduce(sums.flat(kLosses, 3), ReduceOp::sum).wait();  // each stage has some
  }
  add_grad_squares(parameters_, mesh_, sums.flat(kSquares, 1));
  const std::vector<double> values = sums.to_vector<double>();
  result.own_loss_finite = std::all_of(values.begin() + kOwnLosses, values.begin() + kLosses,
                                       [](double v) { return std::isfinite(v); });
  result.loss = values[kLosses];
  result.aux_loss = values[kLosses + 1];
  result.z_loss = values[kLosses + 2];
  result.grad_norm = std::sqrt(values[kSquares]);
}

StepResult TrainEngine::accumulate_gradients(std::span<const ModelBatch> micro_batches, bool request_stop) {
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
  const Tensor sums = Tensor::zeros({kNumSums}, DType::f64, options_.device);
  const auto add_terms = [&](const LossTerms& terms) {
    add_term(sums.flat(kOwnLosses, 1), terms.lm);
    add_term(sums.flat(kOwnLosses + 1, 1), terms.aux);
    add_term(sums.flat(kOwnLosses + 2, 1), terms.z);
  };
  pipeline_->train(micro_batches, context, add_terms);
  reducer_->finish();

  read_sums(sums, result);
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
  const Tensor loss = Tensor::zeros({1}, DType::f64, options_.device);
  pipeline_->forward(batches, context, [&](const LossTerms& terms) { add_term(loss, terms.lm); });
  int64_t labels = 0;
  for (const ModelBatch& batch : batches) labels += batch.count_labels();
  return {mesh_.comm(Axis::pp).sum(mesh_.tokens().sum(loss.item())), mesh_.tokens().sum(labels)};
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
