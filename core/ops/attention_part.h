// Attention of some queries of each sequence to some of its keys: what a rank of a context parallel group
// computes (parallel/context_attention.h). Results over different keys of the same queries are merged by
// their log-sum-exp (Dao, arXiv:2307.08691, section 2.3; Liu et al., arXiv:2310.01889).
#pragma once

#include <array>
#include <cstdint>

#include "core/ops/attention.h"

namespace shoal {

/// The positions of the rows that are held of each sequence, in their order: up to two runs of consecutive
/// positions, the first before the second.
struct PositionRuns {
  std::array<int64_t, 2> begin{}, count{};

  /// All of a sequence.
  static PositionRuns all(int64_t seq) { return {{0, seq}, {seq, 0}}; }
  int64_t rows() const { return count[0] + count[1]; }
  int64_t position(int64_t row) const { return row < count[0] ? begin[0] + row : begin[1] + row - count[0]; }
  /// Rows whose position is below `position`: they are the first ones.
  int64_t rows_below(int64_t position) const {
    const auto within = [](int64_t n, int64_t most) { return n < 0 ? 0 : n < most ? n : most; };
    return within(position - begin[0], count[0]) + within(position - begin[1], count[1]);
  }
};

/// Sizes, masks and slopes are in an AttentionSpec, whose seq and document_BS are of whole sequences: masks
/// and distances are between positions. kv: [B*Lk, G, 2, C], the key and the value head of each group.
struct AttentionPart {
  PositionRuns queries, keys;  // of Lq and Lk rows of each sequence
};

/// y_T(HC) of the queries in packed qkv [B*Lq, G, H/G + 2, C] (its own keys and values are not read) to the
/// keys of kv. A query that sees no key has a result of zeros.
Tensor attention_part(const Tensor& qkv, const Tensor& kv, const AttentionSpec& spec,
                      const AttentionPart& part);

/// lse: [B*Lq, H] as of attention_fwd; -infinity where a query sees no key.
struct AttentionPartForward {
  Tensor qkv, kv, y, lse;
};
/// y and lse may be of more keys than kv has: gradients of these are made by several calls then, whose dq are
/// to be summed. Only the queries' columns of dqkv are written.
struct AttentionPartBackward {
  Tensor dy, qkv, kv, y, lse;
  Tensor dqkv, dkv;
};
/// Pairs of a query and a key that it may see, over all sequences, of one head; of one document.
double attended_pairs(const AttentionSpec& spec, const AttentionPart& part);
Cost attention_part_fwd_cost(const AttentionPartForward& args, const AttentionSpec& spec,
                             const AttentionPart& part);
Cost attention_part_bwd_cost(const AttentionPartBackward& args, const AttentionSpec& spec,
                             const AttentionPart& part);

inline constinit Kernel<void(const AttentionPartForward&, const AttentionSpec&, const AttentionPart&)>
    attention_part_fwd("attention_part_fwd", &attention_part_fwd_cost);
inline constinit Kernel<void(const AttentionPartBackward&, const AttentionSpec&, const AttentionPart&)>
    attention_part_bwd("attention_part_bwd", &attention_part_bwd_cost);
inline constinit Kernel<void(const AttentionPartForward&, const AttentionSpec&, const AttentionPart&)>
    bf16_attention_part_fwd("bf16_attention_part_fwd", &attention_part_fwd_cost);
inline constinit Kernel<void(const AttentionPartBackward&, const AttentionSpec&, const AttentionPart&)>
    bf16_attention_part_bwd("bf16_attention_part_bwd", &attention_part_bwd_cost);

/// Adds a part's y and lse to those of other keys: sum (f32 or f64, y's in bf16 f32) and sum_lse become the
/// result over both. sum_lse is -infinity and sum zero in the beginning.
struct AttentionMerge {
  Tensor y, lse;  // [B*Lq, H * C], [B*Lq, H]
  Tensor sum, sum_lse;
};
inline constinit Kernel<void(const AttentionMerge&)> merge_attention(
    "merge_attention", [](const AttentionMerge& m) {
      return Cost{.bytes = bytes_of(m.y, m.lse) + 2 * bytes_of(m.sum, m.sum_lse)};
    });

}  // namespace shoal
