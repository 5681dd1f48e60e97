#include "parallel/traffic.h"

#include <algorithm>
#include <utility>

namespace shoal {

namespace {

LinkBytes& operator+=(LinkBytes& sum, const LinkBytes& more) {
  sum.within_node += more.within_node;
  sum.between_nodes += more.between_nodes;
  return sum;
}

}  // namespace

CallTraffic GroupTraffic::total() const {
  CallTraffic sum;
  for (const CallTraffic& kind : kinds) {
    sum.calls += kind.calls;
    sum.sent += kind.sent;
  }
  return sum;
}

Traffic operator-(const Traffic& after, const Traffic& before) {
  Traffic difference;
  for (const auto& [name, group] : after) {
    GroupTraffic rest = group;
    if (const auto old = before.find(name); old != before.end()) {
      for (size_t k = 0; k < kNumCountedKinds; k++) {
        rest.kinds[k].calls -= old->second.kinds[k].calls;
        rest.kinds[k].sent.within_node -= old->second.kinds[k].sent.within_node;
        rest.kinds[k].sent.between_nodes -= old->second.kinds[k].sent.between_nodes;
      }
    }
    if (rest.total().calls > 0) difference.emplace(name, rest);
  }
  return difference;
}

Traffic& operator+=(Traffic& sum, const Traffic& more) {
  for (const auto& [name, group] : more) {
    GroupTraffic& mine = sum[name];
    for (size_t k = 0; k < kNumCountedKinds; k++) {
      mine.kinds[k].calls += group.kinds[k].calls;
      mine.kinds[k].sent += group.kinds[k].sent;
    }
  }
  return sum;
}

Traffic operator*(Traffic traffic, int64_t times) {
  for (auto& [name, group] : traffic) {
    for (CallTraffic& kind : group.kinds)
      kind = {kind.calls * times, {kind.sent.within_node * times, kind.sent.between_nodes * times}};
  }
  return traffic;
}

LinkBytes bytes_sent(const Traffic& traffic) {
  LinkBytes sum;
  for (const auto& [name, group] : traffic) sum += group.total().sent;
  return sum;
}

int regular_node_size(const std::vector<int>& nodes, int num_ranks) {
  if (nodes.empty()) return num_ranks;
  const auto each = std::ranges::count(nodes, nodes.front());
  if (num_ranks % each != 0) return 0;
  for (int r = 0; r < num_ranks; r++) {
    const int node = nodes[static_cast<size_t>(r)];
    if (node != nodes[static_cast<size_t>(r - r % each)] || std::ranges::count(nodes, node) != each) return 0;
  }
  return static_cast<int>(each);
}

TrafficCounter::TrafficCounter(int rank, int size, std::string name)
    : rank_(rank), size_(size), name_(std::move(name)) {}

bool TrafficCounter::is_near(int rank) const {
  return nodes_.empty() || nodes_[static_cast<size_t>(rank)] == nodes_[static_cast<size_t>(rank_)];
}

GroupTraffic& TrafficCounter::row() {
  if (row_ == nullptr) row_ = &(*ledger_)[name_];  // a map's entries stay where they are
  return *row_;
}

void TrafficCounter::add(CollectiveKind kind, int64_t bytes) {
  if (size_ == 1) return;
  CallTraffic& call = row()[kind];
  call.calls++;
  (is_near((rank_ + 1) % size_) ? call.sent.within_node : call.sent.between_nodes) += bytes;
}

void TrafficCounter::all_reduce(int64_t bytes) {
  add(CollectiveKind::all_reduce, 2 * bytes * (size_ - 1) / size_);
}

void TrafficCounter::all_gather(int64_t part_bytes) {
  add(CollectiveKind::all_gather, part_bytes * (size_ - 1));
}

void TrafficCounter::reduce_scatter(int64_t part_bytes) {
  add(CollectiveKind::reduce_scatter, part_bytes * (size_ - 1));
}

void TrafficCounter::broadcast(int64_t bytes, int root) {
  add(CollectiveKind::broadcast, (rank_ + 1) % size_ == root ? 0 : bytes);
}

void TrafficCounter::all_to_all(std::span<const int64_t> send_rows, int64_t row_bytes) {
  if (size_ == 1) return;
  CallTraffic& call = row()[CollectiveKind::all_to_all];
  call.calls++;
  for (int r = 0; r < size_; r++) {
    if (r == rank_) continue;
    (is_near(r) ? call.sent.within_node : call.sent.between_nodes) +=
        send_rows[static_cast<size_t>(r)] * row_bytes;
  }
}

void TrafficCounter::join(const TrafficCounter& parent, const std::vector<int>& members) {
  ledger_ = parent.ledger_;
  row_ = nullptr;
  nodes_.clear();
  if (parent.nodes_.empty()) return;
  for (const int member : members) nodes_.push_back(parent.nodes_[static_cast<size_t>(member)]);
}

}  // namespace shoal
