// Rows go straight to the ranks of their experts: counts first, then the rows in one exchange with variable
// counts, then (when a rank holds several experts and hears from several ranks) into expert order. With
// `chunks` the experts of each rank are cut into parts, and there is an exchange for each: rows are sent in
// the order of parts, then ranks, then experts. An expert sees the same rows in the same order.
#include <algorithm>
#include <numeric>
#include <span>

#include "core/nn/placement.h"
#include "core/ops/permute.h"
#include "parallel/collective_ops.h"
#include "parallel/moe/dispatch_plan.h"
#include "parallel/moe/dispatcher.h"
#include "parallel/moe/parted_exchange.h"

namespace shoal {

namespace {

struct AllToAllOptions final : Options {
  int64_t chunks = 1;
  void fields(FieldVisitor& v) override {
    v("chunks", chunks,
      "the experts of a rank take turns in at most so many parts, and the rows of one part travel while "
      "another "
      "one is computed; the same bits for any number. Pays where something carries rows while a rank "
      "computes",
      in_range(1, 64));
  }
};

struct AllToAllPlan final : DispatchPlan {
  SortedAssignments sorted;  // the rows sent, by expert: so by rank too, as ranks hold consecutive experts
  std::vector<int64_t> send_rows;
  ArrivalOrder arrival;
};

/// Rows in the order of arrival -> in the order of use, and back.
Tensor in_order(const Tensor& x, const ArrivalOrder& arrival) {
  return arrival.identity ? x : permute_rows(x, arrival.index_R, arrival.inverse_R);
}
Tensor as_arrived(const Tensor& y, const ArrivalOrder& arrival) {
  return arrival.identity ? y : permute_rows(y, arrival.inverse_R, arrival.index_R);
}
Tensor combine_sorted(const Tensor& y_ND, const Tensor& weights_TK, const SortedAssignments& s) {
  return combine_rows(y_ND, weights_TK, s.slots_TK, s.row_N, s.choice_N);
}

class AllToAllParts final : public DispatchedParts {
 public:
  struct Part {
    ShardRange experts;  // local
    ArrivalOrder arrival;
  };
  AllToAllParts(SortedAssignments sorted, std::vector<Part> parts, int64_t num_local)
      : sorted_(std::move(sorted)), parts_(std::move(parts)), num_local_(num_local) {}
  void start(const Tensor& x_ND, SharedExchange exchange) {
    exchange_ = std::move(exchange);
    handles_ = spread_rows(exchange_, x_ND);
  }

  int64_t num_parts() const override { return std::ssize(parts_); }
  Dispatched arrive(int64_t part) override {
    const Part& p = parts_.at(static_cast<size_t>(part));
    Dispatched d;
    d.x_RD = in_order(arrived_rows(exchange_, part, handles_.at(static_cast<size_t>(part))), p.arrival);
    d.rows_per_expert.assign(static_cast<size_t>(num_local_), 0);
    std::ranges::copy(p.arrival.rows_per_expert, d.rows_per_expert.begin() + p.experts.begin);
    const int64_t sources = std::ssize(p.arrival.recv_rows);
    d.rows_per_source.assign(static_cast<size_t>(num_local_ * sources), 0);
    std::ranges::copy(p.arrival.rows_per_source, d.rows_per_source.begin() + p.experts.begin * sources);
    return d;
  }
  void send_back(int64_t part, const Tensor& y_RD) override {
    const Part& p = parts_.at(static_cast<size_t>(part));
    last_handle_ = send_rows_back(exchange_, part, as_arrived(y_RD, p.arrival), last_handle_);
  }
  Tensor combine(const Tensor& weights_TK) override {
    return combine_sorted(collect_rows(exchange_, last_handle_), weights_TK, sorted_);
  }

 private:
  SortedAssignments sorted_;  // by part, then rank, then expert
  std::vector<Part> parts_;
  int64_t num_local_;
  SharedExchange exchange_;
  std::vector<Tensor> handles_;
  Tensor last_handle_;
};

class AllToAllDispatcher final : public Dispatcher {
 public:
  AllToAllDispatcher(const AllToAllOptions& options, const DispatcherContext& context)
      : group_(context.group), num_experts_(context.num_experts) {
    SHOAL_CHECK(group_ != nullptr && num_experts_ >= group_->size(),
                "all_to_all dispatcher: expected an ep group of at most num_experts (", num_experts_,
                ") ranks");
    for (int r = 0; r < group_->size(); r++) {
      const ShardRange shard = experts_of(r);
      experts_per_rank_.push_back(shard.end - shard.begin);
    }
    num_parts_ = group_->size() == 1 ? 1 : std::min(options.chunks, std::ranges::min(experts_per_rank_));
  }

  Pending<Dispatched> dispatch(const Tensor& x_TD, const Tensor& expert_ids_TK, int64_t rows_each) override {
    auto plan = std::make_shared<AllToAllPlan>();
    Counts counts = sort(expert_ids_TK, rows_each, {}, plan->sorted);
    plan->send_rows = rows_per_rank(plan->sorted.counts_E, group_->size());
    const Tensor x_ND = gather_rows(x_TD, plan->sorted.row_N, plan->sorted.slots_TK);
    plan->arrival = arrival_of(0, counts.wait(), num_local(), x_TD.device(), rows_each);
    if (group_->size() == 1) {
      Dispatched dispatched{x_ND, plan->arrival.rows_per_expert, {}, plan};
      return Pending<Dispatched>([dispatched] { return dispatched; });
    }
    const StartedExchange rows = all_to_all_start(x_ND, *group_, plan->send_rows, plan->arrival.recv_rows);
    return Pending<Dispatched>([rows, plan] {
      const Tensor x = in_order(all_to_all_wait(rows), plan->arrival);
      return Dispatched{x, plan->arrival.rows_per_expert, plan->arrival.rows_per_source, plan};
    });
  }

  Pending<Tensor> combine(const Tensor& y_RD, const Tensor& weights_TK,
                          const std::shared_ptr<const DispatchPlan>& plan) override {
    const auto& p = plan_of<AllToAllPlan>(plan, "all_to_all");
    const Tensor y = as_arrived(y_RD, p.arrival);
    auto finish = [weights_TK, plan](const Tensor& y_ND) {
      return combine_sorted(y_ND, weights_TK, plan_of<AllToAllPlan>(plan, "all_to_all").sorted);
    };
    if (group_->size() == 1) return Pending<Tensor>([y, finish] { return finish(y); });
    const StartedExchange rows = all_to_all_start(y, *group_, p.arrival.recv_rows, p.send_rows);
    return Pending<Tensor>([rows, finish] { return finish(all_to_all_wait(rows)); });
  }

  std::unique_ptr<DispatchedParts> dispatch_parts(const Tensor& x_TD, const Tensor& expert_ids_TK,
                                                  int64_t rows_each) override {
    if (num_parts_ == 1) return nullptr;
    const Device device = x_TD.device();
    SortedAssignments sorted;
    Counts counts = sort(expert_ids_TK, rows_each, place_on(device), sorted);
    const Tensor x_ND = gather_rows(x_TD, sorted.row_N, sorted.slots_TK);
    const std::span<const int64_t> arriving = counts.wait();
    std::vector<AllToAllParts::Part> parts;
    std::vector<PartRows> rows;
    for (int64_t part = 0; part < num_parts_; part++) {
      const ShardRange own = part_of(num_local(), part);
      std::vector<int64_t> of_part;  // by source, then expert
      for (int64_t source = 0; source < group_->size(); source++) {
        const auto from = arriving.begin() + source * num_local();
        of_part.insert(of_part.end(), from + own.begin, from + own.end);
      }
      parts.push_back({own, arrival_of(part, of_part, own.end - own.begin, device, rows_each)});
      rows.push_back({sent_rows(sorted.counts_E, part), parts.back().arrival.recv_rows});
    }
    auto result = std::make_unique<AllToAllParts>(std::move(sorted), std::move(parts), num_local());
    result->start(x_ND, std::make_shared<PartedExchange>(*group_, std::move(rows)));
    return result;
  }

  void count(const RoutedRows& rows, PassHalf half) const override {
    TrafficCounter& traffic = group_->traffic();
    const auto me = static_cast<size_t>(group_->rank());
    if (half == PassHalf::forward) traffic.all_to_all(experts_per_rank_, dtype_size(DType::i64));
    for (int64_t part = 0; part < num_parts_; part++) {
      std::vector<int64_t> back;
      for (const std::vector<int64_t>& counts_E : rows.counts_RE)
        back.push_back(sent_rows(counts_E, part)[me]);
      traffic.all_to_all(sent_rows(rows.counts_RE[me], part), rows.row_bytes);  // or gradients of the results
      traffic.all_to_all(back, rows.row_bytes);
    }
  }
  int64_t num_parts() const override { return num_parts_; }

 private:
  /// The counts that travel while rows are being put in order.
  struct Counts {
    Tensor sent, arriving;  // of the host
    Work work;
    std::span<const int64_t> wait() {
      work.wait();
      return {arriving.data<int64_t>(), static_cast<size_t>(arriving.numel())};
    }
  };

  int64_t num_local() const { return experts_per_rank_[static_cast<size_t>(group_->rank())]; }
  ShardRange experts_of(int rank) const { return shard_range(num_experts_, {rank, group_->size()}); }
  /// Of the local experts of a rank.
  ShardRange part_of(int64_t num_experts, int64_t part) const {
    return shard_range(num_experts, {static_cast<int>(part), static_cast<int>(num_parts_)});
  }

  /// Starts the exchange of the sorted assignments' counts.
  Counts sort(const Tensor& expert_ids_TK, int64_t rows_each, const Tensor& place_E,
              SortedAssignments& sorted) {
    if (rows_each != kAsNeeded) {
      sorted = sort_padded(expert_ids_TK, num_experts_, rows_each, place_E);
    } else if (group_->queues(expert_ids_TK.device())) {
      return sort_on_device(expert_ids_TK, place_E, sorted);
    } else {
      sorted = sort_assignments(expert_ids_TK, num_experts_, place_E);
    }
    return send_counts(Tensor::from(sorted.counts_E, {num_experts_}),
                       Tensor::empty({num_arriving()}, DType::i64));
  }
  /// The counts travel between the devices, and the host reads its own and those of others at once.
  Counts sort_on_device(const Tensor& expert_ids_TK, const Tensor& place_E, SortedAssignments& sorted) {
    const int64_t own = num_experts_, all = own + num_arriving();
    const Tensor counts = Tensor::empty({all}, DType::i64, expert_ids_TK.device());
    const SortAssignments started = start_sort(expert_ids_TK, counts.rows(0, own), place_E);
    send_counts(counts.rows(0, own), counts.rows(own, all)).work.wait();
    const Tensor on_host = counts.to({});
    const int64_t* first = on_host.data<int64_t>();
    sorted = finish_sort(started, {first, first + own});
    return {{}, on_host.rows(own, all), {}};
  }
  Counts send_counts(const Tensor& sent, const Tensor& arriving) {
    const std::vector<int64_t> from_each(static_cast<size_t>(group_->size()), num_local());
    return {sent, arriving, group_->all_to_all(sent, arriving, experts_per_rank_, from_each)};
  }
  int64_t num_arriving() const { return group_->size() * num_local(); }
  /// Rows for the experts of a part, of each rank.
  std::vector<int64_t> sent_rows(std::span<const int64_t> counts_E, int64_t part) const {
    std::vector<int64_t> rows;
    for (int r = 0; r < group_->size(); r++) {
      const ShardRange experts = part_of(experts_per_rank_[static_cast<size_t>(r)], part);
      const auto first = counts_E.begin() + experts_of(r).begin;
      rows.push_back(std::accumulate(first + experts.begin, first + experts.end, int64_t{0}));
    }
    return rows;
  }
  /// Padded counts are mostly those of the dispatch before, and so is the order.
  ArrivalOrder arrival_of(int64_t part, std::span<const int64_t> counts, int64_t num_experts, Device device,
                          int64_t rows_each) {
    if (rows_each == kAsNeeded) return order_arrivals(counts, group_->size(), num_experts, device);
    known_.resize(static_cast<size_t>(num_parts_));
    KnownOrder& known = known_[static_cast<size_t>(part)];
    if (!std::ranges::equal(known.counts, counts) || known.device != device)
      known = {{counts.begin(), counts.end()},
               device,
               order_arrivals(counts, group_->size(), num_experts, device)};
    return known.arrival;
  }
  /// The place of each expert when they are ordered by part, then rank.
  const Tensor& place_on(Device device) {
    if (place_E_.defined() && place_E_.device() == device) return place_E_;
    std::vector<int32_t> place(static_cast<size_t>(num_experts_));
    int32_t next = 0;
    for (int64_t part = 0; part < num_parts_; part++) {
      for (int r = 0; r < group_->size(); r++) {
        const ShardRange experts = part_of(experts_per_rank_[static_cast<size_t>(r)], part);
        for (int64_t e = experts.begin; e < experts.end; e++)
          place[static_cast<size_t>(experts_of(r).begin + e)] = next++;
      }
    }
    place_E_ = Tensor::from(place, {num_experts_}, device);
    return place_E_;
  }

  struct KnownOrder {
    std::vector<int64_t> counts;
    Device device;
    ArrivalOrder arrival;
  };
  Communicator* group_;
  int64_t num_experts_, num_parts_ = 1;
  std::vector<int64_t> experts_per_rank_;
  std::vector<KnownOrder> known_;  // of each part
  Tensor place_E_;
};

const bool registered = DispatcherRegistry::add<AllToAllOptions>(
    "all_to_all", "each row goes only to the rank of its expert (variable counts)",
    [](const AllToAllOptions& options, const DispatcherContext& context) {
      return std::make_unique<AllToAllDispatcher>(options, context);
    });

}  // namespace

}  // namespace shoal
