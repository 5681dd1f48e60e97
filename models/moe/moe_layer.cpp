#include "models/moe/moe_layer.h"

#include <algorithm>

#include "core/autograd/accumulate.h"
#include "core/autograd/saved.h"
#include "core/autograd/tape.h"
#include "core/base/profiler.h"
#include "core/ops/elementwise.h"
#include "core/ops/embedding.h"
#include "core/ops/linear.h"

namespace shoal {

void MoeOptions::fields(FieldVisitor& v) {
  v("num_experts", num_experts, "routed experts per MoE layer; 0: no MoE layers", in_range(0, 1 << 20));
  v("top_k", top_k, "routed experts per token", in_range(1, 1 << 20));
  v("hidden", hidden,
    "FFN width of one routed expert; auto: the dense FFN's width divided by top_k, rounded up to 8",
    in_range(1, 1 << 24));
  v("shared_experts", shared_experts, "experts that every token passes", in_range(0, 1 << 10));
  v("shared_hidden", shared_hidden, "FFN width of one shared expert; auto: the routed experts' width",
    in_range(1, 1 << 24));
  v("shared_gate", shared_gate, "scale the shared experts' output by sigmoid(w . x) per token");
  v("first_dense", first_dense, "this many first layers have a dense FFN", in_range(0, 1 << 16));
  v("every", every, "after those, every n-th layer is an MoE layer, starting with the n-th",
    in_range(1, 1 << 16));
  v("layers", layers, "explicit list of MoE layers (0-based); overrides first_dense and every",
    in_range(0, 1 << 16));
  v("capacity_factor", capacity_factor,
    "limit of tokens per expert, C = ceil(factor * k * tokens / experts); 0: dropless. Training only",
    in_range(0, 1e6));
  v("drop_policy", drop_policy,
    "which tokens lose: later positions (after all first choices), or smaller gate weights",
    one_of({"position", "probability"}));
  v("capacity_scope", capacity_scope,
    "tokens that share a capacity; micro_batch depends on the parallel layout and is there for comparison "
    "with others",
    one_of({"sequence", "micro_batch"}));
  v("pad_to_capacity", pad_to_capacity,
    "every expert gets as many rows as it has room for, zeros where tokens are missing: more is sent and "
    "computed, but a GPU is never waited for. Needs capacity_factor; training only");
  v("expert_precision", expert_precision,
    "of the routed experts' matrix products: same: run.precision; fp8: e4m3 operands, e5m2 gradients of "
    "results, a scale per expert; fp8_block: e4m3, a scale per 128 values and per 128 x 128 weights "
    "(docs/moe.md)",
    one_of({"same", "fp8", "fp8_block"}));
  v.choice("router", router, RouterRegistry::instance(), "how experts are chosen");
}

bool MoeOptions::is_moe_layer(int64_t layer) const {
  if (num_experts == 0) return false;
  if (!layers.empty()) return std::ranges::find(layers, layer) != layers.end();
  return layer >= first_dense && (layer - first_dense + 1) % every == 0;
}

int64_t MoeOptions::router_params(int64_t hidden_size) const {
  const auto options = router.options ? router.options : RouterRegistry::instance().make_options(router.kind);
  const auto* router_options = dynamic_cast<const RouterOptions*>(options.get());
  return router_options != nullptr ? router_options->num_params(hidden_size, num_experts) : 0;
}

std::optional<Fp8Scaling> MoeOptions::fp8() const {
  if (expert_precision == "same") return std::nullopt;
  return expert_precision == "fp8" ? Fp8Scaling::tensor : Fp8Scaling::block;
}

Experts::Experts(const MoeShape& shape, int64_t num_experts, const Choice& activation, Communicator& etp,
                 const BuildContext& context)
    : shape_(shape), split_(etp), activation_(FfnActivationRegistry::make(activation)) {
  const int64_t E = num_experts, D = shape.hidden_size, F = shape.expert_hidden;
  const bool gated = activation_->gated();
  const Placement up = Placement::expert(gated ? 2 : 1), down = Placement::expert(2);
  w1_ = &add_parameter(context, "w1", gated ? Shape{E, 2, F, D} : Shape{E, F, D},
                       Init::normal(shape.init_std), ParamKind::matrix, up);
  w1_->stacked_dims = gated ? 2 : 1;
  if (shape.bias) {
    b1_ = &add_parameter(context, "b1", gated ? Shape{E, 2, F} : Shape{E, F}, Init::zeros(), ParamKind::bias,
                         up);
  }
  w2_ = &add_parameter(context, "w2", Shape{E, D, F}, Init::normal(shape.output_init_std), ParamKind::matrix,
                       down);
  w2_->stacked_dims = 1;
  if (shape.bias)
    b2_ = &add_parameter(context, "b2", Shape{E, D}, Init::zeros(), ParamKind::bias, Placement::expert());
  unit_.parameters = parameters();
}

Tensor Experts::project(const Tensor& x, const Tensor& weight, const Rows& rows, const Tensor& bias,
                        const std::shared_ptr<Fp8Weight>& fp8) const {
  return shape_.fp8 ? fp8_grouped_linear(x, weight, rows.per_expert, bias, *shape_.fp8, fp8)
                    : grouped_linear(x, weight, rows.per_expert, bias, rows.per_source);
}

Tensor Experts::add_expert_bias(const Tensor& y_RD, const std::vector<int64_t>& rows_per_expert) const {
  std::vector<int32_t> expert_R;
  for (size_t e = 0; e < rows_per_expert.size(); e++)
    expert_R.insert(expert_R.end(), static_cast<size_t>(rows_per_expert[e]), static_cast<int32_t>(e));
  const Tensor ids_R = Tensor::from(expert_R, {std::ssize(expert_R)}, y_RD.device());
  return add(y_RD, cast(embedding(b2_->value, ids_R), y_RD.dtype()));
}

Tensor Experts::forward(const Dispatched& rows) const {
  const Tensor b2 = b2_ ? b2_->value : Tensor{};
  if (!split_.is_split()) return forward_part(rows.x_RD, {rows.rows_per_expert, rows.rows_per_source}, b2);
  const ExpertSplit::Gathered all = split_.gather(rows.x_RD, rows.rows_per_expert);
  const Tensor y_RD = split_.scatter(forward_part(all.x_RD, {all.rows_per_expert, {}}, {}), all);
  // Added to the sum, on own rows: all ranks use it at the same place of their tapes.
  return b2_ ? add_expert_bias(y_RD, rows.rows_per_expert) : y_RD;
}

Tensor Experts::forward_part(const Tensor& x_RD, const Rows& rows, const Tensor& b2) const {
  const int64_t e = w1_->value.size(0), D = shape_.hidden_size, up = w1_->value.numel() / (e * D);
  const Tensor b1 = b1_ ? b1_->value.view({e, up}) : Tensor{};
  const auto project_up = [this, w1 = w1_->value.view({e, up, D}), b1, rows](const Tensor& x) {
    const ProfileSection section("experts up");
    return project(x, w1, rows, b1, fp8_w1_);
  };
  const auto activate = [this](const Tensor& h) {
    const ProfileSection section("experts activation");
    return activation_->forward(h);
  };
  const Tensor a = apply_again(shape_.recompute.activations,
                               apply_again(shape_.recompute.up_projections, x_RD, project_up), activate);
  const ProfileSection section("experts down");
  return project(a, w2_->value, rows, b2, fp8_w2_);
}

MoeLayer::MoeLayer(const MoeOptions& options, const MoeShape& shape, const Choice& activation,
                   const TokenSplit& split, const ModelContext& context, const BuildContext& build)
    : options_(options), shape_(shape), mesh_(*context.mesh), split_(split) {
  const RouterContext router{build.child("router"), shape.hidden_size,    options.num_experts,
                             options.top_k,         shape.num_moe_layers, shape.init_std};
  router_ = RouterRegistry::make(options.router, router);
  add_module(*router_);
  dispatcher_ = DispatcherRegistry::make(
      *context.dispatcher, DispatcherContext{&context.mesh->comm(Axis::ep), options.num_experts});
  if (context.rank_invariant && !dispatcher_->sums_in_order_of_choices()) {
    throw UsageError(str("config parallel.dispatcher: ", context.dispatcher->kind,
                         " sums the results of a token node by node, so that bits depend on the nodes, which "
                         "run.deterministic: rank_invariant excludes; use all_to_all"));
  }
  experts_ = std::make_unique<Experts>(shape, options.num_experts, activation, context.mesh->comm(Axis::etp),
                                       build.child("experts"));
  add_module(*experts_);
  if (shape.shared_hidden > 0) {
    const FfnShape ffn{shape.hidden_size, shape.shared_hidden,   shape.bias,
                       shape.init_std,    shape.output_init_std, shape.recompute};
    shared_ = std::make_unique<Ffn>(ffn, activation, split, build.child("shared"));
    add_module(*shared_);
    if (options.shared_gate) {
      shared_gate_ = &add_parameter(build, "shared_gate.weight", Shape{1, shape.hidden_size},
                                    Init::normal(shape.init_std));
    }
  }
}

Routing MoeLayer::route(const Tensor& x_TD, const ModelBatch& batch, const ForwardContext& context) {
  const ProfileSection section("router");
  // Routers never see bf16: a rounded score could change the choice.
  const Tensor& router_x = x_TD.dtype() == DType::bf16 ? cast(x_TD, DType::f32) : x_TD;
  Routing routing = router_->route({router_x, batch, context, mesh_.sequences(), step_counts_E_, split_});
  Tensor dropped;
  // A measuring pass must see what the training pass will see.
  if (options_.capacity_factor > 0 && context.pass != Pass::evaluate) {
    // Copies: the router's backward still needs what it chose.
    const GradRef gradient = routing.weights_TK.grad_ref;
    routing.expert_ids_TK = routing.expert_ids_TK.clone();
    routing.weights_TK = routing.weights_TK.clone();
    routing.weights_TK.grad_ref = gradient;
    CapacitySpec spec;
    spec.factor = options_.capacity_factor;
    spec.policy = options_.drop_policy == "position" ? DropPolicy::position : DropPolicy::probability;
    spec.tokens_per_group = options_.capacity_scope == "sequence" ? batch.seq : 0;
    dropped = drop_over_capacity(routing.expert_ids_TK, routing.weights_TK, options_.num_experts, spec);
  }
  // Once per token: not in evaluation, and not when recompute runs this a second time.
  const bool counting = (context.pass == Pass::train && !Tape::replaying()) || context.pass == Pass::measure;
  if (!counting) return routing;
  if (context.pass == Pass::train) {
    count(routing, dropped, batch);
  } else if (step_counts_E_.defined()) {
    accumulate(routing.counts_E.device(), step_counts_E_, routing.counts_E);
  } else {
    step_counts_E_ = routing.counts_E;
  }
  return routing;
}

void MoeLayer::count(const Routing& routing, const Tensor& dropped, const ModelBatch& batch) {
  const Device device = routing.counts_E.device();
  const int64_t E = options_.num_experts;
  accumulate(device, statistics_.counters_E1.flat(0, E), routing.counts_E);
  if (dropped.defined()) accumulate(device, statistics_.counters_E1.flat(E, 1), dropped);
  if (routing.entropy_sum.defined() && statistics_.exact_entropy) {
    exact_add(device, statistics_.exact_entropy, routing.entropy_sum);
  } else if (routing.entropy_sum.defined()) {
    accumulate(device, statistics_.entropy, routing.entropy_sum);
  }
  statistics_.tokens += batch.num_valid();
}

Tensor MoeLayer::shared_forward(const Tensor& x_TD, int64_t num_tokens) const {
  const ProfileSection section("shared expert", ProfileSection::kWhole);
  Tensor y_TD = shared_->forward(x_TD, num_tokens);
  if (shared_gate_ != nullptr)
    y_TD = scale_rows(y_TD, sigmoid(linear_f32(x_TD, shared_gate_->value)).view({x_TD.num_rows()}));
  return y_TD;
}

int64_t MoeLayer::rows_each(const AxisCoords& rank, int64_t batch, int64_t seq, int64_t choices,
                            Pass pass) const {
  if (!options_.pad_to_capacity || pass == Pass::evaluate) return Dispatcher::kAsNeeded;
  const bool by_sequence = options_.capacity_scope == "sequence";
  const int64_t held = context_runs(seq, rank[Axis::cp]).rows(), num_tokens = batch * held;
  const ShardRange own = shard_range(num_tokens, rank[Axis::tp]);
  if (own.begin == own.end) return 0;
  const int64_t capacity = expert_capacity(options_.capacity_factor, choices, by_sequence ? seq : batch * seq,
                                           options_.num_experts);
  // Of how many groups this rank has rows; each is shared by context parallel ranks.
  const int64_t group = by_sequence ? held : num_tokens;
  const int64_t num_groups = (own.end - 1) / group - own.begin / group + 1;
  return std::min(own.end - own.begin, num_groups * capacity);
}

MoeLayer::Results MoeLayer::compute(const Tensor& x_TD, const Routing& routing, const ModelBatch& batch,
                                    int64_t rows_each) {
  const auto own_rows = [&](const Tensor& all) {
    return split_.own_rows(split_.context().own_rows(all, batch.batch, batch.seq));
  };
  const Tensor ids_TK = own_rows(routing.expert_ids_TK), weights_TK = own_rows(routing.weights_TK);
  const auto shared = [&] { return shared_ ? shared_forward(x_TD, batch.num_tokens()) : Tensor{}; };
  if (const auto parts = dispatcher_->dispatch_parts(x_TD, ids_TK, rows_each)) {
    Tensor shared_TD = shared();
    experts_unit().begin();
    for (int64_t i = 0; i < parts->num_parts(); i++) {
      const Dispatched received = parts->arrive(i);
      parts->send_back(i, experts_->forward(received));
    }
    experts_unit().end();
    return {parts->combine(weights_TK), shared_TD};
  }
  Pending<Dispatched> sent = dispatcher_->dispatch(x_TD, ids_TK, rows_each);
  Tensor shared_TD = shared();  // while the rows travel
  const Dispatched received = std::move(sent).wait();
  const Tensor y_RD = experts_unit().during([&] { return experts_->forward(received); });
  return {dispatcher_->combine(y_RD, weights_TK, received.plan).wait(), shared_TD};
}

MoeLayer::Output MoeLayer::forward(const Tensor& x_TD, const ModelBatch& batch,
                                   const ForwardContext& context) {
  const ProfileScope scope("moe", -1, "dispatch, combine");
  const Routing routing = route(x_TD, batch, context);
  const auto [routed_TD, shared_TD] =
      compute(x_TD, routing, batch,
              rows_each(mesh_.coords(), batch.batch, batch.seq, routing.expert_ids_TK.size(1), context.pass));
  const Tensor y_TD = shared_TD.defined() ? add(routed_TD, shared_TD) : routed_TD;
  return {y_TD, routing.aux_loss, routing.z_loss};
}

}  // namespace shoal
