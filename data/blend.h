// Blend: which stream global sample n is taken from, and how many samples of that stream came before it.
#pragma once

#include <cstdint>
#include <vector>

namespace shoal {

/// Megatron's greedy rule: step n takes the stream i with the largest w_i * max(n, 1) - taken_i, the first
/// one on ties. The weights are first written as p_i / Q with integers p_i that sum to Q (exactly where Q <=
/// 2^16 does it, else rounded with Q = 2^20), because then after Q steps exactly p_i samples of stream i were
/// taken (before each step the largest deficit is >= 0, so every deficit stays above -1; at step Q deficits
/// are integers that sum to 0, so all are 0). The sequence is defined to repeat with period Q, which makes
/// every n computable in O(1).
class Blend {
 public:
  struct Pick {
    int64_t stream;  // index into the weights
    int64_t sample;  // samples taken from that stream before this one
  };
  /// UsageError when a weight is negative or not finite, or when none is positive.
  explicit Blend(const std::vector<double>& weights);

  Pick at(int64_t n) const;
  /// Samples of stream i among global samples [0, n).
  int64_t taken(int64_t stream, int64_t n) const;
  int64_t period() const { return period_; }

 private:
  int64_t period_ = 1;               // Q
  std::vector<int64_t> per_period_;  // p_i
  std::vector<uint16_t> stream_at_;  // [Q]; empty with a single stream
  std::vector<int32_t> sample_at_;   // [Q]: samples of that stream before this step of the period
};

}  // namespace shoal
