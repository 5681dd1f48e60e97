// One training run of a tiny model under a given layout, reduced to what must not depend on the layout.
// Shared by the thread and the MPI parity tests.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "core/base/random.h"
#include "core/nn/module.h"
#include "launch/checkpoint_box.h"
#include "launch/engine.h"
#include "parallel/moe/dispatcher.h"
#include "tests/support/expect_close.h"
#include "tests/support/gather.h"

namespace shoal::testing {

inline constexpr int64_t kParitySeq = 6, kParityBatch = 8, kParityVocab = 31, kParityExperts = 8,
                         kParitySteps = 5;

struct ParityCase {
  int ep = 1, tp = 1, etp = 1, cp = 1;
  int64_t accumulation = 1;
  std::string dispatcher = "all_to_all";
  std::string balance = "none";  // none | sequence | global | micro_batch | z_loss | bias
  std::string capacity = "off";  // off | position | probability
  std::string recompute = "none";
  DType dtype = DType::f64;  // bf16: mixed precision on f32 parameters
  bool empty_ranks = false;  // rank 0 holds the whole batch
  std::string model = "";    // extra model settings, YAML flow map entries
  Device device = {};        // of every tensor of the engine
  int64_t chunks = 1;        // of the all_to_all dispatcher
  bool pad = false;          // to the capacity
  int pp = 1, virtual_stages = 1;
  std::string schedule = "1f1b";
  std::vector<int64_t> stage_layers = {};  // empty: balanced
  int ranks_per_node = 0;

  ContextKind context = ContextKind::all_gather;
  int64_t seq = kParitySeq;
  bool documents = false;
  int64_t num_experts = kParityExperts, top_k = 2, expert_hidden = 8;
  int zero = 0;  // parallel.zero
  bool rank_invariant = false;
  double clip_norm = 0.5;
  Choice optimizer = {};  // default: parity_optimizer()

  std::string name(int world) const {
    return str("world ", world, ", ep ", ep, tp > 1 ? str(", tp ", tp) : "",
               etp > 1 ? str(", etp ", etp) : "",
               cp > 1 ? str(", cp ", cp, context == ContextKind::ring ? " ring" : "") : "",
               seq == kParitySeq ? "" : str(", seq ", seq), documents ? ", documents" : "", ", accumulation ",
               accumulation, ", ", dispatcher, ", balance ", balance, ", capacity ", capacity,
               empty_ranks ? ", empty ranks" : "", recompute == "none" ? "" : ", recompute", ", ", dtype,
               ", chunks ", chunks, pad ? ", padded" : "",
               pp > 1 ? str(", pp ", pp, " x ", virtual_stages, " ", schedule) : "",
               zero > 0 ? str(", zero ", zero) : "", clip_norm == 0.5 ? "" : str(", clip_norm ", clip_norm),
               rank_invariant ? ", rank invariant" : "");
  }
};

inline Choice parity_model(const ParityCase& c) {
  std::string router = "kind: top_k, score: softmax";
  if (c.balance == "sequence" || c.balance == "global" || c.balance == "micro_batch") {
    router += ", aux_coeff: 0.5, aux_scope: " + c.balance;
  }
  if (c.balance == "z_loss") router += ", z_coeff: 0.1";
  if (c.balance == "bias") router = "kind: top_k, score: sigmoid, scale: 1.5, bias_rate: 0.01";
  std::string moe = str("num_experts: ", c.num_experts, ", top_k: ", c.top_k, ", hidden: ", c.expert_hidden,
                        ", shared_experts: 1, first_dense: 1, router: {", router, "}");
  if (c.capacity != "off") moe += ", capacity_factor: 0.8, drop_policy: " + c.capacity;
  if (c.pad) moe += ", pad_to_capacity: true";
  const std::string yaml = str(
      "kind: transformer, layers: 3, hidden_size: 16, heads: 2, kv_heads: 1, init: {std: 0.3}, recompute: ",
      c.recompute, ", moe: {", moe, "}");
  ConfigErrors errors;
  ConfigNode tree = load_yaml_text("model: {" + yaml + "}", "parity", errors);
  // Settings of the case replace those above, key by key.
  ConfigNode& settings = *tree.find("model");
  for (const auto& entry : load_yaml_text("{" + c.model + "}", "parity case", errors).entries) {
    if (ConfigNode* present = settings.find(entry.key))
      *present = entry.value;
    else
      settings.entries.push_back(entry);
  }
  Choice model{"transformer", ModelRegistry::instance().make_options("transformer")};
  parse_fields(
      tree, "", [&](FieldVisitor& v) { v.choice("model", model, ModelRegistry::instance(), ""); }, errors);
  errors.throw_if_any();
  return model;
}

/// One kind with options as a YAML flow map.
template <class Registry>
Choice parity_choice(const std::string& kind, const std::string& options) {
  Choice choice{kind, Registry::instance().make_options(kind)};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text(options, "parity", errors), "", [&](FieldVisitor& v) { choice.options->fields(v); },
      errors);
  errors.throw_if_any();
  return choice;
}

inline Choice parity_optimizer() {
  return parity_choice<OptimizerRegistry>("adamw", "{eps: 1e-3}");
}

inline Choice parity_dispatcher(const ParityCase& c) {
  if (c.chunks == 1) return Choice{c.dispatcher, nullptr};
  return parity_choice<DispatcherRegistry>(c.dispatcher, str("{chunks: ", c.chunks, "}"));
}

/// Sequences [begin, end) of step `step` of a fixed data stream: uneven padding and ignored labels; sequence
/// 5 of every step is padding only, and four tokens are so frequent that some experts stay empty. No two
/// tokens of a sequence have the same prefix, so no gate weights are equal up to rounding.
inline ModelBatch parity_batch(int64_t step, int64_t begin, int64_t end, Device device = {},
                               int64_t S = kParitySeq) {
  const RandomStream random(77, "parity data");
  const int64_t B = end - begin;
  std::vector<int32_t> tokens, labels, positions;
  std::vector<uint8_t> valid;
  for (int64_t b = begin; b < end; b++) {
    const int64_t length = b == 5 ? 0 : std::max<int64_t>(S - b % 3, 0);
    for (int64_t s = 0; s < S; s++) {
      const auto index = static_cast<uint64_t>((step * kParityBatch + b) * S + s);
      const bool rare = random.below(2 * index, 3) == 0;
      tokens.push_back(rare ? static_cast<int32_t>(random.below(2 * index + 1, kParityVocab))
                            : static_cast<int32_t>((b + s) % 4));
      labels.push_back(s < length && (b + s) % 5 != 0
                           ? static_cast<int32_t>(random.below(index + 100000, kParityVocab))
                           : -1);
      positions.push_back(static_cast<int32_t>(s));
      valid.push_back(s < length ? 1 : 0);
    }
  }
  ModelBatch batch;
  batch.batch = B;
  batch.seq = S;
  batch.tokens_T = Tensor::from(tokens, Shape{B * S}, device);
  batch.labels_T = Tensor::from(labels, Shape{B * S}, device);
  batch.positions_T = Tensor::from(positions, Shape{B * S}, device);
  batch.valid_BS = Tensor::from(valid, Shape{B * S}, device);
  return batch;
}

/// The same of a case, with its length and documents: sequence b has one of every (b % 3 + 1) tokens.
inline ModelBatch parity_case_batch(const ParityCase& c, int64_t step, int64_t begin, int64_t end) {
  ModelBatch batch = parity_batch(step, begin, end, c.device, c.seq);
  if (!c.documents) return batch;
  std::vector<int32_t> ids;
  for (int64_t b = begin; b < end; b++)
    for (int64_t s = 0; s < c.seq; s++) ids.push_back(static_cast<int32_t>((s + b) / (b % 3 + 1)));
  batch.document_BS = Tensor::from(ids, Shape{end - begin, c.seq}, c.device);
  return batch;
}

/// What must agree; tensors are global, by name.
struct ParityResult {
  std::vector<double> losses, aux_losses, z_losses, grad_norms, entropies;
  std::vector<std::vector<int64_t>> counts;  // of every step and MoE layer
  std::vector<int64_t> dropped;
  std::map<std::string, std::vector<double>> gradients,
      state;  // gradients of the first step; weights, bias, moments at the end
};

/// A tensor like the parameter, of which each rank holds its part.
inline std::vector<double> gather_like(const Tensor& local, const Parameter& p, Communicator& world) {
  return gather_global(local, p.box, p.global_shape, world);
}
/// A tensor of the elements that each rank updates.
inline std::vector<double> gather_own(const Tensor& local, const Parameter& p, Communicator& world) {
  const ShardRange own = p.piece.value_or(ShardRange{0, p.value.numel()});
  return gather_global(HeldPart(local, boxes_of_range(p.box, own)), p.global_shape, world);
}

inline EngineOptions parity_engine(const ParityCase& c) {
  EngineOptions options;
  options.model = parity_model(c);
  // A large eps: where a gradient is zero up to rounding (key biases), Adam would blow the rounding up.
  options.optimizer = c.optimizer.kind.empty() ? parity_optimizer() : c.optimizer;
  options.dispatcher = parity_dispatcher(c);
  options.vocab_size = kParityVocab;
  options.seq_len = c.seq;
  options.seed = 3;
  options.clip_norm = c.clip_norm;
  options.zero = static_cast<ZeroStage>(c.zero);
  options.rank_invariant = c.rank_invariant;
  options.bucket_mb = 0.002;  // several buckets even for a tiny model
  options.bf16 = c.dtype == DType::bf16;
  options.dtype = options.bf16 ? DType::f32 : c.dtype;
  options.device = c.device;
  return options;
}

inline ParallelLayout parity_layout(const ParityCase& c, int world) {
  ParallelLayout layout;
  layout.tp = c.tp;
  layout.cp = c.cp;
  layout.context = c.context;
  layout.pp = c.pp;
  layout.dp = world / (c.tp * c.cp * c.pp);
  layout.ep = c.ep;
  layout.etp = c.etp;
  layout.ranks_per_node = c.ranks_per_node;
  layout.edp = world / (c.ep * c.etp * c.pp);
  layout.pipeline = {pipeline_kind(c.schedule), c.virtual_stages, c.stage_layers};
  return layout;
}

/// Collective over `world`; every rank gets the same result.
inline ParityResult run_parity(const ParityCase& c, const std::shared_ptr<Communicator>& world) {
  const Mesh mesh(world, parity_layout(c, world->size()));
  TrainEngine engine(parity_engine(c), mesh);

  ParityResult result;
  const AxisCoord dp = mesh.coords()[Axis::dp];
  const ShardRange mine =
      c.empty_ranks ? ShardRange{0, dp.index == 0 ? kParityBatch : 0} : shard_range(kParityBatch, dp);
  for (int64_t step = 0; step < kParitySteps; step++) {
    std::vector<ModelBatch> batches;
    for (int64_t a = 0; a < c.accumulation; a++) {
      const ShardRange part =
          shard_range(mine.end - mine.begin, {static_cast<int>(a), static_cast<int>(c.accumulation)});
      batches.push_back(
          cut_sequences(parity_case_batch(c, step, mine.begin + part.begin, mine.begin + part.end),
                        mesh.coords()[Axis::cp]));
    }
    const StepResult r = engine.step(batches, 1e-3);
    SHOAL_CHECK(r.updated, "parity run: step ", step, " made no update");
    result.losses.push_back(r.loss);
    result.aux_losses.push_back(r.aux_loss);
    result.z_losses.push_back(r.z_loss);
    result.grad_norms.push_back(r.grad_norm);
    for (const MoeStepStats& stats : r.moe) {
      result.counts.push_back(stats.counts_E);
      result.dropped.push_back(stats.dropped);
      result.entropies.push_back(stats.entropy);
    }
    if (step > 0) continue;
    for (const Parameter* p : engine.parameters())
      result.gradients[p->name] = gather_own(p->own_grad(), *p, *world);
  }
  for (const Parameter* p : engine.parameters())
    result.state["weight/" + p->name] =
        p->value_divided ? gather_own(p->own_value(), *p, *world) : gather_like(p->value, *p, *world);
  for (const Buffer* b : engine.model().buffers()) result.state["buffer/" + b->name] = to_doubles(b->value);
  engine.optimizer().visit_state([&](const std::string& name, Parameter& p, const Tensor& state) {
    result.state[name + "/" + p.name] = gather_own(state, p, *world);
  });
  return result;
}

/// Relative to the largest element of each tensor, so that elements that are zero up to rounding do not
/// decide.
inline ::testing::AssertionResult same_result(const ParityResult& got, const ParityResult& want,
                                              double tolerance) {
  auto compare = [&](const std::string& what, const std::vector<double>& a,
                     const std::vector<double>& b) -> ::testing::AssertionResult {
    double largest = 0;
    for (const double v : b) largest = std::max(largest, std::abs(v));
    auto r = close(a, b, {tolerance, tolerance * std::max(largest, 1e-12)});
    return r ? r : ::testing::AssertionFailure() << what << ": " << r.message();
  };
  if (got.counts != want.counts) return ::testing::AssertionFailure() << "expert counts differ";
  if (got.dropped != want.dropped) return ::testing::AssertionFailure() << "dropped assignments differ";
  for (const auto& [what, a, b] :
       {std::tuple{"loss", got.losses, want.losses}, std::tuple{"aux loss", got.aux_losses, want.aux_losses},
        std::tuple{"z loss", got.z_losses, want.z_losses},
        std::tuple{"grad norm", got.grad_norms, want.grad_norms}}) {
    if (auto r = compare(what, a, b); !r) return r;
  }
  for (const auto* tensors : {&want.gradients, &want.state}) {
    const auto& mine = tensors == &want.gradients ? got.gradients : got.state;
    if (mine.size() != tensors->size())
      return ::testing::AssertionFailure()
             << "different tensors: " << mine.size() << ", want " << tensors->size();
    for (const auto& [name, values] : *tensors) {
      if (auto r = compare((tensors == &want.gradients ? "gradient of " : "") + name, mine.at(name), values);
          !r)
        return r;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace shoal::testing
