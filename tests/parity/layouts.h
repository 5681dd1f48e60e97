// Layouts and models that the parity tables of all devices share.
#pragma once

#include <vector>

#include "tests/support/parity.h"

namespace shoal::testing {

/// Rows, heads, vocabulary and FFN widths that two or three tensor parallel ranks do not divide; every part
/// that is cut or summed.
inline std::vector<std::string> uneven_models() {
  return {
      "heads: 6, kv_heads: 3, head_size: 4, hidden_size: 18, bias: true, norm: {kind: layer_norm, "
      "placement: post}, position: learned, ffn: {activation: gelu, hidden: 7}",
      "heads: 4, kv_heads: 4, tie_embeddings: false, position: alibi, ffn: {activation: geglu, hidden: 9}",
      "heads: 4, kv_heads: 4, moe: {num_experts: 8, top_k: 3, hidden: 8, shared_experts: 2, "
      "shared_hidden: 5, shared_gate: true, router: {kind: top_k, score: sigmoid, num_groups: 4, "
      "top_groups: 2, aux_coeff: 0.1}}",
      "heads: 4, kv_heads: 4, moe: {num_experts: 8, top_k: 2, hidden: 8, router: {kind: hash}}",
      "heads: 4, kv_heads: 4, moe: {num_experts: 8, top_k: 2, hidden: 8, router: {kind: expert_choice}}"};
}

struct LayoutCase {
  ParityCase run;
  int world;
};

/// What every device runs beside the whole table, which is the CPU's: most ways of cutting a model alone,
/// some together, and what ranks do not share evenly.
inline std::vector<LayoutCase> layouts_of_every_device() {
  const std::string even = "heads: 4, kv_heads: 4", kv = "heads: 4, kv_heads: 1, bias: true";
  const std::string nine = "moe: {num_experts: 9, top_k: 2, hidden: 8, first_dense: 1}";
  std::vector<LayoutCase> all = {
      {{.accumulation = 3, .balance = "global", .capacity = "position", .model = ""}, 1},
      {{.dispatcher = "local", .balance = "bias", .model = ""}, 2},
      {{.ep = 2, .dispatcher = "all_gather", .balance = "bias", .model = ""}, 2},
      {{.ep = 2, .balance = "sequence", .recompute = "block", .model = "", .chunks = 2}, 2},
      {{.ep = 2, .balance = "bias", .capacity = "position", .model = "", .chunks = 2, .pad = true}, 2},
      {{.ep = 3, .balance = "none", .model = nine}, 3},
      {{.ep = 2, .tp = 4, .balance = "sequence", .model = kv}, 4},
      {{.ep = 4, .tp = 2, .balance = "bias", .capacity = "probability", .empty_ranks = true, .model = even},
       4},
      {{.ep = 2, .balance = "z_loss", .dtype = DType::f32, .model = ""}, 4},
      {{.ep = 4, .tp = 2, .balance = "bias", .model = even}, 8},
      {{.accumulation = 2, .balance = "bias", .model = "", .pp = 2}, 2},
      {{.ep = 4, .dispatcher = "hierarchical", .balance = "bias", .model = "", .ranks_per_node = 2}, 4},
      {{.ep = 2, .cp = 2, .balance = "sequence", .model = ""}, 2},
      {{.tp = 2, .cp = 2, .balance = "bias", .model = even, .context = ContextKind::ring}, 4},
      {{.ep = 2, .etp = 2, .balance = "bias", .model = nine}, 4},
      {{.ep = 2, .etp = 2, .cp = 2, .accumulation = 2, .balance = "bias", .model = "", .pp = 2, .zero = 2},
       8},
      {{.accumulation = 4,
        .balance = "bias",
        .model = "layers: 4",
        .pp = 2,
        .virtual_stages = 2,
        .schedule = "interleaved"},
       2},
      {{.accumulation = 2, .balance = "bias", .model = "", .pp = 2, .schedule = "zero_bubble", .zero = 1}, 4},
      {{.ep = 2, .balance = "bias", .model = "", .zero = 3}, 4},
  };
  for (const std::string& model : uneven_models()) all.push_back({{.tp = 3, .model = model}, 3});
  return all;
}

}  // namespace shoal::testing
