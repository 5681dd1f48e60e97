// MemoryPool: the free device memory of one stream, cut from segments: best fit, neighbours merged. Only
// bookkeeping: memory is neither touched nor obtained here. Not thread-safe. Used by runtime.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace shoal::cuda {

class MemoryPool {
 public:
  /// Memory from the device, as a whole.
  struct Segment {
    char* data = nullptr;
    int64_t bytes = 0;
    int64_t used = 0;           // bytes of it that are not free
    uint64_t last_release = 0;  // num_releases() when the latest part was given back
  };

  /// Memory of that many bytes; null when no piece is large enough.
  char* take(int64_t bytes);
  /// Memory that take() returned for that many bytes.
  void give_back(char* data, int64_t bytes);
  void add(const Segment& segment);
  /// Removes and returns the segments no part of which is used and whose last_release is at most
  /// `up_to_release`.
  std::vector<Segment> take_unused(uint64_t up_to_release);
  bool has_unused() const;
  uint64_t num_releases() const { return num_releases_; }
  int64_t free_bytes() const { return free_bytes_; }

 private:
  Segment& segment_of(char* data);
  void add_free(char* data, int64_t bytes);
  void remove_free(char* data, int64_t bytes);

  std::map<char*, Segment> segments_;
  std::map<char*, int64_t> by_address_;
  std::set<std::pair<int64_t, char*>> by_size_;
  uint64_t num_releases_ = 0;
  int64_t free_bytes_ = 0;
};

}  // namespace shoal::cuda
