#include "parallel/moe/balanced_routing.h"

#include <algorithm>

namespace shoal {

namespace {

int64_t distance(int64_t num_experts, int64_t top_k) {
  return std::max<int64_t>(1, num_experts / top_k);
}

}  // namespace

int64_t BalancedRouting::expert(int64_t token, int64_t choice) const {
  return (token + choice * distance(num_experts, top_k)) % num_experts;
}

std::vector<int64_t> BalancedRouting::counts(int64_t tokens) const {
  std::vector<int64_t> counts(static_cast<size_t>(num_experts), tokens / num_experts * top_k);
  for (int64_t t = 0; t < tokens % num_experts; t++)
    for (int64_t k = 0; k < top_k; k++) counts[static_cast<size_t>(expert(t, k))]++;
  return counts;
}

std::vector<int64_t> BalancedRouting::tokens_in_ranges(int64_t tokens,
                                                       const std::vector<int64_t>& first_expert) const {
  std::vector<int64_t> rows(first_expert.size() - 1, 0);
  // Tokens E apart choose alike.
  for (int64_t t = 0; t < std::min(tokens, num_experts); t++) {
    const int64_t alike = tokens / num_experts + (t < tokens % num_experts ? 1 : 0);
    std::vector<bool> seen(rows.size(), false);
    for (int64_t k = 0; k < top_k; k++) {
      const auto next = std::ranges::upper_bound(first_expert, expert(t, k));
      const auto range = static_cast<size_t>(next - first_expert.begin()) - 1;
      if (!seen[range]) rows[range] += alike;
      seen[range] = true;
    }
  }
  return rows;
}

}  // namespace shoal
