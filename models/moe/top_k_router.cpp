// The token-choice router: softmax, sigmoid or sqrt-softplus scores, top-k selection, optional group limit,
// auxiliary loss, z-loss and bias-based balancing (docs/moe.md has the formulas and their sources).
#include <algorithm>

#include "core/autograd/tape.h"
#include "core/ops/linear.h"
#include "core/ops/routing.h"
#include "models/moe/router.h"

namespace shoal {

namespace {

struct TopKOptions final : RouterOptions {
  std::string score = "softmax";
  bool normalize = true;
  double scale = 1;
  int64_t num_groups = 1, top_groups = 1, group_score_top = 2;
  double aux_coeff = 0, z_coeff = 0, bias_rate = 0;
  std::string aux_scope = "sequence";
  void fields(FieldVisitor& v) override {
    v("score", score, "what the logits become, over all experts, in f32",
      one_of({"softmax", "sigmoid", "sqrt_softplus"}));
    v("normalize", normalize, "divide the selected weights by their sum + 1e-20");
    v("scale", scale, "factor on the weights, after normalising", in_range(1e-6, 1e6));
    v("num_groups", num_groups, "experts in this many equal groups for group-limited routing; 1: off",
      in_range(1, 1 << 20));
    v("top_groups", top_groups, "groups a token may use", in_range(1, kMaxTopK));
    v("group_score_top", group_score_top,
      "a group's score: the sum of its best this many biased scores (1: its maximum)", in_range(1, kMaxTopK));
    v("aux_coeff", aux_coeff, "load-balancing loss (1.0 = perfect balance before the coefficient); 0: off",
      in_range(0, 1e6));
    v("aux_scope", aux_scope,
      "tokens that are balanced: each sequence, each micro-batch, or the whole global batch",
      one_of({"sequence", "micro_batch", "global"}));
    v("z_coeff", z_coeff, "coefficient of mean logsumexp(logits)^2; 0: off", in_range(0, 1e6));
    v("bias_rate", bias_rate, "step of the selection bias towards balance (arXiv:2408.15664); 0: no bias",
      in_range(0, 1));
  }
  std::string layout_dependence() const override {
    return aux_coeff > 0 && aux_scope == "micro_batch"
               ? "expected aux_scope sequence or global, got micro_batch; set aux_scope: sequence"
               : "";
  }
  std::string problem(int64_t num_experts, int64_t top_k) const override {
    if (top_k > kMaxTopK)
      return str("router top_k: expected top_k of at most ", kMaxTopK, ", got ", top_k,
                 "; lower model.moe.top_k");
    const bool divides = num_experts % num_groups == 0;
    const int64_t per_group = divides ? num_experts / num_groups : 0;
    if (divides && top_groups <= num_groups && top_groups * per_group >= top_k &&
        group_score_top <= std::max<int64_t>(per_group, 2))
      return "";
    return str("router top_k: expected num_groups to divide num_experts (", num_experts,
               "), top_groups <= num_groups, top_groups * group size >= top_k (", top_k,
               ") and group_score_top <= group size, got num_groups ", num_groups, ", top_groups ",
               top_groups, ", group_score_top ", group_score_top);
  }
};

class TopKRouter final : public Router {
 public:
  TopKRouter(const TopKOptions& options, const RouterContext& context)
      : options_(options), context_(context) {
    const int64_t E = context.num_experts;
    const std::string problem = options.problem(E, context.top_k);
    if (!problem.empty()) throw UsageError(problem);
    spec_.top_k = context.top_k;
    spec_.score = options.score == "softmax"   ? RouterScore::softmax
                  : options.score == "sigmoid" ? RouterScore::sigmoid
                                               : RouterScore::sqrt_softplus;
    spec_.normalize = options.normalize;
    spec_.weight_scale = options.scale;
    spec_.num_groups = options.num_groups;
    spec_.top_groups = options.top_groups;
    spec_.group_score_top = options.group_score_top;
    weight_ = &add_parameter(context.build, "weight", Shape{E, context.hidden_size},
                             Init::normal(context.init_std), ParamKind::router);
    if (options.bias_rate > 0)
      bias_ = &add_buffer(context.build, "bias", Tensor::zeros({E}, DType::f32, context.build.device));
  }

  RouterGathers gathers() const override { return {.ids = context_.top_k}; }
  bool needs_step_counts() const override { return options_.aux_coeff > 0 && options_.aux_scope == "global"; }
  Tensor bias() const override { return bias_ ? bias_->value : Tensor{}; }

  Routing route(const RouteInput& input) override {
    const Tensor logits_TE = input.all_rows(linear(input.x_TD, weight_->value));
    BalanceSpec balance;
    const bool training = input.context.pass == Pass::train;
    const auto layers = static_cast<double>(context_.num_moe_layers);
    balance.aux_coeff = training ? options_.aux_coeff / layers : 0;
    balance.z_coeff = training ? options_.z_coeff / layers : 0;
    balance.total_tokens = input.context.totals.tokens;
    balance.tokens_per_group = options_.aux_scope == "sequence" ? input.batch.seq : 0;
    if (needs_step_counts() && training) balance.frequency_E = step_frequency(logits_TE, input);
    Routed routed = shoal::route(logits_TE, bias(), input.batch.valid_BS, spec_, balance);
    return {routed.expert_ids_TK, routed.weights_TK, routed.aux_loss,
            routed.z_loss,        routed.counts_E,   routed.entropy};
  }

  void end_step(const Tensor& counts_E) override {
    if (bias_) balance_bias(bias_->value.device(), bias_->value, counts_E, options_.bias_rate);
  }

 private:
  /// f of the whole global batch: from the measuring pass, or, with one micro-batch, from a routing without
  /// gradients.
  Tensor step_frequency(const Tensor& logits_TE, const RouteInput& input) const {
    Tensor counts_E = input.step_counts_E;
    if (!counts_E.defined()) {
      const NoGrad no_grad;
      counts_E = shoal::route(logits_TE, bias(), input.batch.valid_BS, spec_, {}).counts_E;
      input.sequences.all_reduce(counts_E, ReduceOp::sum).wait();
    }
    const double assignments =
        static_cast<double>(std::max<int64_t>(1, input.context.totals.tokens * context_.top_k));
    Tensor frequency_E = Tensor::empty({context_.num_experts}, logits_TE.dtype(), logits_TE.device());
    count_frequency(frequency_E.device(), counts_E, assignments, frequency_E);
    return frequency_E;
  }

  TopKOptions options_;
  RouterContext context_;
  RouteSpec spec_;
  Parameter* weight_;
  Buffer* bias_ = nullptr;
};

const bool registered = RouterRegistry::add<TopKOptions>(
    "top_k", "each token picks its k best experts",
    [](const TopKOptions& o, const RouterContext& c) { return std::make_unique<TopKRouter>(o, c); });

}  // namespace

}  // namespace shoal
