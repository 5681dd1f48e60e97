#include "data/blend.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/base/error.h"

namespace shoal {

namespace {

constexpr int64_t kMaxExactPeriod = int64_t{1} << 16, kRoundedPeriod = int64_t{1} << 20;

// Normalised weights; UsageError for unusable ones.
std::vector<double> normalised(const std::vector<double>& weights) {
  if (weights.size() > 65535)
    throw UsageError(str("blend: expected at most 65535 sources, got ", weights.size()));
  double sum = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    if (!(weights[i] >= 0) || !std::isfinite(weights[i])) {
      throw UsageError(str("blend: expected weights >= 0, got ", weights[i], " for source ", i));
    }
    sum += weights[i];
  }
  if (!(sum > 0) || !std::isfinite(sum)) {
    throw UsageError(str("blend: expected at least one positive weight among ", weights.size(),
                         " sources, got sum ", sum));
  }
  std::vector<double> shares(weights);
  for (auto& share : shares) share /= sum;
  return shares;
}

// The smallest Q <= kMaxExactPeriod for which every share is p / Q, or kRoundedPeriod.
int64_t find_period(const std::vector<double>& shares) {
  for (int64_t q = 1; q <= kMaxExactPeriod; q++) {
    const auto exact = [q](double share) {
      const double p = share * static_cast<double>(q);
      return std::abs(p - std::round(p)) < 1e-9;
    };
    if (std::all_of(shares.begin(), shares.end(), exact)) return q;
  }
  return kRoundedPeriod;
}

// p_i by largest remainder, so that they sum to `period`. A positive weight gets at least 1.
std::vector<int64_t> apportion(const std::vector<double>& shares, int64_t period) {
  std::vector<int64_t> counts(shares.size());
  std::vector<double> surplus(shares.size());
  for (size_t i = 0; i < shares.size(); i++) {
    const double wanted = shares[i] * static_cast<double>(period);
    counts[i] = std::max<int64_t>(std::llround(wanted), shares[i] > 0 ? 1 : 0);
    surplus[i] = static_cast<double>(counts[i]) - wanted;
  }
  int64_t missing = period - std::accumulate(counts.begin(), counts.end(), int64_t{0});
  while (missing != 0) {
    const int64_t step = missing > 0 ? 1 : -1;
    size_t best = shares.size();
    for (size_t i = 0; i < shares.size(); i++) {
      if (shares[i] == 0 || (step < 0 && counts[i] == 1)) continue;
      if (best == shares.size() ||
          static_cast<double>(step) * surplus[i] < static_cast<double>(step) * surplus[best]) {
        best = i;
      }
    }
    counts[best] += step;
    surplus[best] += static_cast<double>(step);
    missing -= step;
  }
  return counts;
}

}  // namespace

Blend::Blend(const std::vector<double>& weights) {
  const auto shares = normalised(weights);
  period_ = find_period(shares);
  per_period_ = apportion(shares, period_);
  if (period_ == 1) return;
  stream_at_.resize(static_cast<size_t>(period_));
  sample_at_.resize(static_cast<size_t>(period_));
  std::vector<int64_t> taken(weights.size());
  for (int64_t n = 0; n < period_; n++) {
    // Deficits times Q, in integers.
    size_t best = weights.size();
    int64_t best_deficit = 0;
    for (size_t i = 0; i < weights.size(); i++) {
      if (per_period_[i] == 0) continue;
      const int64_t deficit = per_period_[i] * std::max<int64_t>(n, 1) - taken[i] * period_;
      if (best == weights.size() || deficit > best_deficit) {
        best = i;
        best_deficit = deficit;
      }
    }
    stream_at_[static_cast<size_t>(n)] = static_cast<uint16_t>(best);
    sample_at_[static_cast<size_t>(n)] = static_cast<int32_t>(taken[best]++);
  }
  SHOAL_CHECK(taken == per_period_, "blend: counts after one period differ from the weights");
}

Blend::Pick Blend::at(int64_t n) const {
  SHOAL_CHECK(n >= 0, "blend: expected a sample index >= 0, got ", n);
  if (period_ == 1) {
    const auto only = std::find(per_period_.begin(), per_period_.end(), 1);
    return {only - per_period_.begin(), n};
  }
  const auto step = static_cast<size_t>(n % period_);
  const size_t stream = stream_at_[step];
  return {static_cast<int64_t>(stream), n / period_ * per_period_[stream] + sample_at_[step]};
}

int64_t Blend::taken(int64_t stream, int64_t n) const {
  const auto s = static_cast<size_t>(stream);
  if (period_ == 1) return n * per_period_[s];
  // The first pick of the stream at or after n within the period tells its count.
  for (auto step = static_cast<size_t>(n % period_); step < stream_at_.size(); step++) {
    if (stream_at_[step] == s) return n / period_ * per_period_[s] + sample_at_[step];
  }
  return (n / period_ + 1) * per_period_[s];
}

}  // namespace shoal
