#include "launch/layout_plan.h"

#include <algorithm>

#include "core/autograd/exact_sum.h"

namespace shoal {

namespace {

std::unique_ptr<Model> imagined_model(const EngineOptions& options, const Mesh& mesh) {
  ModelContext context;
  context.build = BuildContext{"", Device{}, options.dtype, options.bf16, options.seed, mesh.coords()};
  context.build.shapes_only = true;
  context.mesh = &mesh;
  context.dispatcher = &options.dispatcher;
  context.vocab_size = options.vocab_size;
  context.seq_len = options.seq_len;
  context.rank_invariant = options.rank_invariant;
  return ModelRegistry::make(options.model, context);
}

/// What a rank counts, apart by what it is for.
class StepCounts {
 public:
  explicit StepCounts(const Mesh& mesh) : mesh_(mesh) {}
  /// What was counted since the last call.
  Traffic take() {
    Traffic now = mesh_.world().traffic().ledger();
    Traffic since = now - before_;
    before_ = std::move(now);
    return since;
  }

 private:
  const Mesh& mesh_;
  Traffic before_;
};

/// One micro-batch through the stages of this rank; the messages of all schedules are the same.
void count_pass(const Model& model, const PipelineLinks& links, const Mesh& mesh, const PassSizes& sizes,
                Pass pass, PassHalf half) {
  const auto [me, num_ranks] = mesh.coords()[Axis::pp];
  const int num_stages = mesh.layout().num_stages();
  const int64_t message = num_ranks > 1 ? model.stage_input_bytes(sizes) : 0;
  for (int stage = me; stage < num_stages; stage += num_ranks) {
    model.count_stage(stage, sizes, pass, half);
    const bool forward = half == PassHalf::forward;
    const auto rank_of = [n = num_ranks](int s) { return s % n; };
    if (stage > 0 && forward) links.count_receive(message, rank_of(stage - 1));
    if (stage > 0 && !forward) links.count_send(message, rank_of(stage - 1));
    if (stage + 1 < num_stages && forward) links.count_send(message, rank_of(stage + 1));
    if (stage + 1 < num_stages && !forward) links.count_receive(message, rank_of(stage + 1));
  }
}

/// Divided values are gathered for each use (parallel/weight_gather.h).
void count_gathers(const std::vector<WeightUnit*>& units,
                   const std::vector<std::unique_ptr<FlatBucket>>& buckets) {
  for (WeightUnit* unit : units) {
    std::vector<const FlatBucket*> used;
    for (const auto& bucket : buckets) {
      const bool uses = std::ranges::any_of(bucket->parameters(), [&](const Parameter* p) {
        return std::ranges::find(unit->parameters, p) != unit->parameters.end();
      });
      if (unit->held && uses && bucket->divides_values()) used.push_back(bucket.get());
    }
    if (used.empty()) continue;
    unit->on_begin = [used](WeightUnit::Direction) {
      for (const FlatBucket* bucket : used) bucket->count_gather();
    };
  }
}

/// Of TrainEngine::step, and of what it calls.
void count_sums(const Model& model, const Mesh& mesh, bool exact) {
  constexpr int64_t kNumber = 8;                          // i64 and f64
  if (exact) mesh.world().traffic().all_reduce(kNumber);  // the number of passes
  mesh.tokens().traffic().all_reduce(2 * kNumber);
  mesh.world().traffic().all_reduce(kNumber);
  for (Communicator* group : {&mesh.tokens(), &mesh.comm(Axis::pp)})
    for (int i = 0; i < (exact ? 2 : 1); i++) group->traffic().all_reduce(3 * kNumber);
  mesh.world().traffic().all_reduce((exact ? ExactSquares::kSize : 1) * kNumber);
  model.count_end_step();
}

}  // namespace

Traffic RankPlan::total() const {
  Traffic sum = forward;
  for (const Traffic* part : {&backward, &update, &counts}) sum += *part;
  return sum;
}

RankPlan plan_rank(const EngineOptions& options, const ParallelLayout& layout, int rank,
                   const PassSizes& sizes) {
  const int world = layout.tp * layout.cp * layout.dp * layout.pp;
  const Mesh mesh(make_imagined_communicator(rank, world, "world"), layout);
  const std::unique_ptr<Model> model = imagined_model(options, mesh);
  const PipelineLinks links(mesh.comm(Axis::pp), layout.pipeline.virtual_stages > 1);
  const std::vector<Parameter*> parameters = model->parameters();
  RankPlan plan;
  plan.rank = rank;
  plan.coords = mesh.coords();
  const int64_t m = sizes.num_micro_batches;
  const std::vector<WeightUnit*> units = model->weight_units();
  const auto buckets = FlatBucket::make_all(
      parameters, units, mesh, static_cast<int64_t>(options.bucket_mb * 1024 * 1024), options.zero);
  for (const auto& bucket : buckets) bucket->set_stage(options.zero, options.rank_invariant);
  count_gathers(units, buckets);
  StepCounts counted(mesh);

  if (model->needs_measure(m)) {
    count_pass(*model, links, mesh, sizes, Pass::measure, PassHalf::forward);
    plan.forward = counted.take() * m;
    model->count_end_measure();
    plan.forward += counted.take();
  }
  count_pass(*model, links, mesh, sizes, Pass::train, PassHalf::forward);
  plan.forward += counted.take() * m;
  count_pass(*model, links, mesh, sizes, Pass::train, PassHalf::backward);
  plan.backward = counted.take() * m;

  const auto optimizer = OptimizerRegistry::make(options.optimizer, {});
  const int64_t element = dtype_size(options.dtype);
  for (const Parameter* p : parameters) plan.num_params += p->box.numel();
  for (const auto& bucket : buckets) {
    plan.weight_bytes += bucket->num_held() * element;
    plan.gradient_bytes += bucket->gradient_bytes();
    for (size_t i = 0; i < bucket->parameters().size(); i++) {
      plan.optimizer_bytes += bucket->num_updated(i) * element / dtype_size(DType::f32) *
                              optimizer->state_bytes_per_element(bucket->parameters()[i]->kind);
    }
    const int64_t reductions = options.zero >= ZeroStage::gradients ? m : 1;
    for (int64_t i = 0; i < reductions; i++) bucket->count_reduction();
    bucket->count_end();
  }
  plan.update = counted.take();
  count_sums(*model, mesh, options.rank_invariant);
  plan.counts = counted.take();
  return plan;
}

std::vector<std::vector<StageLayers>> stages_of_ranks(const EngineOptions& options,
                                                      const ParallelLayout& layout) {
  const int world = layout.tp * layout.cp * layout.dp * layout.pp;
  const Mesh mesh(make_imagined_communicator(0, world, "world"), layout);
  const std::unique_ptr<Model> model = imagined_model(options, mesh);
  std::vector<std::vector<StageLayers>> all(static_cast<size_t>(layout.pp));
  for (size_t stage = 0; stage < model->stages().size(); stage++)
    all[stage % all.size()].push_back(model->stages()[stage]);
  return all;
}

}  // namespace shoal
