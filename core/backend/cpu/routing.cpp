// CPU kernel of route_fwd in core/ops/routing.h: scores, selection, weights, auxiliary losses. Tokens are
// independent; losses are added in double in token order.
#include "core/ops/routing.h"

#include <cmath>
#include <limits>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/cpu/routing_common.inc"

template <class T>
T max_of(const T* x, int64_t n) {
  T best = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// p = softmax(logits); returns logsumexp. p may be null (only the logsumexp is wanted).
template <class T>
T softmax_row(const T* logits, T* p, int64_t n) {
  const T top = max_of(logits, n);
  T total = 0;
  if (p == nullptr) {
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += fast_exp(logits[i] - top);
    return top + std::log(total);
  }
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; i++) {
    const T e = fast_exp(logits[i] - top);
    p[i] = e;
    total += e;
  }
  const T inverse = T(1) / total;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) p[i] *= inverse;
  return top + std::log(total);
}

// Scores of one token.
template <class T>
void score_row(const T* logits, T* scores, int64_t n, RouterScore kind) {
  if (kind == RouterScore::sigmoid) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) scores[i] = T(1) / (T(1) + fast_exp(-logits[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) scores[i] = std::sqrt(softplus(logits[i]));
  }
}

// Entropy of p = scores / sum of scores.
template <class T>
double entropy_row(const T* scores, int64_t n) {
  const T inverse = T(1) / (sum_of(scores, n) + kFloor<T>);
  T total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; i++) {
    const T p = scores[i] * inverse;
    total -= p >= std::numeric_limits<T>::min() ? p * log_of(p) : T(0);
  }
  return total;
}

// The best k of the values offered in ascending index order: value descending, then index ascending.
template <class T>
struct Best {
  explicit Best(int64_t k) : limit(k) {}
  int64_t limit, count = 0;
  T values[kMaxTopK];
  int32_t ids[kMaxTopK];

  void offer(T value, int64_t id) {
    if (!(value == value)) value = -std::numeric_limits<T>::infinity();
    if (count == limit && !(value > values[count - 1])) return;
    int64_t at = count < limit ? count++ : count - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = static_cast<int32_t>(id);
  }

  /// Offers scores[i] + bias[i] for i in [begin, end), looking closer only at runs that hold a better value.
  void offer_range(const T* scores, const T* bias, int64_t begin, int64_t end) {
    constexpr int64_t kRun = 16;
    for (int64_t run = begin; run < end; run += kRun) {
      const int64_t run_end = std::min(run + kRun, end);
      if (count == limit) {
        T top = -std::numeric_limits<T>::infinity();
        const T threshold = values[count - 1];
#pragma omp simd reduction(max : top)
        for (int64_t i = run; i < run_end; i++) {
          const T v = scores[i] + bias[i];
          top = v > top ? v : top;
        }
        if (!(top > threshold)) continue;
      }
      for (int64_t i = run; i < run_end; i++) offer(scores[i] + bias[i], i);
    }
  }
};

template <class T>
void choose(const T* scores, const T* bias, int64_t num_experts, const RouteSpec& spec, Best<T>& chosen) {
  if (spec.num_groups <= 1) return chosen.offer_range(scores, bias, 0, num_experts);
  const int64_t size = num_experts / spec.num_groups;
  Best<T> groups(spec.top_groups);
  for (int64_t g = 0; g < spec.num_groups; g++) {
    Best<T> best(std::min(spec.group_score_top, size));
    best.offer_range(scores, bias, g * size, (g + 1) * size);
    T total = 0;
    for (int64_t i = 0; i < best.count; i++) total += best.values[i];
    groups.offer(total, g);
  }
  std::sort(groups.ids, groups.ids + groups.count);
  for (int64_t i = 0; i < groups.count; i++) {
    const int64_t g = groups.ids[i];
    chosen.offer_range(scores, bias, g * size, (g + 1) * size);
  }
}

// Gate weights of one token from its unbiased scores.
template <class T>
void weigh(const T* scores, const int32_t* ids, const RouteSpec& spec, T* weights) {
  T total = 0;
  for (int64_t k = 0; k < spec.top_k; k++) {
    weights[k] = scores[ids[k]];
    total += weights[k];
  }
  // Divided one by one: a single choice weighs 1, to the bit, and equals those of other tokens.
  const T scale = static_cast<T>(spec.weight_scale), divisor = spec.normalize ? total + kFloor<T> : T(1);
  for (int64_t k = 0; k < spec.top_k; k++) weights[k] = weights[k] / divisor * scale;
}

// Everything about one rank's tokens that the row functions need.
template <class T>
struct RouteRows {
  const T* logits;
  const T* bias;  // never null; zeros without a bias
  const uint8_t* valid;
  int32_t* ids;
  T *weights, *scores, *lse;
  double* entropy;  // per token
  int64_t num_experts;
  const RouteSpec* spec;

  void clear(int64_t t) const {
    const int64_t k = spec->top_k;
    std::fill(ids + t * k, ids + (t + 1) * k, -1);
    std::fill(weights + t * k, weights + (t + 1) * k, T(0));
    std::fill(scores + t * num_experts, scores + (t + 1) * num_experts, T(0));
    if (lse != nullptr) lse[t] = 0;
    entropy[t] = 0;
  }

  void route(int64_t t) const {
    if (valid != nullptr && valid[t] == 0) return clear(t);
    const int64_t k = spec->top_k;
    const T* x = logits + t * num_experts;
    T* s = scores + t * num_experts;
    if (spec->score == RouterScore::softmax) {
      const T log_sum = softmax_row(x, s, num_experts);
      if (lse != nullptr) lse[t] = log_sum;
    } else {
      score_row(x, s, num_experts, spec->score);
      if (lse != nullptr) lse[t] = softmax_row<T>(x, nullptr, num_experts);
    }
    entropy[t] = entropy_row(s, num_experts);
    Best<T> chosen(k);
    choose(s, bias, num_experts, *spec, chosen);
    std::copy(chosen.ids, chosen.ids + k, ids + t * k);
    weigh(s, ids + t * k, *spec, weights + t * k);
  }
};

// f[g][i] = assignments of i in g / (k * valid tokens of g); counts over all groups.
template <class T>
void count_assignments(const RouteForward& a, const RouteSpec& spec, const BalanceSpec& balance) {
  const int64_t num_tokens = a.logits_TE.num_rows(), num_experts = a.logits_TE.row_size(), k = spec.top_k;
  const int32_t* ids = a.ids_TK.data<int32_t>();
  int64_t* counts = a.counts_E.data<int64_t>();
  std::fill(counts, counts + num_experts, 0);
  for (int64_t n = 0; n < num_tokens * k; n++) {
    if (ids[n] >= 0) counts[ids[n]]++;
  }
  if (!a.frequency_GE.defined() || balance.frequency_E.defined()) return;
  T* frequency = a.frequency_GE.data<T>();
  const int64_t num_groups = a.frequency_GE.num_rows();
  const int64_t group_slots = num_groups == 0 ? 0 : num_tokens / num_groups * k;
  for (int64_t g = 0; g < num_groups; g++) {
    T* f = frequency + g * num_experts;
    std::fill(f, f + num_experts, T(0));
    int64_t assigned = 0;  // k * valid tokens
    for (int64_t n = g * group_slots; n < (g + 1) * group_slots; n++) {
      if (ids[n] < 0) continue;
      f[ids[n]] += 1;
      assigned++;
    }
    for (int64_t e = 0; e < num_experts && assigned > 0; e++) f[e] /= static_cast<T>(assigned);
  }
}

// sum over tokens, in order, of sum_i f_i p_i.
template <class T>
double balance_sum(const RouteForward& a, const RouteSpec& spec, double* per_token_T) {
  const int64_t num_tokens = a.logits_TE.num_rows(), n = a.logits_TE.row_size();
  const T* scores = a.scores_TE.data<T>();
  const FrequencyRows<T> frequency(a.frequency_GE, num_tokens, n);
  cpu::parallel_rows(num_tokens, n, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T *s = scores + t * n, *f = frequency.row(t);
      T dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t i = 0; i < n; i++) dot += f[i] * s[i];
      per_token_T[t] = spec.score == RouterScore::softmax ? dot : dot / (sum_of(s, n) + kFloor<T>);
    }
  });
  double total = 0;
  for (int64_t t = 0; t < num_tokens; t++) total += per_token_T[t];
  return total;
}

template <class T>
void route_fwd_typed(const RouteForward& a, const RouteSpec& spec, const BalanceSpec& balance) {
  const int64_t num_tokens = a.logits_TE.num_rows(), num_experts = a.logits_TE.row_size();
  const Tensor bias = Tensor::zeros({num_experts}, dtype_of<T>);
  if (a.bias_E.defined()) {
    dispatch_float(a.bias_E.dtype(), "route: bias", [&]<class B>() {
      for (int64_t e = 0; e < num_experts; e++) bias.data<T>()[e] = static_cast<T>(a.bias_E.data<B>()[e]);
    });
  }
  const Tensor scratch_T = Tensor::empty({num_tokens}, DType::f64);
  double* scratch = scratch_T.data<double>();
  const RouteRows<T> rows{a.logits_TE.data<T>(),
                          bias.data<T>(),
                          a.valid_T.defined() ? a.valid_T.data<uint8_t>() : nullptr,
                          a.ids_TK.data<int32_t>(),
                          a.weights_TK.data<T>(),
                          a.scores_TE.data<T>(),
                          a.lse_T.defined() ? a.lse_T.data<T>() : nullptr,
                          scratch,
                          num_experts,
                          &spec};
  cpu::parallel_rows(num_tokens, 8 * num_experts, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) rows.route(t);
  });
  count_assignments<T>(a, spec, balance);
  double entropy = 0;
  for (int64_t t = 0; t < num_tokens; t++) entropy += scratch[t];
  a.entropy.data<double>()[0] = entropy;
  if (a.z_loss.defined()) {
    double total = 0;
    for (int64_t t = 0; t < num_tokens; t++) total += static_cast<double>(rows.lse[t]) * rows.lse[t];
    a.z_loss.data<T>()[0] = static_cast<T>(balance.per_token(balance.z_coeff) * total);
  }
  if (a.aux_loss.defined()) {
    a.aux_loss.data<T>()[0] =
        static_cast<T>(balance.per_token(balance.aux_coeff * static_cast<double>(num_experts)) *
                       balance_sum<T>(a, spec, scratch));
  }
}

void route_fwd_impl(const RouteForward& a, const RouteSpec& spec, const BalanceSpec& balance) {
  dispatch_float(a.logits_TE.dtype(), "route", [&]<class T>() { route_fwd_typed<T>(a, spec, balance); });
}

const bool added = route_fwd.add(DeviceType::cpu, &route_fwd_impl, kIsaLevel);

SHOAL_KERNELS_END
