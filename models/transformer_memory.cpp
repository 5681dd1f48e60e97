// Memory of a pass through a transformer, from its options alone: what the Functions of each block keep, and
// what backward takes on top while it frees that, block by block. Bytes per token unless said otherwise.
#include <algorithm>

#include "core/ops/bf16_linear.h"
#include "core/ops/cross_entropy.h"
#include "models/transformer.h"

namespace shoal {

namespace {

/// An FFN, or all routed experts of a token.
struct FfnBytes {
  double up = 0, hidden = 0;  // results of the up projection and of the activation
  double made_input = 0;      // what is made again for the weight gradient of the up projection
  double output = 0;          // gradient of the result, in memory that forward has kept
  double dx = 0;
  double copy = 0;                      // the largest copy of a weight, when copies are not kept
  double codes_down = 0, codes_up = 0;  // fp8 operands of the products of a backward
};

struct BlockBytes {
  double kept = 0;  // when forward has ended
  double work = 0;  // most that its backward takes on top of that
};

class PassEstimate {
 public:
  PassEstimate(const TransformerOptions& options, const PassShape& shape)
      : o_(options),
        shape_(shape),
        again_(options.recomputed()),
        gated_(FfnActivationRegistry::make(options.ffn.activation)->gated()),
        pre_(options.norm.placement == "pre"),
        one_copy_(shape.device != DeviceType::cpu) {
    again_.packed_weights |= shape.drops_copies;
    stats_ = static_cast<double>(dtype_size(shape.dtype));
    element_ = shape.bf16 ? 2 : stats_;
    x_D_ = static_cast<double>(o_.hidden_size) * element_;
    stream_D_ = pre_ ? static_cast<double>(o_.hidden_size) * stats_ : x_D_;
    norm_kept_ = stream_D_ + (again_.norms ? 0 : x_D_) + norm_statistics();
    norm_made_ = again_.norms ? x_D_ : 0;
  }

  PassMemory total() const {
    const BlockBytes dense = block(false), sparse = block(true);
    const double inputs = stream_D_ + (pre_ ? x_D_ : 0);           // of a block that is run again
    const double ends = pre_ ? stream_D_ + norm_statistics() : 0;  // the final norm
    const auto bytes_of = [&](int64_t l) { return o_.moe.is_moe_layer(l) ? sparse : dense; };
    double live = ends;
    for (int64_t l = 0; l < o_.layers; l++) live += again_.block ? inputs : bytes_of(l).kept;
    PassMemory out;
    out.activations = shape_.tokens * live;
    double peak = out.activations + head();
    live -= ends;
    for (int64_t l = o_.layers - 1; l >= 0; l--) {
      const BlockBytes b = bytes_of(l);
      peak = std::max(peak, shape_.tokens * (live + b.work + (again_.block ? b.kept : 0)));
      live -= again_.block ? inputs : b.kept;
    }
    out.work = peak - out.activations;
    if (!again_.packed_weights) out.packed_weights = all_copies();
    return out;
  }

 private:
  double norm_statistics() const { return (o_.norm.kind == "layer_norm" ? 2 : 1) * stats_; }
  double copy_bytes() const { return shape_.bf16 && again_.packed_weights ? 2 : 0; }  // of one weight

  /// Numbers in one bf16 copy of a matrix (core/ops/bf16_linear.h): in blocks of outputs, and pairs of
  /// inputs; on other devices than the cpu as they are.
  double packed(int64_t outputs, int64_t inputs) const {
    if (one_copy_) return static_cast<double>(outputs * inputs);
    const int64_t blocks = (outputs + kPackRows - 1) / kPackRows;
    return static_cast<double>(blocks * kPackRows * (inputs + inputs % 2));
  }
  /// Numbers in the copies for forward and for backward, which are one on other devices than the cpu.
  double both_packed(int64_t outputs, int64_t inputs) const {
    return packed(outputs, inputs) + (one_copy_ ? 0 : packed(inputs, outputs));
  }
  double both_copies(int64_t outputs, int64_t inputs) const { return 2 * both_packed(outputs, inputs); }
  double ffn_copies(int64_t width) const {
    return both_copies(gated_ ? 2 * width : width, o_.hidden_size) + both_copies(o_.hidden_size, width);
  }
  /// Of one expert in fp8: the codes of each matrix and of its transpose.
  double fp8_copies() const {
    const auto width = static_cast<double>(own_width()), D = static_cast<double>(o_.hidden_size);
    return 2 * (gated_ ? 3 : 2) * width * D;
  }
  /// Of all weights of this rank that take part in products of mixed precision.
  double all_copies() const {
    const AttentionShape a = o_.attention_shape();
    const int64_t D = o_.hidden_size;
    const auto sparse = static_cast<double>(o_.num_moe_layers()), layers = static_cast<double>(o_.layers);
    const double experts = own_experts();
    double moe = o_.moe.fp8() ? experts * fp8_copies() : 0;
    if (!shape_.bf16) return sparse * moe;
    if (!o_.moe.fp8()) moe = experts * ffn_copies(own_width());
    if (o_.shared_hidden() > 0) moe += ffn_copies(o_.shared_hidden());
    const double attention =
        both_copies((a.heads + 2 * a.kv_heads) * a.head_size, D) + both_copies(D, a.heads * a.head_size);
    return layers * attention + (layers - sparse) * ffn_copies(o_.ffn_hidden()) + sparse * moe +
           both_copies(shape_.vocab_size, D);
  }

  /// In all: a block of logits, for bf16 with its copy, the head's input and its gradient.
  double head() const {
    const auto vocab = static_cast<double>(shape_.vocab_size);
    const int64_t block = logits_block(static_cast<int64_t>(shape_.tokens), shape_.vocab_size, shape_.dtype);
    const double logits = static_cast<double>(block) * vocab * stats_;
    return logits * (shape_.bf16 ? 1.5 : 1) + shape_.tokens * 2 * x_D_ +
           copy_bytes() * both_packed(shape_.vocab_size, o_.hidden_size);
  }

  FfnBytes ffn(double rows, int64_t width, double matrices) const {
    const double up = static_cast<double>(width) * (gated_ ? 2 : 1);
    FfnBytes f;
    f.up = rows * up * element_;
    f.hidden = rows * static_cast<double>(width) * element_;
    f.made_input = norm_made_;
    f.dx = rows * x_D_;
    const int64_t outputs = gated_ ? 2 * width : width;
    f.copy = copy_bytes() * matrices *
             std::max(packed(outputs, o_.hidden_size), packed(o_.hidden_size, outputs)) /
             std::max(1.0, shape_.tokens);
    return f;
  }
  /// Routed experts of the rank with most of them, and the part of their width.
  double own_experts() const {
    return static_cast<double>(shard_range(o_.moe.num_experts, {0, shape_.ep}).end);
  }
  int64_t own_width() const { return shard_range(o_.expert_hidden(), {0, shape_.etp}).end; }
  /// Rows that the routed experts get of each token.
  double rows_of_token() const {
    const auto K = static_cast<double>(o_.moe.top_k), E = static_cast<double>(o_.moe.num_experts);
    return o_.moe.pad_to_capacity ? std::min(K * o_.moe.capacity_factor, E) : K;
  }
  /// The same of the routed experts.
  FfnBytes experts() const {
    const double K = rows_of_token() * shape_.etp, experts = own_experts();  // rows of the whole etp group
    const auto D = static_cast<double>(o_.hidden_size), width = static_cast<double>(own_width());
    FfnBytes f = ffn(K, own_width(), experts);
    if (!o_.moe.fp8()) return f;
    const double up = (gated_ ? 2 : 1) * width, tokens = std::max(1.0, shape_.tokens);
    f.copy = again_.packed_weights ? 2 * experts * up * D / tokens : 0;
    // Codes of the gradient of the result, twice, or once with those of the input. The rows that a group
    // is filled up with are not counted.
    f.codes_down = K * (D + std::max(D, width));
    f.codes_up = K * (up + std::max(up, D));
    return f;
  }
  double kept(const FfnBytes& f) const {
    return (again_.up_projections ? 0 : f.up) + (again_.activations ? 0 : f.hidden);
  }
  /// Most that backward takes on top of what there was before it.
  double work(const FfnBytes& f) const {
    const double made_up = again_.up_projections ? f.up : 0;
    const bool chain = again_.up_projections && again_.activations;
    // The down projection: its input, made from the up projection's result, made from that one's input.
    const double down = f.hidden + (again_.activations ? f.hidden + made_up : 0) +
                        (chain ? f.made_input : 0) + f.copy + f.codes_down;
    const double freed = f.output + (again_.activations ? 0 : f.hidden);
    // The activation's gradient takes the memory of what it read.
    const double activation = f.hidden + made_up + (again_.up_projections ? f.made_input : 0) - freed;
    const double up = made_up + f.made_input + f.dx + f.copy + f.codes_up - freed;
    return std::max({down, activation, up});
  }

  BlockBytes attention() const {
    const AttentionShape a = o_.attention_shape();
    const double inner = static_cast<double>(a.heads * a.head_size) * element_;
    const double qkv = static_cast<double>((a.heads + 2 * a.kv_heads) * a.head_size) * element_;
    // Context parallel ranks: keys and values of all of them with their gradients, or of two of them at a
    // time and sums of all gradients; the larger one.
    const double pair = static_cast<double>(2 * a.kv_heads * a.head_size) * element_;
    const double others = shape_.cp == 1 ? 0 : std::max((2 * shape_.cp + 1) * pair, 8 * pair + 2 * qkv);
    return {norm_kept_ + qkv + inner + static_cast<double>(a.heads) * stats_,
            inner + std::max(qkv, x_D_) + norm_made_ + others};
  }

  BlockBytes block(bool sparse) const {
    const BlockBytes first = attention();
    BlockBytes second = sparse ? moe_layer() : BlockBytes{};
    if (!sparse) {
      const FfnBytes f = ffn(1, o_.ffn_hidden(), 1);
      second = {kept(f), work(f)};
    }
    // Of the residual stream and, in another dtype, of what was last added to it.
    const double gradients = stream_D_ + (pre_ && element_ != stats_ ? x_D_ : 0);
    return {first.kept + norm_kept_ + second.kept,
            std::max(second.work, first.work - second.kept) + gradients};
  }

  BlockBytes moe_layer() const {
    const auto E = static_cast<double>(o_.moe.num_experts);
    const double K = rows_of_token();
    FfnBytes routed = experts();
    routed.output = K * x_D_;  // in the memory of the experts' results
    const double index = 3 * 8 * K;
    double rows = 0;  // with one rank copies of tokens are made again, but not sent again with several
    if (shape_.ep > 1)
      rows = K * x_D_ + 2 * 8 * K;
    else
      routed.made_input += K * x_D_;
    // Logits, scores, ids twice, weights.
    // Of all context parallel ranks.
    const double router = shape_.cp * (2 * E * stats_ + static_cast<double>(o_.moe.top_k) * (8 + stats_));
    BlockBytes b{router + index + rows + routed.output + kept(routed), work(routed)};
    if (o_.shared_hidden() > 0) {
      const FfnBytes shared = ffn(1, o_.shared_hidden(), 1);
      // Of the routed experts only the gradient of their rows is left by then.
      b.work = std::max(b.work, work(shared) + routed.dx - rows - routed.output - kept(routed));
      b.kept += kept(shared) + (o_.moe.shared_gate ? x_D_ + 2 * stats_ : 0);
    }
    return b;
  }

  const TransformerOptions& o_;
  const PassShape& shape_;
  Recompute again_;
  bool gated_, pre_;
  bool one_copy_;           // of a weight in bf16 serves both passes
  double element_, stats_;  // bytes of a number between layers, and of the stream, statistics and router
  double x_D_, stream_D_;   // a row of width D of either
  double norm_kept_, norm_made_;
};

}  // namespace

PassMemory TransformerOptions::pass_memory(const PassShape& shape) const {
  return PassEstimate(*this, shape).total();
}

}  // namespace shoal
