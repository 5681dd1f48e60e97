// Shapes and masks on which every attention kernel is compared with a reference.
#pragma once

#include <vector>

#include "core/ops/attention_part.h"

namespace shoal::testing {

inline Shape packed_shape(const AttentionSpec& spec) {
  return {spec.batch * spec.seq, spec.kv_heads, spec.heads / spec.kv_heads + 2, spec.head_size};
}

inline AttentionSpec make_spec(int64_t batch, int64_t seq, int64_t heads, int64_t kv_heads, int64_t head_size,
                               bool causal = true) {
  AttentionSpec spec;
  spec.batch = batch;
  spec.seq = seq;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.head_size = head_size;
  spec.causal = causal;
  return spec;
}

/// Consecutive documents of the given lengths, repeated for each row of the batch with other ids.
inline Tensor documents(int64_t batch, const std::vector<int64_t>& lengths) {
  std::vector<int32_t> ids;
  int64_t seq = 0;
  for (int64_t b = 0; b < batch; b++) {
    for (size_t d = 0; d < lengths.size(); d++) {
      ids.insert(ids.end(), static_cast<size_t>(lengths[d]),
                 static_cast<int32_t>(b + 3 * static_cast<int64_t>(d)));
    }
    if (b == 0) seq = static_cast<int64_t>(ids.size());
  }
  return Tensor::from(ids, {batch, seq});
}

inline std::vector<AttentionSpec> attention_cases() {
  std::vector<AttentionSpec> cases = {
      make_spec(1, 1, 1, 1, 1),         make_spec(2, 1, 4, 2, 8),    make_spec(1, 7, 2, 2, 5),
      make_spec(2, 33, 4, 2, 12),       make_spec(1, 97, 6, 2, 64),  make_spec(1, 200, 2, 1, 20),
      make_spec(1, 130, 8, 8, 16),      make_spec(1, 70, 12, 1, 33), make_spec(2, 101, 2, 2, 16, false),
      make_spec(1, 70, 4, 2, 7, false), make_spec(0, 5, 2, 1, 4),    make_spec(1, 0, 2, 1, 4)};
  for (const bool causal : {true, false}) {
    AttentionSpec packed = make_spec(2, 230, 4, 2, 16, causal);
    packed.document_BS = documents(2, {1, 96, 40, 3, 90});
    cases.push_back(packed);
    AttentionSpec alibi = make_spec(1, 120, 6, 3, 16, causal);
    alibi.alibi_slopes_H = Tensor::from(alibi_slopes(6), {6});
    alibi.scale = 0.3;
    cases.push_back(alibi);
    alibi.document_BS = documents(1, {64, 56});
    cases.push_back(alibi);
  }
  return cases;
}

/// Some queries of each sequence and some keys.
struct PartCase {
  AttentionSpec spec;
  AttentionPart part;

  Shape qkv_shape() const {
    return {spec.batch * part.queries.rows(), spec.kv_heads, spec.heads / spec.kv_heads + 2, spec.head_size};
  }
  Shape kv_shape() const { return {spec.batch * part.keys.rows(), spec.kv_heads, 2, spec.head_size}; }
  std::string text() const {
    const auto runs = [](const PositionRuns& r) {
      return str(r.begin[0], "+", r.count[0], ", ", r.begin[1], "+", r.count[1]);
    };
    return str("S ", spec.seq, " H ", spec.heads, " C ", spec.head_size, " causal ", spec.causal, " queries ",
               runs(part.queries), " keys ", runs(part.keys));
  }
};

inline std::vector<PartCase> part_cases() {
  std::vector<PartCase> cases = {
      {make_spec(2, 9, 4, 2, 5), {{{0, 7}, {2, 2}}, {{2, 5}, {2, 2}}}},
      {make_spec(1, 40, 2, 1, 16), {{{3, 20}, {0, 20}}, {{0, 10}, {10, 30}}}},
      {make_spec(1, 40, 2, 1, 16), {{{3, 20}, {2, 20}}, {{0, 10}, {0, 0}}}},  // no keys
      {make_spec(1, 5, 2, 1, 4), {{{0, 3}, {0, 0}}, {{0, 3}, {2, 1}}}},       // no queries
  };
  for (const bool causal : {true, false}) {
    for (const bool masked : {true, false}) {
      PartCase p{make_spec(2, 233, 6, 2, 20, causal), {{{20, 130}, {70, 101}}, {{0, 120}, {100, 98}}}};
      if (masked) {
        p.spec.document_BS = documents(2, {1, 66, 100, 30, 36});
        p.spec.alibi_slopes_H = Tensor::from(alibi_slopes(6), {6});
        p.spec.scale = 0.3;
      }
      cases.push_back(p);
    }
  }
  return cases;
}

}  // namespace shoal::testing
