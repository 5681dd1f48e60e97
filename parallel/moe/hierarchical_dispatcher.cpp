// Two levels, for experts on several nodes: a token goes once to each node that holds some of its experts, to
// the rank there with this rank's place on its node, and from it to the ranks of its experts, over the links
// of the node. On the way back the results of a node are weighted and summed there, so that one row of each
// token returns. Between nodes this sends a row per (token, node) where all_to_all sends one per (token,
// expert): top_k of them at most become one. Sums over choices run node by node, so bits differ from those of
// other dispatchers by rounding.
#include <algorithm>
#include <numeric>

#include "core/nn/placement.h"
#include "core/ops/permute.h"
#include "parallel/collective_ops.h"
#include "parallel/moe/dispatch_plan.h"
#include "parallel/moe/dispatcher.h"

namespace shoal {

namespace {

struct HierarchicalPlan final : DispatchPlan {
  SortedAssignments sorted;  // tokens by node: "experts" are nodes
  std::vector<int64_t> send_rows, recv_rows;
  Tensor ones_TM;  // weights of the sum over nodes
  std::shared_ptr<const DispatchPlan> inner;
};

class HierarchicalDispatcher final : public Dispatcher {
 public:
  explicit HierarchicalDispatcher(const DispatcherContext& context) {
    SHOAL_CHECK(context.group != nullptr && context.num_experts >= context.group->size(),
                "hierarchical dispatcher: expected an ep group of at most num_experts (", context.num_experts,
                ") ranks");
    Communicator& group = *context.group;
    const int ranks = group.size(), per_node = ranks_per_node(group.traffic().nodes(), ranks);
    num_nodes_ = ranks / per_node;
    for (int node = 0; node <= num_nodes_; node++)
      first_expert_.push_back(node == num_nodes_
                                  ? context.num_experts
                                  : shard_range(context.num_experts, {node * per_node, ranks}).begin);
    const int node = group.rank() / per_node;
    using Place = Communicator::Place;
    within_ = group.split_by([&](int r) { return Place{r / per_node, r % per_node}; }, "ep within node");
    across_ = group.split_by([&](int r) { return Place{r % per_node, r / per_node}; }, "ep across nodes");
    // Its experts are those of this node: shards of consecutive ranks are shards of what they hold together.
    const auto n = static_cast<size_t>(node);
    inner_ =
        DispatcherRegistry::make(Choice{"all_to_all", nullptr},
                                 DispatcherContext{within_.get(), first_expert_[n + 1] - first_expert_[n]});
  }

  Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK, int64_t rows_each) override {
    if (rows_each != kAsNeeded) {
      throw UsageError(
          "config parallel.dispatcher: hierarchical cannot send as many rows as an expert has room for "
          "(model.moe.pad_to_capacity); use all_to_all, or local with ep: 1");
    }
    auto plan = std::make_shared<HierarchicalPlan>();
    const Device device = x_TD.device();
    // Ids are read by the host, which has to wait for the counts anyway.
    const std::vector<int32_t> ids = expert_ids_TK.to_vector<int32_t>();
    const int64_t num_tokens = expert_ids_TK.size(0), top_k = expert_ids_TK.size(1);
    plan->sorted = sort_assignments(nodes_of(ids, num_tokens, top_k, device), num_nodes_);
    plan->ones_TM = ones({num_tokens, num_nodes_}, x_TD);
    exchange_counts(*plan);
    const Tensor ids_RK = exchange_ids(*plan, ids, top_k, device);
    const Tensor x_ND = gather_rows(x_TD, plan->sorted.row_N, plan->sorted.slots_TK);
    const StartedExchange rows = all_to_all_start(x_ND, *across_, plan->send_rows, plan->recv_rows);
    return Pending<Dispatched>([this, rows, ids_RK, plan] {
      Dispatched dispatched = inner_->dispatch(all_to_all_wait(rows), ids_RK).wait();
      plan->inner = std::exchange(dispatched.plan, plan);
      return dispatched;
    });
  }

  Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                          const std::shared_ptr<const DispatchPlan>& plan) override {
    const auto& p = plan_of<HierarchicalPlan>(plan, "hierarchical");
    const SortedAssignments& s = p.sorted;
    const Tensor weights_NK = gather_rows(weights_TK, s.row_N, s.slots_TK);
    const Tensor weights_RK =
        all_to_all_wait(all_to_all_start(weights_NK, *across_, p.send_rows, p.recv_rows));
    const Tensor sums_RD = inner_->combine(y_RD, weights_RK, p.inner).wait();
    const StartedExchange rows = all_to_all_start(sums_RD, *across_, p.recv_rows, p.send_rows);
    return Pending<Tensor>([rows, plan] {
      const auto& own = plan_of<HierarchicalPlan>(plan, "hierarchical");
      const SortedAssignments& sorted = own.sorted;
      return combine_rows(all_to_all_wait(rows), own.ones_TM, sorted.slots_TK, sorted.row_N, sorted.choice_N);
    });
  }

  bool sums_in_order_of_choices() const override { return num_nodes_ == 1; }

  void count(const RoutedRows& rows, PassHalf half) const override {
    const int per_node = within_->size(), node = across_->rank(), place = within_->rank();
    const auto n = static_cast<size_t>(node);
    const auto to_nodes = [&](int rank) {
      return rows.routing.tokens_in_ranges(rows.tokens_R[static_cast<size_t>(rank)], first_expert_);
    };
    // What the ranks of this node get of those with their place on other nodes, and spread.
    RoutedRows inner = rows;
    inner.tokens_R.assign(static_cast<size_t>(per_node), 0);
    inner.counts_RE.assign(static_cast<size_t>(per_node), {});
    std::vector<int64_t> arriving(static_cast<size_t>(num_nodes_), 0);
    for (int p = 0; p < per_node; p++) {
      auto& counts = inner.counts_RE[static_cast<size_t>(p)];
      counts.assign(static_cast<size_t>(first_expert_[n + 1] - first_expert_[n]), 0);
      for (int m = 0; m < num_nodes_; m++) {
        const auto& from = rows.counts_RE[static_cast<size_t>(m * per_node + p)];
        for (size_t e = 0; e < counts.size(); e++)
          counts[e] += from[static_cast<size_t>(first_expert_[n]) + e];
      }
    }
    for (int m = 0; m < num_nodes_; m++) arriving[static_cast<size_t>(m)] = to_nodes(m * per_node + place)[n];
    const std::vector<int64_t> leaving = to_nodes(node * per_node + place);
    TrafficCounter& traffic = across_->traffic();
    if (half == PassHalf::forward) {
      constexpr int64_t kCountBytes = 8, kIdBytes = 4;
      traffic.all_to_all(std::vector<int64_t>(static_cast<size_t>(num_nodes_), 1), kCountBytes);
      traffic.all_to_all(leaving, rows.ids * kIdBytes);
    }
    traffic.all_to_all(leaving, rows.row_bytes);
    traffic.all_to_all(arriving, rows.row_bytes);
    if (half == PassHalf::forward || rows.weights_have_gradients)
      traffic.all_to_all(half == PassHalf::forward ? leaving : arriving, rows.ids * rows.weight_bytes);
    inner_->count(inner, half);
  }

 private:
  /// Throws UsageError unless the ranks lie node by node, as many on each.
  static int ranks_per_node(const std::vector<int>& nodes, int ranks) {
    const int each = regular_node_size(nodes, ranks);
    if (each > 0) return each;
    std::string text;
    for (const int node : nodes) text += str(text.empty() ? "" : " ", node);
    throw UsageError(
        str("config parallel.dispatcher: hierarchical needs the ranks of an expert parallel group node "
            "by node, as many on each; they are on nodes ",
            text,
            "; place ranks by slot (mpirun --map-by slot), set parallel.ranks_per_node, or use "
            "all_to_all"));
  }
  /// In the dtype of gate weights: f32 unless x is f64.
  static Tensor ones(const Shape& shape, const Tensor& x) {
    const auto count = static_cast<size_t>(shape.numel());
    return x.dtype() == DType::f64 ? Tensor::from(std::vector<double>(count, 1), shape, x.device())
                                   : Tensor::from(std::vector<float>(count, 1), shape, x.device());
  }
  int node_of(int32_t expert) const {
    return static_cast<int>(std::ranges::upper_bound(first_expert_, int64_t{expert}) -
                            first_expert_.begin()) -
           1;
  }

  /// [T, M]: m where a choice of the token is on node m, else -1.
  Tensor nodes_of(const std::vector<int32_t>& ids, int64_t num_tokens, int64_t top_k, Device device) const {
    std::vector<int32_t> nodes(static_cast<size_t>(num_tokens * num_nodes_), -1);
    for (size_t i = 0; i < ids.size(); i++) {
      if (ids[i] < 0) continue;
      SHOAL_CHECK(ids[i] < first_expert_.back(),
                  "dispatch: an expert id that is neither -1 (dropped) nor one of the ", first_expert_.back(),
                  " experts: ", ids[i], " (position ", i, ")");
      const int node = node_of(ids[i]);
      nodes[i / static_cast<size_t>(top_k) * static_cast<size_t>(num_nodes_) + static_cast<size_t>(node)] =
          node;
    }
    return Tensor::from(nodes, {num_tokens, num_nodes_}, device);
  }
  void exchange_counts(HierarchicalPlan& plan) const {
    plan.send_rows = plan.sorted.counts_E;
    const Tensor counts = Tensor::empty({num_nodes_}, DType::i64);
    const std::vector<int64_t> one(static_cast<size_t>(num_nodes_), 1);
    across_->all_to_all(Tensor::from(plan.send_rows, {num_nodes_}), counts, one, one).wait();
    plan.recv_rows = counts.to_vector<int64_t>();
  }
  /// The choices of each row that arrives, as experts of this node; -1: on another one, or dropped.
  Tensor exchange_ids(const HierarchicalPlan& plan, const std::vector<int32_t>& ids, int64_t top_k,
                      Device device) const {
    const std::vector<int64_t> token_N = plan.sorted.row_N.to_vector<int64_t>();
    std::vector<int32_t> sent;
    sent.reserve(token_N.size() * static_cast<size_t>(top_k));
    size_t row = 0;
    for (int node = 0; node < num_nodes_; node++) {
      const auto first = static_cast<int32_t>(first_expert_[static_cast<size_t>(node)]);
      for (int64_t i = 0; i < plan.send_rows[static_cast<size_t>(node)]; i++, row++) {
        for (int64_t k = 0; k < top_k; k++) {
          const int32_t id = ids[static_cast<size_t>(token_N[row] * top_k + k)];
          sent.push_back(id >= 0 && node_of(id) == node ? id - first : -1);
        }
      }
    }
    const int64_t rows = std::accumulate(plan.recv_rows.begin(), plan.recv_rows.end(), int64_t{0});
    const Tensor received = Tensor::empty({rows, top_k}, DType::i32);
    across_
        ->all_to_all(Tensor::from(sent, {std::ssize(token_N), top_k}), received, plan.send_rows,
                     plan.recv_rows)
        .wait();
    return received.to(device);
  }

  int num_nodes_ = 1;
  std::vector<int64_t> first_expert_;  // of each node, and the number of experts
  std::shared_ptr<Communicator> within_, across_;
  std::unique_ptr<Dispatcher> inner_;
};

const bool registered = DispatcherRegistry::add<NoOptions>(
    "hierarchical",
    "each token goes once to each node of its experts, and is spread there; nodes are found, or "
    "parallel.ranks_per_node says how many ranks each has",
    [](const NoOptions&, const DispatcherContext& context) {
      return std::make_unique<HierarchicalDispatcher>(context);
    });

}  // namespace

}  // namespace shoal
