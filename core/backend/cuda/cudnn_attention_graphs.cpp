#include "core/backend/cuda/cudnn_attention_graphs.h"

namespace shoal::cuda {

namespace {

constexpr cudnnDataType_t kBf16 = CUDNN_DATA_BFLOAT16, kF32 = CUDNN_DATA_FLOAT, kI32 = CUDNN_DATA_INT32;
using Sizes = std::vector<int64_t>;

std::string name_of(const char* pass, const CudnnAttention& a) {
  return str("attention ", pass, " of ", a.batch, " x ", a.seq, " tokens, ", a.heads, " heads of ",
             a.head_size, ", ", a.kv_heads, " of keys", a.causal ? ", causal" : "", a.alibi ? ", ALiBi" : "");
}

/// What both graphs have.
class Builder {
 public:
  Builder(const char* pass, const CudnnAttention& a)
      : a_(a), graph_(name_of(pass, a)), scale_(number(AttentionTensor::scale)) {}
  CudnnGraph take() { return std::move(graph_); }
  CudnnGraph& graph() { return graph_; }

  CudnnObject number(AttentionTensor id) { return graph_.host_scalar(static_cast<int64_t>(id)); }
  /// [batch, heads, seq, head_size]: queries, results and their gradients.
  CudnnObject rows(AttentionTensor id, const HeadStrides& at) {
    return real(id, kBf16, {a_.batch, a_.heads, a_.seq, a_.head_size}, {at[0], at[1], at[2], 1});
  }
  /// [batch, kv_heads, seq, head_size]
  CudnnObject key_rows(AttentionTensor id) {
    return real(id, kBf16, {a_.batch, a_.kv_heads, a_.seq, a_.head_size}, {a_.kv[0], a_.kv[1], a_.kv[2], 1});
  }
  /// The same memory as [batch, kv_heads, head_size, seq].
  CudnnObject key_columns(AttentionTensor id) {
    return real(id, kBf16, {a_.batch, a_.kv_heads, a_.head_size, a_.seq}, {a_.kv[0], a_.kv[1], 1, a_.kv[2]});
  }
  CudnnObject lse() {
    return real(AttentionTensor::lse, kF32, row_sizes(), {a_.lse[0], a_.lse[1], a_.lse[2], 1});
  }
  CudnnObject delta() { return real(AttentionTensor::delta, kF32, row_sizes(), row_strides()); }

  /// Tensors that are never in memory: [batch, heads, seq, seq], a number of each row, and rows.
  CudnnObject scores(cudnnDataType_t type = kF32) {
    const int64_t H = a_.heads, S = a_.seq;
    return graph_.inner(type, {a_.batch, H, S, S}, {H * S * S, S * S, S, 1});
  }
  CudnnObject row_numbers() { return graph_.inner(kF32, row_sizes(), row_strides()); }
  CudnnObject inner_rows(cudnnDataType_t type) {
    const int64_t H = a_.heads, S = a_.seq, C = a_.head_size;
    return graph_.inner(type, {a_.batch, H, S, C}, {H * S * C, S * C, C, 1});
  }
  CudnnObject inner_keys() {
    return graph_.inner(kBf16, {a_.batch, a_.kv_heads, a_.seq, a_.head_size},
                        {a_.kv[0], a_.kv[1], a_.kv[2], 1});
  }

  /// mode(x, b) as scores.
  CudnnObject scores_of(cudnnPointwiseMode_t mode, const CudnnObject& x, const CudnnObject* b = nullptr) {
    const CudnnObject y = scores();
    graph_.pointwise({mode, x, y, b});
    return y;
  }
  /// q k^T * scale, with the bias of ALiBi.
  CudnnObject scaled_scores(const CudnnObject& q, const CudnnObject& k) {
    const CudnnObject raw = scores();
    graph_.matmul(q, k, raw);
    const CudnnObject scaled = scores_of(CUDNN_POINTWISE_MUL, raw, &scale_);
    if (!a_.alibi) return scaled;
    const CudnnObject slopes = real(AttentionTensor::slopes, kF32,
                                    {a_.alibi_of_batch ? a_.batch : 1, a_.heads, 1, 1}, {a_.heads, 1, 1, 1});
    const CudnnObject query = index(scaled, 2), key = index(scaled, 3), distance = scores(kI32);
    graph_.pointwise({CUDNN_POINTWISE_SUB, key, distance, &query, nullptr, -1, kI32});
    const CudnnObject bias = scores_of(CUDNN_POINTWISE_MUL, distance, &slopes);
    return scores_of(CUDNN_POINTWISE_ADD, scaled, &bias);
  }
  /// -inf where the causal mask hides the key.
  CudnnObject masked(const CudnnObject& x) {
    if (!a_.causal) return x;
    const CudnnObject query = index(x, 2), key = index(x, 3), lowest = number(AttentionTensor::lowest);
    const CudnnObject seen = scores(CUDNN_DATA_BOOLEAN), y = scores();
    graph_.pointwise({CUDNN_POINTWISE_CMP_GE, query, seen, &key, nullptr, -1, kI32});
    graph_.pointwise({CUDNN_POINTWISE_BINARY_SELECT, x, y, &lowest, &seen});
    return y;
  }
  /// x with its last two sizes exchanged.
  CudnnObject transposed(const CudnnObject& x) {
    const int64_t H = a_.heads, S = a_.seq;
    const CudnnObject y = graph_.inner(kBf16, {a_.batch, H, S, S}, {H * S * S, S * S, 1, S});
    graph_.reshape(x, y);
    return y;
  }
  /// weights^T rows, summed over the query heads that share a key head.
  void reduce_to_keys(const CudnnObject& weights, const CudnnObject& rows, const CudnnObject& to) {
    if (a_.heads == a_.kv_heads) return graph_.matmul(transposed(weights), rows, to);
    const CudnnObject of_heads = inner_rows(kBf16);
    graph_.matmul(transposed(weights), rows, of_heads);
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, of_heads, to);
  }
  const CudnnObject& scale() const { return scale_; }

 private:
  CudnnObject real(AttentionTensor id, cudnnDataType_t type, const Sizes& sizes, const Sizes& strides) {
    return graph_.real(static_cast<int64_t>(id), type, sizes, strides);
  }
  Sizes row_sizes() const { return {a_.batch, a_.heads, a_.seq, 1}; }
  Sizes row_strides() const { return {a_.heads * a_.seq, a_.seq, 1, 1}; }
  CudnnObject index(const CudnnObject& like, int64_t axis) {
    const CudnnObject y = scores(kI32);
    graph_.pointwise({CUDNN_POINTWISE_GEN_INDEX, like, y, nullptr, nullptr, axis, kI32});
    return y;
  }

  const CudnnAttention& a_;
  CudnnGraph graph_;
  CudnnObject scale_;
};

}  // namespace

CudnnCalls cudnn_calls(const AttentionSpec& spec) {
  const int64_t B = spec.batch, S = spec.seq, H = spec.heads, G = spec.kv_heads, C = spec.head_size,
                per = H / G;
  const int64_t group = (per + 2) * C, row = G * group;
  CudnnCalls calls;
  CudnnAttention& a = calls.each;
  a = {.batch = B,
       .heads = H,
       .kv_heads = G,
       .seq = S,
       .head_size = C,
       .q = {S * row, G == 1 ? C : group, row},
       .kv = {S * row, group, row},
       .y = {S * H * C, C, H * C},
       .lse = {S * H, 1, H},
       .causal = spec.causal,
       .alibi = spec.alibi_slopes_H.defined()};
  if (G == 1 || per == 1) return calls;
  a.heads = per;
  a.kv_heads = 1;
  a.q[1] = C;
  if (B > G) {  // a call for each group
    calls = {a, G, group, per * C, per, per};
    return calls;
  }
  a.batch = G;
  a.q[0] = a.kv[0] = group;
  a.y[0] = per * C;
  a.lse[0] = per;
  a.alibi_of_batch = true;
  calls = {a, B, S * row, S * H * C, S * H, 0};
  return calls;
}

CudnnGraph attention_forward_graph(const CudnnAttention& a) {
  Builder b("forward", a);
  CudnnGraph& graph = b.graph();
  const CudnnObject q = b.rows(AttentionTensor::q, a.q), k = b.key_columns(AttentionTensor::k),
                    v = b.key_rows(AttentionTensor::v), y = b.rows(AttentionTensor::y, a.y), lse = b.lse();
  const CudnnObject scores = b.masked(b.scaled_scores(q, k));
  const CudnnObject most = b.row_numbers(), sum = b.row_numbers(), log = b.row_numbers();
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, most);
  const CudnnObject exponential =
      b.scores_of(CUDNN_POINTWISE_EXP, b.scores_of(CUDNN_POINTWISE_SUB, scores, &most));
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, exponential, sum);
  graph.pointwise({CUDNN_POINTWISE_LOG, sum, log});
  graph.pointwise({CUDNN_POINTWISE_ADD, most, lse, &log});
  const CudnnObject weights = b.scores(kBf16);
  graph.pointwise({CUDNN_POINTWISE_DIV, exponential, weights, &sum});
  graph.matmul(weights, v, y);
  return b.take();
}

CudnnGraph attention_backward_graph(const CudnnAttention& a) {
  Builder b("backward", a);
  CudnnGraph& graph = b.graph();
  const CudnnObject q = b.rows(AttentionTensor::q, a.q), k = b.key_columns(AttentionTensor::k),
                    v = b.key_columns(AttentionTensor::v), y = b.rows(AttentionTensor::y, a.y),
                    dy = b.rows(AttentionTensor::dy, a.y), lse = b.lse(), delta = b.delta(),
                    one = b.number(AttentionTensor::one);
  const CudnnObject products = b.inner_rows(kF32), sums = b.row_numbers();
  graph.pointwise({CUDNN_POINTWISE_MUL, dy, products, &y});
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, products, sums);
  graph.pointwise({CUDNN_POINTWISE_MUL, sums, delta, &one});

  const CudnnObject centred = b.scores_of(CUDNN_POINTWISE_SUB, b.scaled_scores(q, k), &lse);
  const CudnnObject weights = b.scores_of(CUDNN_POINTWISE_EXP, b.masked(centred));
  b.reduce_to_keys(weights, dy, b.key_rows(AttentionTensor::dv));

  const CudnnObject dweights = b.scores();
  graph.matmul(dy, v, dweights);
  const CudnnObject less = b.scores_of(CUDNN_POINTWISE_SUB, dweights, &delta);
  const CudnnObject dscores = b.scores_of(CUDNN_POINTWISE_MUL, less, &weights);
  const CudnnObject scaled = b.scores_of(CUDNN_POINTWISE_MUL, dscores, &b.scale());
  b.reduce_to_keys(scaled, q, b.key_rows(AttentionTensor::dk));

  const CudnnObject keys = b.inner_keys();
  graph.reshape(k, keys);
  graph.matmul(scaled, keys, b.rows(AttentionTensor::dq, a.q));
  return b.take();
}

}  // namespace shoal::cuda
