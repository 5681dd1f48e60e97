// How much of a transformer's forward pass is kept for backward: what the Functions of one block save.
#include <algorithm>

#include "models/transformer.h"

namespace shoal {

namespace {

/// Up projection (gate and up when gated), and what the down projection reads.
double ffn_values(int64_t hidden, bool gated) {
  return static_cast<double>((gated ? 3 : 2) * hidden);
}

}  // namespace

double TransformerOptions::values_per_token(int64_t vocab_size) const {
  const AttentionShape a = attention_shape();
  const bool gated = FfnActivationRegistry::make(ffn.activation)->gated();
  const auto D = static_cast<double>(hidden_size);
  // Two norms keep their sum and their result; attention keeps q, k, v, its result and one value per head.
  const auto attention = 4 * D + static_cast<double>((2 * a.heads + 2 * a.kv_heads) * a.head_size + a.heads);
  const double dense = attention + ffn_values(ffn_hidden(), gated);
  const double rows = static_cast<double>(moe.top_k) * (2 * D + ffn_values(expert_hidden(), gated));
  const double shared =
      shared_hidden() > 0 ? ffn_values(shared_hidden(), gated) + (moe.shared_gate ? D : 0) : 0;
  const double sparse = attention + static_cast<double>(moe.num_experts) + rows + shared;
  const auto num_sparse = static_cast<double>(num_moe_layers());
  const double num_dense = static_cast<double>(layers) - num_sparse;
  const double ends = 2 * D + static_cast<double>(vocab_size);  // final norm and logits
  if (recompute == "none") return num_dense * dense + num_sparse * sparse + ends;
  // Each block keeps its two inputs; one block at a time is there as a whole, when the logits are gone.
  const double largest = std::max(num_dense > 0 ? dense : 0, num_sparse > 0 ? sparse : 0);
  return static_cast<double>(layers) * 2 * D + std::max(ends, largest);
}

}  // namespace shoal
