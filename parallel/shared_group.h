// SharedGroup: the calls of one group of ranks over a SharedSegment. Every call is cut into chunks, numbered
// through the life of the group; chunk c uses slot c mod num_slots of each rank's part. A rank takes each
// chunk through three stages and tells the others how many it has taken through each:
//   written  what others need of this rank is in its slot
//   reduced  this rank's piece of the sum is in its slot (large all_reduce only)
//   read     this rank has what it needs of the others' slots, which may be used again
// Nothing blocks: a stage that others are not ready for is tried again at the next look. Used by
// SharedCommunicator alone, from one thread per rank.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/collective_call.h"
#include "parallel/open_calls.h"
#include "parallel/shared_segment.h"
#include "parallel/stream_choice.h"

namespace shoal {

inline constexpr int64_t kLine = 64;  // bytes; what one rank writes starts on a line of its own

/// Equal on all ranks of a group when it is made; tests lower them to reach every path with small tensors.
struct SharedLimits {
  int64_t slot_bytes = int64_t{128} << 10;         // a chunk of one rank; a multiple of 64
  int64_t num_slots = 8;                           // chunks under way; at least 2
  int64_t group_bytes = int64_t{64} << 20;         // slots are made smaller in groups that would need more
  int64_t small_reduce_bytes = int64_t{32} << 10;  // size() * bytes up to which everyone sums everything
  int64_t single_copy_bytes = int64_t{64} << 10;   // from here on parts come from the other's own memory
  bool single_copy = true;                         // where the system permits it
};
SharedLimits& shared_limits();

struct SharedGroupFacts {
  int rank = 0, size = 1;
  std::string name;
  std::vector<int> world_ranks;
  std::vector<PeerMemory> peers;
  SharedLimits limits;  // single_copy: the peers can be read
};

struct SharedCall;
struct SharedHeader;

class SharedGroup final : public OpenCalls {
 public:
  /// Makes slot_bytes fit a group of this size, and returns what each rank's part of the segment must have.
  static int64_t plan_part(int size, SharedLimits& limits);
  /// The segment is zero.
  SharedGroup(SharedGroupFacts facts, std::shared_ptr<SharedSegment> segment);
  ~SharedGroup() override;

  /// Calls start in the same order on all ranks. The group must outlive the call.
  std::shared_ptr<AwaitedCall> start(CollectiveCall call);
  void progress() override;
  size_t num_open() const override { return calls_.size(); }
  uint64_t num_calls() const { return num_calls_; }
  /// "call [world, rank 0 of 2]"
  std::string where(const std::string& call) const;
  /// Ranks for which the first unfinished call waits.
  std::string missing() const;
  /// From now on an all_reduce of any part of this rank's part of `memory` is done in place, and so are a
  /// reduce_scatter from such a part and an all_gather into one that holds its own input; all ranks then pass
  /// the same part. Collective.
  void add_region(const std::shared_ptr<SharedSegment>& memory) { regions_.push_back(memory); }

 private:
  struct alignas(64) Counters {
    std::array<std::atomic<uint64_t>, 3> chunks;
  };
  enum Stage : size_t { kWritten, kReduced, kRead };

  bool write_next();
  bool reduce_next();
  bool read_next();
  bool finish_next();
  bool all_past(Stage stage, uint64_t chunk);
  void publish(Stage stage);
  void check_headers(SharedCall& call) const;

  void plan(SharedCall& call) const;
  void plan_exchange(SharedCall& call) const;
  bool find_region(SharedCall& call) const;
  // The bytes of one chunk of a call (shared_transfer.cpp).
  void write(const SharedCall& call, uint64_t chunk);
  void reduce(const SharedCall& call, uint64_t chunk);
  void reduce_in_place(const SharedCall& call);
  void give(std::byte* to, const std::byte* from, int64_t bytes);
  void sum_for_others(const SharedCall& call, std::span<const std::byte* const> parts,
                      std::span<std::byte* const> outs, size_t num_for_others, int64_t bytes);
  void scatter_in_place(const SharedCall& call) const;
  void read(const SharedCall& call, uint64_t chunk) const;
  void read_sum(const SharedCall& call, uint64_t chunk) const;
  void read_parts(const SharedCall& call, uint64_t chunk) const;
  void read_exchange(const SharedCall& call, uint64_t chunk) const;
  void read_peer(const SharedCall& call, int from, std::byte* to, const std::byte* data, int64_t bytes) const;

  SharedHeader& header(int rank, uint64_t chunk) const;
  int64_t* sent_rows(int rank, uint64_t chunk) const;  // one per rank
  std::byte* slot(int rank, uint64_t chunk) const;
  int64_t pair_bytes() const;

  SharedGroupFacts facts_;
  std::shared_ptr<SharedSegment> segment_;
  std::vector<std::weak_ptr<SharedSegment>> regions_;
  std::vector<Counters*> counters_;                // per rank
  std::array<uint64_t, 3> next_{};                 // the chunk that this rank takes through each stage next
  std::array<uint64_t, 3> seen_{};                 // chunks that all ranks had behind them, as last seen
  std::array<size_t, 3> at_{};                     // the call of that chunk: position in calls_
  std::deque<std::shared_ptr<SharedCall>> calls_;  // not finished, in order
  uint64_t num_calls_ = 0;
  StreamChoice copies_, sums_;
};

}  // namespace shoal
