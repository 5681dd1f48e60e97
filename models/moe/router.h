// Router: decides which experts see a token and with what weight. Routers are registered by name, with their
// options, in one .cpp each.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/registry.h"
#include "core/nn/module.h"
#include "models/model.h"
#include "parallel/token_split.h"

namespace shoal {

struct RouterContext {
  BuildContext build;
  int64_t hidden_size = 0, num_experts = 0, top_k = 0;
  int64_t num_moe_layers = 1;  // auxiliary losses are means over the MoE layers
  double init_std = 0.02;
};

struct RouteInput {
  Tensor x_TD;
  const ModelBatch& batch;  // token ids, padding, sequence length
  const ForwardContext& context;
  Communicator& sequences;  // ranks that hold the other sequences of the step
  Tensor
      step_counts_E;  // i64: assignments of the whole step, from a measuring pass; undefined: there was none
  const TokenSplit& split;  // of the micro-batch's tokens: x_TD has this rank's rows

  int64_t num_tokens() const { return batch.batch * batch.seq; }
  /// All rows of what was made of x_TD. Every rank of the split routes all tokens alike: balance and capacity
  /// see whole sequences so.
  Tensor all_rows(const Tensor& own_rows) const {
    const Tensor rows = split.gather_replicated(own_rows, batch.num_tokens());
    return split.context().gather_replicated(rows, batch.batch, batch.seq);
  }
  /// Ids of all tokens.
  Tensor all_token_ids() const {
    return split.context().gather_replicated(batch.tokens_T, batch.batch, batch.seq);
  }
};

/// Of all tokens of the micro-batch, not of this rank's rows alone.
struct Routing {
  Tensor expert_ids_TK;  // i32, -1 = no expert; K may exceed top_k (expert choice)
  Tensor weights_TK;
  Tensor aux_loss, z_loss;  // scalars, undefined when off
  Tensor counts_E;          // i64: assignments per expert
  Tensor entropy_sum;       // f64 scalar: over valid tokens, nats; undefined: there are no probabilities
};

/// Base of the routers' options.
struct RouterOptions : Options {
  /// Parameters of one router; each is also one multiply-add per token.
  virtual int64_t num_params(int64_t hidden_size, int64_t num_experts) const {
    return hidden_size * num_experts;
  }
  /// What does not fit together, for the config check; "" when all is well.
  virtual std::string problem(int64_t num_experts, int64_t top_k) const {
    return (void)num_experts, (void)top_k, "";
  }
  /// What makes the routing or its losses depend on how sequences lie on micro-batches, as "expected ..., got
  /// ...;
  /// ..."; "": nothing.
  virtual std::string layout_dependence() const { return ""; }
};

/// What a router gathers of other ranks' tokens, for the prediction of traffic.
struct RouterGathers {
  bool logits = true;         // all_rows() of one number per expert
  bool token_ids = false;     // all_token_ids()
  int64_t ids = 0;            // experts that it names for each token
  bool has_gradients = true;  // of the weights of experts
};

class Router : public Module {
 public:
  virtual RouterGathers gathers() const = 0;
  /// Collective over input.sequences when the router says so (global auxiliary loss).
  virtual Routing route(const RouteInput& input) = 0;
  /// The loss needs the assignments of the whole step before its first backward.
  virtual bool needs_step_counts() const { return false; }
  /// After an optimizer step, with the step's counts over all ranks (i64). Same call on every rank.
  virtual void end_step(const Tensor& counts_E) { (void)counts_E; }
  /// Selection bias [E] f32, or undefined.
  virtual Tensor bias() const { return {}; }
};
using RouterRegistry = Registry<Router, const RouterContext&>;

}  // namespace shoal
