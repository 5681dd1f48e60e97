// What dispatchers send to other ranks, by the kind of link.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shoal {

/// Bytes of token rows that a rank has sent to others in dispatch and combine (ids and counts not included);
/// backward sends as many again.
struct DispatchTraffic {
  int64_t within_node = 0, between_nodes = 0;
  DispatchTraffic& operator+=(const DispatchTraffic& other) {
    within_node += other.within_node;
    between_nodes += other.between_nodes;
    return *this;
  }
};

class TrafficMeter {
 public:
  TrafficMeter() = default;
  /// nodes: that of each rank of the group; empty: all on one.
  TrafficMeter(std::vector<int> nodes, int rank) : nodes_(std::move(nodes)), rank_(rank) {}
  /// Rows to each rank of the group; those to the own rank do not count.
  void sent(std::span<const int64_t> rows, int64_t row_bytes) {
    for (size_t r = 0; r < rows.size(); r++) {
      if (static_cast<int>(r) == rank_) continue;
      const bool near = nodes_.empty() || nodes_[r] == nodes_[static_cast<size_t>(rank_)];
      (near ? total_.within_node : total_.between_nodes) += rows[r] * row_bytes;
    }
  }
  const DispatchTraffic& total() const { return total_; }

 private:
  std::vector<int> nodes_;
  int rank_ = 0;
  DispatchTraffic total_;
};

}  // namespace shoal
