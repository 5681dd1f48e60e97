// cuDNN's graphs of attention on packed projections (core/ops/attention.h): written out as products, mask and
// softmax, which is the form that its fused engines recognise.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "core/backend/cuda/cudnn_graph.h"
#include "core/ops/attention.h"

namespace shoal::cuda {

/// Where [batch, heads, seq] lie, in elements; what is behind seq is dense.
using HeadStrides = std::array<int64_t, 3>;

/// One call. Tensors have four sizes there, so heads must lie at equal distances: with several groups of
/// several query heads each, a group (of one sequence) or a sequence (of one group) is an entry of the batch.
struct CudnnAttention {
  int64_t batch = 1, heads = 1, kv_heads = 1, seq = 1, head_size = 1;
  HeadStrides q{}, kv{}, y{}, lse{};  // of dy as of y, of gradients as of what they are of
  bool causal = true;
  /// Bias of a key: slope * (key - query), with slopes [batch or 1, heads].
  bool alibi = false, alibi_of_batch = false;
  auto operator<=>(const CudnnAttention&) const = default;
};

/// The calls that an attention is made of: equal but for where their tensors begin.
struct CudnnCalls {
  CudnnAttention each;
  int64_t count = 1;
  /// Elements from the beginning of one call's tensors to the next one's.
  int64_t qkv_step = 0, y_step = 0, lse_step = 0, slope_step = 0;
};
/// Of attention without documents: cuDNN's fused engines take no mask from memory but a whole matrix of
/// scores.
CudnnCalls cudnn_calls(const AttentionSpec& spec);

/// Ids of tensors in the graphs.
enum class AttentionTensor : int64_t {
  q = 1,
  k,
  v,
  y,
  lse,
  slopes,  // f32
  scale,   // of the host, as are the next two
  lowest,  // score of a key that is not seen
  one,
  dy,
  dq,
  dk,
  dv,
  delta,  // f32 [batch, heads, seq]: written, then read
};

/// q, k, v, scale (, slopes) (, lowest when causal) -> y, lse (natural logarithm).
CudnnGraph attention_forward_graph(const CudnnAttention& a);
/// Those, y, lse, dy, one -> delta, dq, dk, dv. dq is a product of its own, of gradients of scores that the
/// engine stores: so its bits are the same each time, at the price of batch * heads * seq * seq elements of
/// bf16. (cuDNN also takes a graph whose dq is added up in f32, which wants less memory but promises no
/// order; the notes of its engines are the same.)
CudnnGraph attention_backward_graph(const CudnnAttention& a);

}  // namespace shoal::cuda
