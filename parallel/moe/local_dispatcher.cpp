// The dispatcher of a single rank: rows change order and go nowhere.
#include "core/ops/permute.h"
#include "parallel/moe/dispatch_plan.h"
#include "parallel/moe/dispatcher.h"

namespace shoal {

namespace {

struct LocalPlan final : DispatchPlan {
  SortedAssignments sorted;
};

class LocalDispatcher final : public Dispatcher {
 public:
  explicit LocalDispatcher(const DispatcherContext& context) : num_experts_(context.num_experts) {
    const int size = context.group == nullptr ? 1 : context.group->size();
    if (size > 1) {
      throw UsageError(str("config parallel.dispatcher: local needs ep = 1, got ep = ", size,
                           "; use all_to_all or set ep: 1"));
    }
  }

  Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK, int64_t rows_each) override {
    auto plan = std::make_shared<LocalPlan>();
    plan->sorted = rows_each == kAsNeeded ? sort_assignments(expert_ids_TK, num_experts_)
                                          : sort_padded(expert_ids_TK, num_experts_, rows_each);
    Dispatched dispatched{
        gather_rows(x_TD, plan->sorted.row_N, plan->sorted.slots_TK), plan->sorted.counts_E, {}, plan};
    return Pending<Dispatched>([dispatched] { return dispatched; });
  }

  Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                          const std::shared_ptr<const DispatchPlan>& plan) override {
    const SortedAssignments& s = plan_of<LocalPlan>(plan, "local").sorted;
    const Tensor y = combine_rows(y_RD, weights_TK, s.slots_TK, s.row_N, s.choice_N);
    return Pending<Tensor>([y] { return y; });
  }

  void count(const RoutedRows&, PassHalf) const override {}

 private:
  int64_t num_experts_;
};

const bool registered = DispatcherRegistry::add<NoOptions>(
    "local", "no exchange; needs ep = 1", [](const NoOptions&, const DispatcherContext& context) {
      return std::make_unique<LocalDispatcher>(context);
    });

}  // namespace

}  // namespace shoal
