// Expert choice (Zhou et al., arXiv:2202.09368): each expert takes the tokens with its largest scores, so
// load is balanced by construction and tokens get different numbers of experts. The choice looks at the whole
// sequence, later tokens included: a language model trained with it has seen the future through its routing.
// Evaluation and generation therefore use the token's own top_k instead, and the run warns once.
#include <mutex>

#include "core/base/log.h"
#include "core/ops/linear.h"
#include "core/ops/routing.h"
#include "models/moe/router.h"

namespace shoal {

namespace {

// Every expert is a candidate of every token, and route() sorts at most this many.
constexpr int64_t kMaxExperts = 64;

class ExpertChoiceRouter final : public Router {
 public:
  explicit ExpertChoiceRouter(const RouterContext& context) : context_(context) {
    if (context.num_experts > kMaxExperts) {
      throw UsageError(str("router expert_choice: expected at most ", kMaxExperts, " experts, got ",
                           context.num_experts, "; use router: top_k"));
    }
    weight_ = &add_parameter(context.build, "weight", Shape{context.num_experts, context.hidden_size},
                             Init::normal(context.init_std), ParamKind::router);
  }

  RouterGathers gathers() const override { return {.ids = context_.num_experts}; }

  Routing route(const RouteInput& input) override {
    const bool training = input.context.pass != Pass::evaluate;
    RouteSpec spec;
    spec.top_k = training ? context_.num_experts : context_.top_k;
    spec.normalize = false;
    const Routed routed =
        shoal::route(input.all_rows(linear(input.x_TD, weight_->value)), {}, input.batch.valid_BS, spec, {});
    Routing routing{routed.expert_ids_TK, routed.weights_TK, {}, {}, routed.counts_E, routed.entropy};
    if (!training) return routing;
    warn_once();
    // All experts are candidates; each keeps its C = ceil(top_k * tokens / E) best tokens of the sequence.
    // That is the drop by probability with as many choices as experts. Copies: the router's backward needs
    // what it had.
    routing.expert_ids_TK = routed.expert_ids_TK.clone();
    routing.weights_TK = routed.weights_TK.clone();
    routing.weights_TK.grad_ref = routed.weights_TK.grad_ref;
    CapacitySpec capacity;
    capacity.factor = static_cast<double>(context_.top_k) / static_cast<double>(context_.num_experts);
    capacity.policy = DropPolicy::probability;
    capacity.tokens_per_group = input.batch.seq;
    drop_over_capacity(routing.expert_ids_TK, routing.weights_TK, context_.num_experts, capacity);
    routing.counts_E = count_experts(routing.expert_ids_TK, context_.num_experts);
    return routing;
  }

 private:
  static void warn_once() {
    static std::once_flag once;
    if (log::rank() != 0) return;
    std::call_once(once, [] {
      log::warn(
          "router expert_choice is not causal: in training each expert picks tokens of the whole sequence, "
          "so "
          "the training loss is too good; the validation loss uses each token's own top_k");
    });
  }

  RouterContext context_;
  Parameter* weight_;
};

struct ExpertChoiceOptions final : RouterOptions {
  void fields(FieldVisitor&) override {}
};
const bool registered = RouterRegistry::add<ExpertChoiceOptions>(
    "expert_choice", "each expert picks its tokens; not causal in training (arXiv:2202.09368)",
    [](const ExpertChoiceOptions&, const RouterContext& c) {
      return std::make_unique<ExpertChoiceRouter>(c);
    });

}  // namespace

}  // namespace shoal
