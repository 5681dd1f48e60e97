// A routing that nobody computes, for the prediction of what dispatchers send: choice k of a rank's token t
// is expert (t + k floor(E / K)) mod E, so that experts get numbers of rows that differ by at most K, and the
// choices of a token are as far apart as they can be.
#pragma once

#include <cstdint>
#include <vector>

namespace shoal {

struct BalancedRouting {
  int64_t num_experts = 1, top_k = 1;
  int64_t expert(int64_t token, int64_t choice) const;
  /// Assignments of each expert by `tokens` tokens.
  std::vector<int64_t> counts(int64_t tokens) const;
  /// Tokens with a choice in each range [first_expert[i], first_expert[i + 1]).
  std::vector<int64_t> tokens_in_ranges(int64_t tokens, const std::vector<int64_t>& first_expert) const;
};

/// What the ranks of an ep group dispatch, all of which each can tell.
struct RoutedRows {
  BalancedRouting routing;
  int64_t ids = 0;                          // per token: top_k, or more where a router names more
  int64_t row_bytes = 0, weight_bytes = 0;  // of a token's row, of a gate weight
  bool weights_have_gradients = true;
  std::vector<int64_t> tokens_R;                // of each rank
  std::vector<std::vector<int64_t>> counts_RE;  // rows that each rank has for each expert
};

}  // namespace shoal
