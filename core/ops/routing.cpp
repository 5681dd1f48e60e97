#include "core/ops/routing.h"

#include <algorithm>
#include <cmath>

#include "core/autograd/tape.h"

namespace shoal {

namespace {

void check_spec(const RouteSpec& spec, int64_t num_experts) {
  SHOAL_CHECK(spec.top_k >= 1 && spec.top_k <= std::min(num_experts, kMaxTopK),
              "route: expected top_k in 1..", std::min(num_experts, kMaxTopK), " for ", num_experts,
              " experts, got ", spec.top_k);
  if (spec.num_groups <= 1) return;
  SHOAL_CHECK(num_experts % spec.num_groups == 0, "route: num_groups must divide the ", num_experts,
              " experts, got ", spec.num_groups);
  SHOAL_CHECK(spec.top_groups >= 1 && spec.top_groups <= std::min(spec.num_groups, kMaxTopK),
              "route: expected top_groups in 1..", std::min(spec.num_groups, kMaxTopK), ", got ",
              spec.top_groups);
  SHOAL_CHECK(spec.group_score_top >= 1 && spec.group_score_top <= kMaxTopK,
              "route: expected group_score_top in 1..", kMaxTopK, ", got ", spec.group_score_top);
  const int64_t eligible = spec.top_groups * (num_experts / spec.num_groups);
  SHOAL_CHECK(spec.top_k <= eligible, "route: top_k ", spec.top_k, " is more than the ", eligible,
              " experts in ", spec.top_groups, " groups; raise top_groups or lower top_k");
}

/// Output: weights, aux loss, z-loss (the losses undefined when their coefficient is 0). What has no gradient
/// goes to `routed`, which must live until forward returns.
class RouteFunction final : public Function {
 public:
  RouteFunction(Tensor bias_E, Tensor valid_T, const RouteSpec& spec, BalanceSpec balance, Routed* routed)
      : bias_E_(std::move(bias_E)),
        valid_T_(std::move(valid_T)),
        spec_(spec),
        balance_(std::move(balance)),
        routed_(routed) {}
  const char* name() const override { return "route"; }

  std::vector<Tensor> forward(const Tensor& logits) {
    check(logits);
    const int64_t num_tokens = logits.num_rows(), num_experts = logits.row_size();
    const DType dtype = logits.dtype();
    const Device device = logits.device();
    RouteForward args;
    args.logits_TE = logits;
    args.bias_E = bias_E_;
    args.valid_T = valid_T_;
    args.ids_TK = Tensor::empty({num_tokens, spec_.top_k}, DType::i32, device);
    args.weights_TK = Tensor::empty({num_tokens, spec_.top_k}, dtype, device);
    args.counts_E = Tensor::empty({num_experts}, DType::i64, device);
    args.scores_TE = Tensor::empty({num_tokens, num_experts}, dtype, device);
    if (balance_.z_coeff != 0) args.lse_T = Tensor::empty({num_tokens}, dtype, device);
    if (balance_.aux_coeff != 0) args.frequency_GE = frequency_for(logits);
    if (balance_.aux_coeff != 0) args.aux_loss = Tensor::empty({}, dtype, device);
    if (balance_.z_coeff != 0) args.z_loss = Tensor::empty({}, dtype, device);
    args.entropy = Tensor::empty({}, DType::f64, device);
    route_fwd(device, args, spec_, balance_);
    if (needs_grad(0)) keep(args);
    routed_->expert_ids_TK = args.ids_TK;
    routed_->counts_E = args.counts_E;
    routed_->entropy = args.entropy;
    routed_ = nullptr;
    return {args.weights_TK, args.aux_loss, args.z_loss};
  }

  std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) override {
    kept_.dweights_TK = grad_outputs[0];
    kept_.daux = grad_outputs[1];
    kept_.dz = grad_outputs[2];
    kept_.dlogits_TE = Tensor::empty_like(kept_.logits_TE);
    route_bwd(kept_.logits_TE.device(), kept_, spec_, balance_);
    return {kept_.dlogits_TE};
  }

 private:
  Tensor frequency_for(const Tensor& logits) const {
    if (balance_.frequency_E.defined()) return balance_.frequency_E.view({1, logits.row_size()});
    const int64_t num_groups =
        balance_.tokens_per_group == 0 ? 1 : logits.num_rows() / balance_.tokens_per_group;
    return Tensor::empty({num_groups, logits.row_size()}, logits.dtype(), logits.device());
  }

  void keep(const RouteForward& args) {
    // A copy of the ids: capacity drops overwrite them, but the dropped scores stay in the normalisation.
    kept_.ids_TK = args.ids_TK.clone();
    kept_.weights_TK = args.weights_TK;
    kept_.scores_TE = args.scores_TE;
    kept_.lse_T = args.lse_T;
    kept_.frequency_GE = args.frequency_GE;
    kept_.valid_T = valid_T_;
    kept_.logits_TE = args.logits_TE;
  }

  void check(const Tensor& logits) const {
    const int64_t num_tokens = logits.num_rows(), num_experts = logits.row_size();
    check_spec(spec_, num_experts);
    SHOAL_CHECK(!bias_E_.defined() || bias_E_.numel() == num_experts, "route: expected a bias of ",
                num_experts, " elements, got ", bias_E_.shape());
    SHOAL_CHECK(!valid_T_.defined() || (valid_T_.dtype() == DType::u8 && valid_T_.numel() == num_tokens),
                "route: expected a u8 validity flag for each of the ", num_tokens, " tokens, got ",
                valid_T_.dtype(), ' ', valid_T_.shape());
    const int64_t group = balance_.tokens_per_group;
    SHOAL_CHECK(group >= 0 && (group == 0 || num_tokens % group == 0),
                "route: tokens_per_group must divide the ", num_tokens, " rows, got ", group);
    SHOAL_CHECK(!balance_.frequency_E.defined() || (balance_.frequency_E.numel() == num_experts &&
                                                    balance_.frequency_E.dtype() == logits.dtype()),
                "route: expected a frequency for each of the ", num_experts, " experts in ", logits.dtype(),
                ", got ", balance_.frequency_E.dtype(), ' ', balance_.frequency_E.shape());
  }

  Tensor bias_E_, valid_T_;
  RouteSpec spec_;
  BalanceSpec balance_;
  Routed* routed_;
  RouteBackward kept_;
};

}  // namespace

Routed route(const Tensor& logits_TE, const Tensor& bias_E, const Tensor& valid_T, const RouteSpec& spec,
             const BalanceSpec& balance) {
  Routed routed;
  const std::vector<Tensor> out = apply(RouteFunction(bias_E, valid_T, spec, balance, &routed), logits_TE);
  routed.weights_TK = out[0];
  routed.aux_loss = out[1];
  routed.z_loss = out[2];
  return routed;
}

int64_t expert_capacity(double factor, int64_t top_k, int64_t tokens, int64_t num_experts) {
  const double wanted =
      factor * static_cast<double>(top_k) * static_cast<double>(tokens) / static_cast<double>(num_experts);
  // Rounding errors of the product must not add a whole slot: 1.1 * 2 * 10 / 2 is 11, not 12.
  const double rounded = std::ceil(wanted * (1 - 1e-12));
  return static_cast<int64_t>(std::clamp(rounded, 0.0, static_cast<double>(tokens)));
}

Tensor drop_over_capacity(const Tensor& expert_ids_TK, const Tensor& weights_TK, int64_t num_experts,
                          const CapacitySpec& spec) {
  SHOAL_CHECK(expert_ids_TK.dims() == 2 && expert_ids_TK.dtype() == DType::i32 &&
                  expert_ids_TK.shape() == weights_TK.shape(),
              "drop_over_capacity: expected i32 ids [T, K] and weights of the same shape, got ",
              expert_ids_TK.dtype(), ' ', expert_ids_TK.shape(), " and ", weights_TK.shape());
  SHOAL_CHECK(spec.tokens_per_group >= 0 &&
                  (spec.tokens_per_group == 0 || expert_ids_TK.size(0) % spec.tokens_per_group == 0),
              "drop_over_capacity: tokens_per_group must divide the ", expert_ids_TK.size(0), " rows, got ",
              spec.tokens_per_group);
  Tensor dropped = Tensor::empty({}, DType::i64, expert_ids_TK.device());
  drop_over_capacity_fwd(dropped.device(), expert_ids_TK, weights_TK, num_experts, spec, dropped);
  return dropped;
}

Tensor count_experts(const Tensor& expert_ids_TK, int64_t num_experts) {
  Tensor counts_E = Tensor::empty({num_experts}, DType::i64, expert_ids_TK.device());
  count_experts_fwd(counts_E.device(), expert_ids_TK, counts_E);
  return counts_E;
}

}  // namespace shoal
