// StreamChoice: whether bytes for another core are stored past the caches (core/ops/reduce.h). Which way is
// faster depends on where the cores lie, which a virtual machine may change at any time: past the caches
// costs up to twice as much, a line that the other core must give up first up to ten times as much. So
// ordinary stores are timed, and given up for a while when they are slow.
#pragma once

#include <chrono>
#include <cstdint>

namespace shoal {

class StreamChoice {
 public:
  bool streams() const { return streamed_left_ > 0; }
  /// `bytes` have been stored for others in `time`, in the way that streams() said.
  void note(int64_t bytes, std::chrono::nanoseconds time) {
    if (bytes < kMeasurableBytes) return;
    if (streamed_left_ > 0) {
      streamed_left_--;
      return;
    }
    // One slow copy may have been interrupted.
    num_slow_ =
        static_cast<double>(bytes) < kSlowRate * static_cast<double>(time.count()) ? num_slow_ + 1 : 0;
    if (num_slow_ < kSlowCopies) return;
    num_slow_ = 0;
    streamed_left_ = kStreamedCopies;
  }

  static constexpr int64_t kMeasurableBytes = 8192;
  static constexpr double kSlowRate = 5;  // bytes per ns
  static constexpr int kSlowCopies = 3, kStreamedCopies = 500;

 private:
  int num_slow_ = 0, streamed_left_ = 0;
};

}  // namespace shoal
