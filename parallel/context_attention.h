// Attention where each rank of a context parallel group holds some positions of every sequence
// (ContextSplit): its own queries attend to the keys and values of all ranks.
#pragma once

#include "core/ops/attention.h"
#include "core/tensor/tensor.h"
#include "parallel/context_split.h"

namespace shoal {

/// qkv: this rank's packed rows [B*L, G, H/G + 2, C], rotated; the result: [B*L, H * C]. spec.seq and
/// spec.document_BS are of whole sequences. Recorded; collective over the group of the split, in forward and
/// in backward. Keys and values of other ranks are not kept between the two: they are sent again. all_gather
/// has the bits of one rank in forward; ring merges blocks, f32 sums in bf16, and rounds otherwise.
Tensor context_attention(const Tensor& qkv, const AttentionSpec& spec, const ContextSplit& split);

/// What it sends in one half of a pass, of qkv of that dtype. spec.seq is of whole sequences.
void count_context_attention(const AttentionSpec& spec, DType dtype, const ContextSplit& split,
                             PassHalf half);

}  // namespace shoal
