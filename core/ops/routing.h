// Router mathematics: scores, top-k, gate weights, capacity drops, auxiliary losses. All in f32 (f64 for f64
// inputs). Selection has a total order: score descending, then expert index ascending; NaN counts as the
// lowest score.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// Limit of top_k, top_groups and group_score_top: a token keeps its choices on the stack.
constexpr int64_t kMaxTopK = 64;

enum class RouterScore : uint8_t { softmax, sigmoid, sqrt_softplus };

struct RouteSpec {
  int64_t top_k = 2;
  RouterScore score = RouterScore::softmax;
  bool normalize = true;        // w / (sum over the selected w + 1e-20)
  double weight_scale = 1;      // applied last
  int64_t num_groups = 1;       // group-limited routing: experts in equal consecutive groups; 1: off
  int64_t top_groups = 1;       // groups that stay eligible
  int64_t group_score_top = 2;  // a group's score is the sum of its best this many biased scores
};

/// What the auxiliary losses of one call need. Every sum runs over valid tokens only.
///   aux    = aux_coeff * E / total_tokens * sum_t sum_i f[g(t)][i] * p_ti,     f[g][i] = assignments of i in
///   g / (k * T_g) z_loss = z_coeff / total_tokens * sum_t logsumexp(logits_t)^2
/// p: softmax over all experts, or score / (sum of scores + 1e-20) for the other kinds. g(t) is the token's
/// balance group: its sequence, the micro-batch, or everything (f from outside). Groups weigh by their
/// tokens, so padding and the split into micro-batches or ranks change nothing.
struct BalanceSpec {
  double aux_coeff = 0, z_coeff = 0;
  int64_t total_tokens = 1;      // valid tokens of the whole step, over all ranks and micro-batches
  int64_t tokens_per_group = 0;  // rows per balance group; 0: all rows are one group
  /// A coefficient of a mean over tokens as a factor of their sum.
  double per_token(double coefficient) const {
    return total_tokens > 0 ? coefficient / static_cast<double>(total_tokens) : 0;
  }
  Tensor frequency_E;  // f given from outside (global scope), in the logits' dtype; undefined: counted here
};

struct Routed {
  Tensor expert_ids_TK;  // i32; -1: no expert (padding)
  Tensor weights_TK;     // gate weights, dtype of the logits; 0 where the id is -1
  Tensor aux_loss;       // scalar; undefined when aux_coeff == 0
  Tensor z_loss;         // scalar; undefined when z_coeff == 0
  Tensor counts_E;       // i64: assignments per expert, before any capacity drop
  Tensor entropy;        // f64 scalar: sum over valid tokens of the entropy of p (natural log); no gradient
};

/// logits_TE; bias_E (f32 or f64) is added for selection only and may be undefined; valid_T: u8, 0 = padding,
/// may be undefined. Gradients reach the logits through the weights, the aux loss and the z-loss.
Routed route(const Tensor& logits_TE, const Tensor& bias_E, const Tensor& valid_T, const RouteSpec& spec,
             const BalanceSpec& balance);

enum class DropPolicy : uint8_t { position, probability };
struct CapacitySpec {
  double factor = 1;  // C = ceil(factor * k * T_group / E), clamped to T_group
  DropPolicy policy = DropPolicy::position;
  int64_t tokens_per_group = 0;  // rows per capacity group (GShard's group: the sequence); 0: all rows
};
/// Capacity C for a group of `tokens` valid tokens.
int64_t expert_capacity(double factor, int64_t top_k, int64_t tokens, int64_t num_experts);
/// Sets ids beyond an expert's capacity to -1 and their weights to 0 (the others are not renormalised);
/// returns how many, an i64 scalar. position: all first choices in token order, then all second choices, ...;
/// probability: largest weight first, ties by token. Gradients through dropped weights vanish because the
/// weight's consumer skips id -1.
Tensor drop_over_capacity(const Tensor& expert_ids_TK, const Tensor& weights_TK, int64_t num_experts,
                          const CapacitySpec& spec);
/// How often each expert is in expert_ids_TK, i64 [E]; -1 is left out.
Tensor count_experts(const Tensor& expert_ids_TK, int64_t num_experts);

struct RouteForward {
  Tensor logits_TE, bias_E, valid_T;    // bias, valid may be undefined
  Tensor ids_TK, weights_TK, counts_E;  // written
  Tensor scores_TE;                     // written: scores (softmax p, sigmoid s, ...)
  Tensor lse_T;                         // written when defined: logsumexp(logits)
  Tensor frequency_GE;                  // written when defined and not given: f per balance group
  Tensor aux_loss, z_loss;              // scalars, written when defined: with their coefficients
  Tensor entropy;                       // f64 scalar, written
};
struct RouteBackward {
  Tensor dweights_TK;  // may be undefined
  Tensor ids_TK, weights_TK, scores_TE, lse_T, frequency_GE, valid_T, logits_TE;
  Tensor daux, dz;    // gradients of the two losses, scalars; undefined: 0
  Tensor dlogits_TE;  // written
};
inline constinit Kernel<void(const RouteForward&, const RouteSpec&, const BalanceSpec&)> route_fwd(
    "route_fwd", [](const RouteForward& r, const RouteSpec&, const BalanceSpec& balance) {
      return Cost{.bytes = bytes_of(r.logits_TE, r.bias_E, r.valid_T, r.ids_TK, r.weights_TK, r.counts_E,
                                    r.scores_TE, r.lse_T, r.frequency_GE, balance.frequency_E)};
    });
inline constinit Kernel<void(const RouteBackward&, const RouteSpec&, const BalanceSpec&)> route_bwd(
    "route_bwd", [](const RouteBackward& r, const RouteSpec&, const BalanceSpec&) {
      return Cost{.bytes = bytes_of(r.dweights_TK, r.ids_TK, r.weights_TK, r.scores_TE, r.lse_T,
                                    r.frequency_GE, r.valid_T, r.logits_TE, r.dlogits_TE)};
    });
/// dropped: i64 scalar, written.
inline constinit Kernel<void(const Tensor& ids, const Tensor& weights, int64_t num_experts,
                             const CapacitySpec&, const Tensor& dropped)>
    drop_over_capacity_fwd("drop_over_capacity_fwd");
inline constinit Kernel<void(const Tensor& ids, const Tensor& counts_E)> count_experts_fwd(
    "count_experts_fwd");
/// frequency_E = counts_E (i64) / assignments, for BalanceSpec::frequency_E.
inline constinit Kernel<void(const Tensor& counts_E, double assignments, const Tensor& frequency_E)>
    count_frequency("count_frequency");
/// Balancing by bias (arXiv:2408.15664): bias_E (f32) += rate * sign(mean of counts_E - counts_E).
inline constinit Kernel<void(const Tensor& bias_E, const Tensor& counts_E, double rate)> balance_bias(
    "balance_bias");

}  // namespace shoal
