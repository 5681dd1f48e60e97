// WeightGather: where replicas of weights update a piece each (parallel.zero), has the values of a unit
// gathered when the model uses it. Values that every replica keeps are gathered once after each update, while
// the next forward runs; values that are divided too are gathered for each use, one unit ahead, and dropped
// behind it. The engine is its only user.
#pragma once

#include <array>
#include <vector>

#include "core/nn/weight_unit.h"
#include "parallel/flat_bucket.h"

namespace shoal {

class WeightGather {
 public:
  /// Installs the hooks of the held units, which are in the order of their first use in forward; both must
  /// outlive it.
  WeightGather(const std::vector<WeightUnit*>& units, std::vector<FlatBucket*> buckets);
  ~WeightGather();
  WeightGather(const WeightGather&) = delete;
  WeightGather& operator=(const WeightGather&) = delete;

  /// Before values are read or written outside of the units: waits for all that is under way, and drops
  /// divided values that were gathered ahead. Throws Error when a unit is in use.
  void settle();
  /// After an update: starts to gather the values that every replica keeps, in the order of forward.
  /// Collective.
  void start_updated();

 private:
  using Direction = WeightUnit::Direction;
  struct Entry {
    FlatBucket* bucket;
    int uses = 0;              // of units, that have begun and not ended
    bool is_gathered = false;  // or under way
    bool is_under_way = false;
  };
  struct Unit {
    WeightUnit* unit;
    std::vector<size_t> entries;
    // The next one in each direction, on the same pipeline stage, whose values are divided; -1: none.
    std::array<int, 2> next = {-1, -1};
  };
  void find_next();
  void begin(size_t unit, Direction direction);
  void end(size_t unit);
  void start(Entry& entry);
  void complete(Entry& entry);

  std::vector<Entry> entries_;  // in the order of the buckets, that of backward
  std::vector<Unit> units_;     // held ones
};

}  // namespace shoal
