// Cross-entropy of logits with integer labels: loss and gradient in one pass, the gradient in place of the
// logits, so that there is never a second logits-sized buffer.
#pragma once

#include <cstdint>
#include <functional>

#include "core/ops/embedding.h"
#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

inline constexpr int32_t kIgnoredLabel = -1;

/// Sum over tokens with a label >= 0 of -log softmax(logits)[label], times `scale`; a scalar of the logits'
/// dtype (f32 for bf16 logits). The logits' storage is overwritten with the gradient when one is wanted.
/// labels_T: i32; -1 = ignored; any other value outside [0, V) throws Error. All labels ignored: loss 0,
/// gradient 0.
Tensor cross_entropy(const Tensor& logits_TV, const Tensor& labels_T, double scale);

/// cross_entropy(x W^T) without ever holding all logits: blocks of tokens (logits_block) are multiplied,
/// turned into gradients in place, and multiplied back. x: f32 or f64 like the weight, or bf16 with an f32
/// weight (logits f32, their gradient rounded to bf16). When a gradient is wanted all of it is made in
/// forward, and the part of a leaf weight is added to its buffer right there: backward then expects to be
/// seeded with 1 (Error otherwise).
Tensor linear_cross_entropy(const Tensor& x_TD, const Tensor& weight_VD, const Tensor& labels_T,
                            double scale);

/// The same where the weight's rows are a part of the vocabulary and others hold the rest: labels_T are of
/// the whole vocabulary. The loss is that of all of it, the same for everyone; dx is this part's share of a
/// sum.
struct VocabPart {
  TablePart rows;
  int64_t block_vocab = 0;  // rows of the largest part, which decides the size of blocks
  /// Every part's statistics in order, [parts, 3, n] of [3, n]; everyone calls it as often.
  std::function<Tensor(const Tensor& mine)> gather;
};
Tensor linear_cross_entropy(const Tensor& x_TD, const Tensor& weight_VD, const Tensor& labels_T, double scale,
                            const VocabPart& part);

/// Tokens of one block, for logits of `stats`: so many whole 256 that they stay in cache, but not fewer than
/// 256.
int64_t logits_block(int64_t num_tokens, int64_t vocab, DType stats);

struct CrossEntropy {
  Tensor logits_TV;  // read; overwritten with the gradient when want_grad
  Tensor labels_T;
  double scale = 1;
  bool want_grad = false;
  Tensor total;  // f64 scalar: the unscaled sum of losses, made in double in token order, is added
};
inline constinit Kernel<void(const CrossEntropy&)> cross_entropy_fwd(
    "cross_entropy_fwd", [](const CrossEntropy& c) {
      return Cost{.bytes = (c.want_grad ? 2 : 1) * bytes_of(c.logits_TV) + bytes_of(c.labels_T)};
    });

/// Of each token, over a part of the vocabulary: the largest logit, the sum of exp(logit - largest), and the
/// label's logit (0 when it is in another part). stats_3T: f64, written.
inline constinit Kernel<void(const Tensor& logits_TV, const Tensor& labels_T, const TablePart& part,
                             const Tensor& stats_3T)>
    vocab_stats_fwd("vocab_stats_fwd",
                    [](const Tensor& logits, const Tensor& labels, const TablePart&, const Tensor& stats) {
                      return Cost{.bytes = bytes_of(logits, labels, stats)};
                    });
/// As cross_entropy_fwd, given the statistics of all parts, f64 [parts, 3, T].
inline constinit Kernel<void(const CrossEntropy&, const TablePart& part, const Tensor& stats_P3T)>
    vocab_cross_entropy_fwd("vocab_cross_entropy_fwd", [](const CrossEntropy& c, const TablePart&,
                                                          const Tensor& stats) {
      return Cost{.bytes = (c.want_grad ? 2 : 0) * bytes_of(c.logits_TV) + bytes_of(c.labels_T, stats)};
    });

/// Throws Error unless the gradient, a scalar tensor, is 1.
inline constinit Kernel<void(const Tensor& dloss)> expect_seed("expect_seed");

}  // namespace shoal
