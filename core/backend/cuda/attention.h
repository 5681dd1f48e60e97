// What the kernels of attention share: where the rows of heads lie, and which keys a query sees.
#pragma once

#include <cmath>

#include "core/backend/cuda/block.h"
#include "core/ops/attention_part.h"

namespace shoal::cuda {

#include "core/backend/functors/vector_math.inc"

/// Rows of heads that share a key head; strides in elements. Head i of the group is i * head_size further.
template <class T>
struct HeadRows {
  T* data;
  int64_t batch, row, group;
  SHOAL_DEVICE T* at(int b, int s, int g) const { return data + b * batch + s * row + g * group; }
};

/// std::min takes references, which constants of device code do not have.
SHOAL_DEVICE int smaller_of(int a, int b) {
  return a < b ? a : b;
}

struct Range {
  int first, last;  // [first, last)
  SHOAL_DEVICE bool has(int i) const { return i >= first && i < last; }
};

/// Who sees whom within a sequence. All bounds ascend with the position.
struct Sight {
  const int32_t*
      documents;  // [B * S, 2]: first position of a token's document and the first after it; null: one
  int num_queries, num_keys;
  int first_position;  // of query 0 among the keys
  bool causal;

  SHOAL_DEVICE Range keys_of(int b, int query) const {
    Range keys{0, causal ? first_position + query + 1 : num_keys};
    if (documents != nullptr) {
      const int32_t* document = documents + 2 * (int64_t{b} * num_queries + query);
      keys.first = document[0];
      if (!causal) keys.last = document[1];
    }
    return keys;
  }
  SHOAL_DEVICE int distance(int query, int key) const { return key - first_position - query; }
  bool has_earlier_keys() const { return first_position > 0; }
  /// For first_position = 0.
  SHOAL_DEVICE Range queries_of(int b, int key) const {
    Range queries{causal ? key : 0, num_queries};
    if (documents != nullptr) {
      const int32_t* document = documents + 2 * (int64_t{b} * num_queries + key);
      queries.last = document[1];
      if (!causal) queries.first = document[0];
    }
    return queries;
  }
};

/// PositionRuns of core/ops/attention_part.h.
struct Runs {
  int begin[2], count[2];
  SHOAL_DEVICE int position(int row) const {
    return row < count[0] ? begin[0] + row : begin[1] + row - count[0];
  }
  SHOAL_DEVICE int rows_below(int position) const {
    int rows = 0;
    for (int i = 0; i < 2; i++) {
      const int below = position - begin[i];
      rows += below < 0 ? 0 : smaller_of(below, count[i]);
    }
    return rows;
  }
};

/// The same for some queries and some keys of each sequence.
struct PartSight {
  const int32_t* documents;  // as of Sight, of whole sequences
  int num_queries, num_keys, seq;
  bool causal;
  Runs queries, keys;

  SHOAL_DEVICE Range keys_of(int b, int query) const {
    const int position = queries.position(query);
    Range seen{0, causal ? position + 1 : seq};
    if (documents != nullptr) {
      const int32_t* document = documents + 2 * (int64_t{b} * seq + position);
      seen.first = document[0];
      if (!causal) seen.last = document[1];
    }
    return {keys.rows_below(seen.first), keys.rows_below(seen.last)};
  }
  SHOAL_DEVICE Range queries_of(int b, int key) const {
    const int position = keys.position(key);
    Range seeing{causal ? position : 0, seq};
    if (documents != nullptr) {
      const int32_t* document = documents + 2 * (int64_t{b} * seq + position);
      seeing.last = document[1];
      if (!causal) seeing.first = document[0];
    }
    return {queries.rows_below(seeing.first), queries.rows_below(seeing.last)};
  }
  SHOAL_DEVICE int distance(int query, int key) const { return keys.position(key) - queries.position(query); }
  bool has_earlier_keys() const { return false; }
};

/// T: stored type. S: Sight or PartSight.
template <class T, class S = Sight>
struct AttentionArgs {
  using C = Compute<T>;
  int batch, groups, heads, head_size;  // heads: of a group
  C scale;
  const float* slopes;  // of ALiBi, [H]; null: none
  S sight;
  HeadRows<const T> q, k, v;
  HeadRows<T> y;
  C* lse;  // [B * S, H]; null: not wanted

  SHOAL_DEVICE int64_t stat_of(int b, int query, int head) const {  // head: of all H
    return (int64_t{b} * sight.num_queries + query) * groups * heads + head;
  }
  SHOAL_DEVICE C slope_of(int head) const { return slopes == nullptr ? C(0) : static_cast<C>(slopes[head]); }
};

/// What a backward has besides: y and lse of AttentionArgs are read.
template <class T>
struct AttentionGradients {
  HeadRows<const T> dy;
  HeadRows<T> dq, dk, dv;
  const Compute<T>* delta;  // [B * S, H]: sum over columns of dy * y
};

/// Bounds of the documents for Sight; undefined when spec has none. The ids of a sequence ascend.
Tensor document_bounds(const AttentionSpec& spec, Device device);

/// Rows of packed qkv (see core/ops/attention.h): part 0 the query heads, 1 the key head, 2 the value head.
template <class T>
HeadRows<T> packed_rows(T* qkv, const AttentionSpec& spec, int part) {
  const int64_t heads = spec.heads / spec.kv_heads, group = (heads + 2) * spec.head_size,
                row = spec.kv_heads * group;
  return {qkv + (part == 0 ? 0 : (heads + part - 1) * spec.head_size), spec.seq * row, row, group};
}
/// Rows of y, and of what is shaped like it.
template <class T>
HeadRows<T> output_rows(T* y, const AttentionSpec& spec) {
  const int64_t row = spec.heads * spec.head_size;
  return {y, spec.seq * row, row, row / spec.kv_heads};
}

/// bounds: document_bounds. lse undefined: not wanted.
template <class T>
AttentionArgs<T> attention_args(const Tensor& qkv, const AttentionSpec& spec, const Tensor& y,
                                const Tensor& lse, const Tensor& bounds) {
  SHOAL_CHECK(spec.seq < INT32_MAX / 2 && spec.batch <= INT32_MAX,
              "attention: expected fewer than 2^30 tokens, got ", spec.batch, " sequences of ", spec.seq);
  const auto seq = static_cast<int>(spec.seq);
  const double scale = spec.scale != 0 ? spec.scale : 1 / std::sqrt(static_cast<double>(spec.head_size));
  const T* packed = qkv.data<T>();
  return {static_cast<int>(spec.batch),
          static_cast<int>(spec.kv_heads),
          static_cast<int>(spec.heads / spec.kv_heads),
          static_cast<int>(spec.head_size),
          static_cast<Compute<T>>(scale),
          data_or_null<float>(spec.alibi_slopes_H),
          Sight{data_or_null<int32_t>(bounds), seq, seq, 0, spec.causal},
          packed_rows(packed, spec, 0),
          packed_rows(packed, spec, 1),
          packed_rows(packed, spec, 2),
          output_rows(y.data<T>(), spec),
          data_or_null<Compute<T>>(lse)};
}
template <class T>
AttentionGradients<T> attention_gradients(const AttentionBackward& args, const AttentionSpec& spec,
                                          const Tensor& delta) {
  T* packed = args.dqkv.data<T>();
  return {output_rows<const T>(args.dy.data<T>(), spec), packed_rows(packed, spec, 0),
          packed_rows(packed, spec, 1), packed_rows(packed, spec, 2), delta.data<Compute<T>>()};
}

/// Of a part: qkv and kv as of AttentionPartForward.
template <class T>
AttentionArgs<T, PartSight> part_args(const AttentionPartForward& rows, const AttentionSpec& spec,
                                      const AttentionPart& part, const Tensor& bounds);
template <class T>
AttentionGradients<T> part_gradients(const AttentionPartBackward& args, const AttentionSpec& spec,
                                     const AttentionPart& part, const Tensor& delta);

/// For a new token of each sequence and more: copies keys and values into the caches, from args.length on,
/// and makes the arguments of the attention of the new queries to all of them. Throws Error when the caches
/// do not fit.
template <class T>
AttentionArgs<T> append_to_caches(const DecodeArgs& args, const AttentionSpec& spec);

/// One warp for a few queries and no tensor cores: any type and head size. T: float, double, BFloat16.
template <class T, class S>
void attention_fwd_by_rows(Device device, const AttentionArgs<T, S>& args);
template <class T, class S>
void attention_bwd_by_rows(Device device, const AttentionArgs<T, S>& args,
                           const AttentionGradients<T>& gradients);
/// [B * S, H] sums of dy * y, for AttentionGradients.
template <class T>
Tensor attention_delta(const Tensor& dy, const Tensor& y, int64_t head_size);

}  // namespace shoal::cuda
