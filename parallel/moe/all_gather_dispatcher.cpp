// The reference dispatcher: every rank sees all tokens and all results and takes what it needs. Simple, but
// it moves size() times as many bytes as needed. Nothing is summed between ranks: every sum runs over the
// choices of a token, in order, on the token's own rank, so that the bits are those of any other dispatcher.
#include <algorithm>
#include <numeric>

#include "core/autograd/tape.h"
#include "core/nn/placement.h"
#include "core/ops/permute.h"
#include "parallel/collective_ops.h"
#include "parallel/moe/dispatch_plan.h"
#include "parallel/moe/dispatcher.h"

namespace shoal {

namespace {

/// "Expert order": the rows of all ranks sorted by global expert, then by source rank, token and choice. Rank
/// r holds the part [expert_offsets[r], expert_offsets[r + 1]). "Send order": rank 0's own rows, sorted the
/// same way, then rank 1's, ...: parts by send_offsets.
struct AllGatherPlan final : DispatchPlan {
  std::vector<int64_t> token_offsets, send_offsets, expert_offsets;
  std::vector<int64_t> rows_per_expert, rows_per_source;  // as in Dispatched
  SortedAssignments own;                                  // of this rank's tokens
  Tensor token_R;             // of each row here: its token in the gathered tokens
  Tensor send_position_R;     // of each row here: its place in send order
  Tensor expert_position_N;   // of each own row: its place in expert order
  Tensor expert_position_TK;  // the same per assignment; -1: dropped
};

Tensor take(const Tensor& x, const Tensor& index) {
  const Tensor y = Tensor::empty({index.numel(), x.size(1)}, x.dtype(), x.device());
  gather_rows_fwd(x.device(), x, index, y);
  return y;
}

/// Tokens of all ranks -> rows of this rank's experts.
struct TakeTokens final : Function {
  TakeTokens(Communicator& group, std::shared_ptr<const AllGatherPlan> plan)
      : group(&group), plan(std::move(plan)) {}
  Communicator* group;
  std::shared_ptr<const AllGatherPlan> plan;
  const char* name() const override { return "all_gather_dispatch"; }
  Tensor forward(const Tensor& x_TD) {
    return take(gather_all_rows(x_TD, *group, plan->token_offsets), plan->token_R);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    const Tensor all = gather_all_rows(dy[0], *group, plan->expert_offsets);
    const Tensor dx =
        Tensor::empty({plan->expert_position_TK.size(0), all.size(1)}, all.dtype(), all.device());
    combine_rows_fwd(all.device(), all, Tensor{}, plan->expert_position_TK, dx);
    return {dx};
  }
};

/// Results of all experts -> own rows.
struct TakeResults final : Function {
  TakeResults(Communicator& group, std::shared_ptr<const AllGatherPlan> plan)
      : group(&group), plan(std::move(plan)) {}
  Communicator* group;
  std::shared_ptr<const AllGatherPlan> plan;
  const char* name() const override { return "all_gather_combine"; }
  Tensor forward(const Tensor& y_RD) {
    return take(gather_all_rows(y_RD, *group, plan->expert_offsets), plan->expert_position_N);
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    return {take(gather_all_rows(dy[0], *group, plan->send_offsets), plan->send_position_R)};
  }
};

class AllGatherDispatcher final : public Dispatcher {
 public:
  explicit AllGatherDispatcher(const DispatcherContext& context)
      : group_(context.group), num_experts_(context.num_experts) {
    SHOAL_CHECK(group_ != nullptr && num_experts_ >= group_->size(),
                "all_gather dispatcher: expected an ep group of at most num_experts (", num_experts_,
                ") ranks");
  }

  Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK, int64_t rows_each) override {
    if (rows_each != kAsNeeded) {
      throw UsageError(
          "config parallel.dispatcher: all_gather cannot send as many rows as an expert has room for "
          "(model.moe.pad_to_capacity); use all_to_all, or local with ep: 1");
    }
    const std::shared_ptr<const AllGatherPlan> plan = make_plan(expert_ids_TK);
    SHOAL_CHECK(x_TD.dims() == 2 && x_TD.size(0) == expert_ids_TK.size(0),
                "all_gather dispatcher: expected x [T, D] with the T of expert_ids_TK ",
                expert_ids_TK.shape(), ", got ", x_TD.shape());
    Dispatched dispatched{apply(TakeTokens(*group_, plan), x_TD), plan->rows_per_expert,
                          plan->rows_per_source, plan};
    return Pending<Dispatched>([dispatched] { return dispatched; });
  }

  Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                          const std::shared_ptr<const DispatchPlan>& plan) override {
    plan_of<AllGatherPlan>(plan, "all_gather");
    auto own = std::static_pointer_cast<const AllGatherPlan>(plan);
    const SortedAssignments& s = own->own;
    const Tensor y_ND = apply(TakeResults(*group_, own), y_RD);
    const Tensor y = combine_rows(y_ND, weights_TK, s.slots_TK, s.row_N, s.choice_N);
    return Pending<Tensor>([y] { return y; });
  }

  void count(const RoutedRows& rows, PassHalf half) const override {
    const std::vector<int64_t> tokens = offsets_of(rows.tokens_R);
    std::vector<int64_t> sent, used(static_cast<size_t>(group_->size()), 0);
    for (const std::vector<int64_t>& counts_E : rows.counts_RE) {
      const std::vector<int64_t> by_rank = rows_per_rank(counts_E, group_->size());
      sent.push_back(std::accumulate(by_rank.begin(), by_rank.end(), int64_t{0}));
      for (size_t r = 0; r < used.size(); r++) used[r] += by_rank[r];
    }
    if (half == PassHalf::backward) {
      count_gather(*group_, offsets_of(sent), rows.row_bytes);
      return count_gather(*group_, offsets_of(used), rows.row_bytes);
    }
    constexpr int64_t kIndexBytes = 8, kIdBytes = 4;
    for (int i = 0; i < 2; i++) group_->traffic().all_gather(kIndexBytes);  // numbers of tokens, of rows
    count_gather(*group_, tokens, rows.ids * kIdBytes);
    count_gather(*group_, offsets_of(sent), kIndexBytes);
    count_gather(*group_, tokens, rows.row_bytes);
    count_gather(*group_, offsets_of(used), rows.row_bytes);
  }

 private:
  static std::vector<int64_t> offsets_of(const std::vector<int64_t>& rows) {
    std::vector<int64_t> offsets(rows.size() + 1, 0);
    std::partial_sum(rows.begin(), rows.end(), offsets.begin() + 1);
    return offsets;
  }
  std::shared_ptr<const AllGatherPlan> make_plan(const Tensor& expert_ids_TK) {
    auto plan = std::make_shared<AllGatherPlan>();
    const auto me = static_cast<size_t>(group_->rank());
    plan->own = sort_assignments(expert_ids_TK, num_experts_);
    plan->token_offsets = gather_row_offsets(expert_ids_TK.size(0), *group_);
    plan->send_offsets = gather_row_offsets(plan->own.num_rows(), *group_);
    const Tensor ids_all = gather_all_rows(expert_ids_TK, *group_, plan->token_offsets);
    const SortedAssignments all = sort_assignments(ids_all, num_experts_);  // its rows are in expert order
    const std::vector<int64_t> rows = rows_per_rank(all.counts_E, group_->size());
    plan->expert_offsets.assign(rows.size() + 1, 0);
    std::partial_sum(rows.begin(), rows.end(), plan->expert_offsets.begin() + 1);
    const ShardRange shard = shard_range(num_experts_, {group_->rank(), group_->size()});
    plan->rows_per_expert.assign(all.counts_E.begin() + shard.begin, all.counts_E.begin() + shard.end);
    plan->token_R = all.row_N.rows(plan->expert_offsets[me], plan->expert_offsets[me + 1]);
    plan->expert_position_TK = all.slots_TK.rows(plan->token_offsets[me], plan->token_offsets[me + 1]);
    plan->rows_per_source = rows_per_source(*plan);
    fill_positions(*plan);
    return plan;
  }

  /// [local experts, ranks]: the rank of a row follows from its token.
  static std::vector<int64_t> rows_per_source(const AllGatherPlan& plan) {
    const int64_t ranks = std::ssize(plan.token_offsets) - 1;
    const std::vector<int64_t> tokens = plan.token_R.to_vector<int64_t>();
    std::vector<int64_t> rows(plan.rows_per_expert.size() * static_cast<size_t>(ranks), 0);
    auto token = tokens.begin();
    for (size_t e = 0; e < plan.rows_per_expert.size(); e++) {
      for (int64_t i = 0; i < plan.rows_per_expert[e]; i++, ++token) {
        const auto source =
            std::ranges::upper_bound(plan.token_offsets, *token) - plan.token_offsets.begin() - 1;
        rows[e * static_cast<size_t>(ranks) + static_cast<size_t>(source)]++;
      }
    }
    return rows;
  }

  // This dispatcher is the reference, not the fast one: its positions are computed by the host.
  void fill_positions(AllGatherPlan& plan) {
    const auto me = static_cast<size_t>(group_->rank());
    const Device device = plan.own.row_N.device();
    const int64_t num_rows = plan.own.num_rows(), top_k = plan.expert_position_TK.size(1);
    const auto token = plan.own.row_N.to_vector<int64_t>(), choice = plan.own.choice_N.to_vector<int64_t>(),
               position = plan.expert_position_TK.to_vector<int64_t>();
    std::vector<int64_t> positions(static_cast<size_t>(num_rows));
    for (size_t n = 0; n < positions.size(); n++)
      positions[n] = position[static_cast<size_t>(token[n] * top_k + choice[n])];
    plan.expert_position_N = Tensor::from(positions, {num_rows}, device);
    const std::vector<int64_t> all =
        gather_all_rows(plan.expert_position_N, *group_, plan.send_offsets).to_vector<int64_t>();
    std::vector<int64_t> inverse(all.size());
    for (size_t q = 0; q < all.size(); q++) inverse[static_cast<size_t>(all[q])] = static_cast<int64_t>(q);
    plan.send_position_R = Tensor::from(inverse, {std::ssize(inverse)}, device)
                               .rows(plan.expert_offsets[me], plan.expert_offsets[me + 1]);
  }

  Communicator* group_;
  int64_t num_experts_;
};

const bool registered = DispatcherRegistry::add<NoOptions>(
    "all_gather", "every rank gathers all tokens and all results; the reference for other dispatchers",
    [](const NoOptions&, const DispatcherContext& context) {
      return std::make_unique<AllGatherDispatcher>(context);
    });

}  // namespace

}  // namespace shoal
