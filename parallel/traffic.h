// Traffic: what a rank sends in collective calls, by group and kind of call, links inside a node apart from
// those between nodes. Each communicator has a counter; those made by Communicator::split_by write to one
// ledger, so that the counter of the world has all. Sizes alone decide what is counted, so `shoal layout`
// counts calls that nobody makes with the same functions.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace shoal {

enum class CollectiveKind : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
  barrier,
  split
};
inline constexpr size_t kNumCountedKinds = 5;      // the last two carry no tensors
const char* collective_name(CollectiveKind kind);  // "all_reduce"

/// Which half of a training pass.
enum class PassHalf : uint8_t { forward, backward };

struct LinkBytes {
  int64_t within_node = 0, between_nodes = 0;
  int64_t total() const { return within_node + between_nodes; }
  bool operator==(const LinkBytes&) const = default;
};

struct CallTraffic {
  int64_t calls = 0;
  LinkBytes sent;
  bool operator==(const CallTraffic&) const = default;
};

/// Of groups with one name.
struct GroupTraffic {
  std::array<CallTraffic, kNumCountedKinds> kinds{};
  CallTraffic& operator[](CollectiveKind kind) { return kinds[static_cast<size_t>(kind)]; }
  const CallTraffic& operator[](CollectiveKind kind) const { return kinds[static_cast<size_t>(kind)]; }
  CallTraffic total() const;
  bool operator==(const GroupTraffic&) const = default;
};

/// By the name of the group: "tp", "dp", "replicas", ... Groups of one rank send nothing and are not in it.
using Traffic = std::map<std::string, GroupTraffic>;
/// What was counted since `before`; groups without calls are left out.
Traffic operator-(const Traffic& after, const Traffic& before);
Traffic& operator+=(Traffic& sum, const Traffic& more);
Traffic operator*(Traffic traffic, int64_t times);
LinkBytes bytes_sent(const Traffic& traffic);

/// How many ranks of a group each node has, when they lie node by node and as many on each; else 0. No nodes:
/// all are on one.
int regular_node_size(const std::vector<int>& nodes, int num_ranks);

/// Counts what this rank of a group of g sends. Reductions and gathers are counted as rings, whatever carries
/// them: a rank sends to its neighbour (rank + 1) mod g, whose node decides the kind of link; all_to_all goes
/// straight to each rank.
class TrafficCounter {
 public:
  TrafficCounter(int rank, int size, std::string name);

  /// n bytes on each rank: 2 n (g - 1) / g, rounded down.
  void all_reduce(int64_t bytes);
  /// Parts of n bytes: n (g - 1).
  void all_gather(int64_t part_bytes);
  /// Results of n bytes: n (g - 1).
  void reduce_scatter(int64_t part_bytes);
  /// Rows for each rank: the bytes of those for other ranks.
  void all_to_all(std::span<const int64_t> send_rows, int64_t row_bytes);
  /// n bytes that go from rank to rank: n, and 0 on the rank in front of the root. A gather of unequal parts
  /// is a broadcast of each, so a ring.
  void broadcast(int64_t bytes, int root);

  /// The node of each rank; empty: all are on one.
  const std::vector<int>& nodes() const { return nodes_; }
  void set_nodes(std::vector<int> nodes) { nodes_ = std::move(nodes); }
  /// Counts into the ledger of `parent` from here on; `members`: the ranks of the parent that this group has.
  void join(const TrafficCounter& parent, const std::vector<int>& members);
  /// Everything in the ledger, by any group.
  const Traffic& ledger() const { return *ledger_; }

 private:
  void add(CollectiveKind kind, int64_t bytes);
  bool is_near(int rank) const;
  GroupTraffic& row();

  int rank_, size_;
  std::string name_;
  std::vector<int> nodes_;
  std::shared_ptr<Traffic> ledger_ = std::make_shared<Traffic>();
  GroupTraffic* row_ = nullptr;  // in the ledger, from the first call on
};

}  // namespace shoal
