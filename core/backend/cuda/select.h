// The largest of many values, one after the other, by the lanes of a warp: value descending, then index
// ascending; NaN counts as the lowest value. For kernels.
#pragma once

#include "core/backend/cuda/block.h"

namespace shoal::cuda {

inline constexpr int32_t kNoCandidate = INT32_MAX;

template <class T>
struct Candidate {
  T value = -static_cast<T>(INFINITY);
  int32_t id = kNoCandidate;
};
/// NaN becomes -infinity.
template <class T>
SHOAL_DEVICE Candidate<T> candidate(T value, int64_t id) {
  return {value == value ? value : -static_cast<T>(INFINITY), static_cast<int32_t>(id)};
}
/// Whether a is selected before b.
template <class T>
SHOAL_DEVICE bool is_before(const Candidate<T>& a, const Candidate<T>& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

/// at(i) for i in [begin, end) is a Candidate with id i, or an empty one. Lane l looks at begin + l, begin +
/// l + 32,
/// ..., whose values must not change meanwhile.
template <class T, class At>
class Selection {
 public:
  SHOAL_DEVICE Selection(const At& at, int64_t begin, int64_t end) : at_(at), begin_(begin), end_(end) {
    mine_ = best_after({static_cast<T>(INFINITY), -1});
  }

  /// The next one, in every lane; empty when there is none.
  SHOAL_DEVICE Candidate<T> next() {
    Candidate<T> best = mine_;
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const Candidate<T> other{__shfl_xor_sync(kAllLanes, best.value, offset),
                               __shfl_xor_sync(kAllLanes, best.id, offset)};
      if (is_before(other, best)) best = other;
    }
    if (mine_.id == best.id) mine_ = best_after(best);
    return best;
  }

 private:
  /// This lane's best of those that come after `last`.
  SHOAL_DEVICE Candidate<T> best_after(const Candidate<T>& last) const {
    Candidate<T> best;
    for (int64_t i = begin_ + threadIdx.x % kWarp; i < end_; i += kWarp) {
      const Candidate<T> c = at_(i);
      if (is_before(last, c) && is_before(c, best)) best = c;
    }
    return best;
  }

  const At& at_;
  int64_t begin_, end_;
  Candidate<T> mine_;
};

}  // namespace shoal::cuda
