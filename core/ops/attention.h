// Scaled dot-product attention on packed projections, and RoPE. The score matrix is never stored: forward
// keeps the output and one log-sum-exp per row and head (online softmax: Dao, arXiv:2307.08691, algorithm 1),
// so extra memory is O(tokens).
//
// Packed layout: qkv [B*S, G, H/G + 2, C], G = number of key/value heads. Group g holds its H/G query heads,
// then its key head, then its value head, so tensor parallelism over G is a plain shard. Query head h = g *
// (H/G) + i. Output: [B*S, H * C] in query head order.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

struct AttentionSpec {
  int64_t batch = 1, seq = 1;       // B, S: x has B * S rows
  int64_t heads = 1, kv_heads = 1;  // H, G; G divides H
  int64_t head_size = 1;            // C
  double scale = 0;                 // of the scores; 0: 1 / sqrt(C)
  bool causal = true;
  Tensor alibi_slopes_H;  // f32; undefined: none. score += -slope[h] * (query pos - key pos)
  Tensor document_BS;     // i32; undefined: one document per row. Other documents are masked
};

/// y_T(HC) = softmax(q k^T * scale + mask) v.
Tensor attention(const Tensor& qkv, const AttentionSpec& spec);

/// Slopes of ALiBi (Press et al., arXiv:2108.12409, section 3), for any number of heads.
std::vector<float> alibi_slopes(int64_t heads);

enum class RopeForm : uint8_t { half, adjacent };  // pairs (i, i + C/2) or (2i, 2i + 1)
struct RopeSpec {
  RopeForm form = RopeForm::half;
  int64_t rotary_size = 0;  // first dimensions of each head that turn; 0: all. Even.
  double theta = 10000;     // base: pair i turns by position * theta^(-2i / rotary_size)
};
/// cos and sin of every position and pair: [2, positions, rotary_size / 2], angles computed in double.
Tensor rope_table(const RopeSpec& spec, int64_t head_size, int64_t num_positions, DType dtype, Device device);

/// Rotates the query and key heads of packed qkv in place (the returned tensor shares its storage; the input
/// must not be used again). positions_T: i32 row of the table for each token (Su et al., arXiv:2104.09864,
/// eq. 34).
Tensor rope(const Tensor& qkv, const AttentionSpec& spec, const RopeSpec& rope_spec, const Tensor& table,
            const Tensor& positions_T);

struct AttentionBackward {
  Tensor dy, qkv, y, lse;  // lse: [B*S, H], natural log, of the scaled and biased scores
  Tensor dqkv;             // written
};
/// Pairs of a query and a key that it may see, over all sequences, of one head.
double attended_pairs(const AttentionSpec& spec);
/// q k^T and p v; and, with the scores computed again, five products of that size.
Cost attention_fwd_cost(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y, const Tensor& lse);
Cost attention_bwd_cost(const AttentionBackward& args, const AttentionSpec& spec);

inline constinit Kernel<void(const Tensor& qkv, const AttentionSpec&, const Tensor& y, const Tensor& lse)>
    attention_fwd("attention_fwd", &attention_fwd_cost);
inline constinit Kernel<void(const AttentionBackward&, const AttentionSpec&)> attention_bwd(
    "attention_bwd", &attention_bwd_cost);
/// The same for bf16 qkv, y and gradients, with f32 lse: products of bf16, sums and softmax in f32.
inline constinit Kernel<void(const Tensor& qkv, const AttentionSpec&, const Tensor& y, const Tensor& lse)>
    bf16_attention_fwd("bf16_attention_fwd", &attention_fwd_cost);
inline constinit Kernel<void(const AttentionBackward&, const AttentionSpec&)> bf16_attention_bwd(
    "bf16_attention_bwd", &attention_bwd_cost);
/// In place; inverse = true turns back (the backward).
inline constinit Kernel<void(const Tensor& qkv, const AttentionSpec&, const RopeSpec&, const Tensor& table,
                             const Tensor& positions, bool inverse)>
    rope_fwd("rope_fwd", [](const Tensor& qkv, const AttentionSpec& spec, const RopeSpec& rope, const Tensor&,
                            const Tensor& positions, bool) {
      // Read and written: of every query and key head what turns.
      const int64_t turned = rope.rotary_size > 0 ? rope.rotary_size : spec.head_size;
      const int64_t values = spec.batch * spec.seq * (spec.heads + spec.kv_heads) * turned;
      return Cost{.bytes = 2 * static_cast<double>(values * dtype_size(qkv.dtype())) + bytes_of(positions)};
    });

/// Incremental decoding. cache_k, cache_v: [B, capacity, G, C]; rows [0, length) are filled. qkv: packed rows
/// of `seq` new tokens per sequence (already rotated); they are appended at `length` and attended to
/// causally.
struct DecodeArgs {
  Tensor qkv, cache_k, cache_v, y;
  int64_t length = 0;
};
inline constinit Kernel<void(const DecodeArgs&, const AttentionSpec&)> attention_decode("attention_decode");
inline constinit Kernel<void(const DecodeArgs&, const AttentionSpec&)> bf16_attention_decode(
    "bf16_attention_decode");

}  // namespace shoal
