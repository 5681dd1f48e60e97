// Rows go straight to the ranks of their experts: counts first, then the rows in one exchange with variable
// counts, then (when a rank holds several experts and hears from several ranks) into expert order.
#include "core/nn/placement.h"
#include "core/ops/permute.h"
#include "parallel/collective_ops.h"
#include "parallel/moe/dispatch_plan.h"
#include "parallel/moe/dispatcher.h"

namespace shoal {

namespace {

struct AllToAllPlan final : DispatchPlan {
  SortedAssignments sorted;  // the rows sent, by expert: so by rank too, as ranks hold consecutive experts
  std::vector<int64_t> send_rows;
  ArrivalOrder arrival;
};

class AllToAllDispatcher final : public Dispatcher {
 public:
  explicit AllToAllDispatcher(const DispatcherContext& context)
      : group_(context.group), num_experts_(context.num_experts) {
    SHOAL_CHECK(group_ != nullptr && num_experts_ >= group_->size(),
                "all_to_all dispatcher: expected an ep group of at most num_experts (", num_experts_,
                ") ranks");
    for (int r = 0; r < group_->size(); r++) {
      const ShardRange shard = shard_range(num_experts_, {r, group_->size()});
      experts_per_rank_.push_back(shard.end - shard.begin);
    }
  }

  Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK) override {
    auto plan = std::make_shared<AllToAllPlan>();
    plan->sorted = sort_assignments(expert_ids_TK, num_experts_);
    plan->send_rows = rows_per_rank(plan->sorted.counts_E, group_->size());
    // The counts travel while the rows are being put in order.
    const int64_t num_local = experts_per_rank_[static_cast<size_t>(group_->rank())];
    const Tensor counts = Tensor::from(plan->sorted.counts_E, {num_experts_});
    const Tensor arriving = Tensor::empty({group_->size() * num_local}, DType::i64);
    const std::vector<int64_t> local_per_rank(static_cast<size_t>(group_->size()), num_local);
    Work counts_sent = group_->all_to_all(counts, arriving, experts_per_rank_, local_per_rank);
    const Tensor x_ND = gather_rows(x_TD, plan->sorted.row_N, plan->sorted.slots_TK);
    counts_sent.wait();
    plan->arrival = order_arrivals({arriving.data<int64_t>(), static_cast<size_t>(arriving.numel())},
                                   group_->size(), num_local, x_TD.device());
    if (group_->size() == 1) {
      Dispatched dispatched{x_ND, plan->arrival.rows_per_expert, plan};
      return Pending<Dispatched>([dispatched] { return dispatched; });
    }
    const StartedExchange rows = all_to_all_start(x_ND, *group_, plan->send_rows, plan->arrival.recv_rows);
    return Pending<Dispatched>([rows, plan] {
      const ArrivalOrder& arrival = plan->arrival;
      Tensor x = all_to_all_wait(rows);
      if (!arrival.identity) x = permute_rows(x, arrival.index_R, arrival.inverse_R);
      return Dispatched{x, arrival.rows_per_expert, plan};
    });
  }

  Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                          const std::shared_ptr<const DispatchPlan>& plan) override {
    const auto& p = plan_of<AllToAllPlan>(plan, "all_to_all");
    Tensor y = y_RD;
    if (!p.arrival.identity) y = permute_rows(y, p.arrival.inverse_R, p.arrival.index_R);
    auto finish = [weights_TK, plan](const Tensor& y_ND) {
      const SortedAssignments& s = plan_of<AllToAllPlan>(plan, "all_to_all").sorted;
      return combine_rows(y_ND, weights_TK, s.slots_TK, s.row_N, s.choice_N);
    };
    if (group_->size() == 1) return Pending<Tensor>([y, finish] { return finish(y); });
    const StartedExchange rows = all_to_all_start(y, *group_, p.arrival.recv_rows, p.send_rows);
    return Pending<Tensor>([rows, finish] { return finish(all_to_all_wait(rows)); });
  }

 private:
  Communicator* group_;
  int64_t num_experts_;
  std::vector<int64_t> experts_per_rank_;
};

const bool registered = DispatcherRegistry::add<NoOptions>(
    "all_to_all", "each row goes only to the rank of its expert (variable counts)",
    [](const NoOptions&, const DispatcherContext& context) {
      return std::make_unique<AllToAllDispatcher>(context);
    });

}  // namespace

}  // namespace shoal
