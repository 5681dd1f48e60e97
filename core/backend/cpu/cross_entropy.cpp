// CPU kernel of core/ops/cross_entropy.h.
#include "core/ops/cross_entropy.h"

#include <cmath>
#include <limits>

#include "core/backend/cpu/blocks.h"
#include "core/backend/cpu/isa.h"

SHOAL_KERNELS_BEGIN
#include "core/backend/functors/vector_math.inc"

using cpu::Compute;

template <class T>
Compute<T> row_max(const T* x, int64_t width) {
  using C = Compute<T>;
  C best = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : best)
  for (int64_t v = 0; v < width; v++) {
    const C value = static_cast<C>(x[v]);
    best = value > best ? value : best;
  }
  return best;
}

// Loss of one row; with kGrad the row becomes (softmax - onehot) * scale. exp is kept in the row between the
// two passes, except for bf16, where that would round twice.
template <bool kGrad, class T>
double cross_entropy_row(T* x, int64_t width, int32_t label, double scale) {
  using C = Compute<T>;
  constexpr bool kKeepExp = kGrad && std::is_same_v<T, C>;
  const C top = row_max(x, width);
  const C logit = static_cast<C>(x[label]);
  C total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t v = 0; v < width; v++) {
    const C e = fast_exp(static_cast<C>(x[v]) - top);
    if constexpr (kKeepExp) x[v] = e;
    total += e;
  }
  if constexpr (kGrad) {
    const C factor = static_cast<C>(scale) / total;
#pragma omp simd
    for (int64_t v = 0; v < width; v++) {
      if constexpr (kKeepExp) {
        x[v] *= factor;
      } else {
        const C onehot = v == label ? static_cast<C>(scale) : C(0);
        x[v] = fast_exp(static_cast<C>(x[v]) - top) * factor - onehot;
      }
    }
    if constexpr (kKeepExp) x[label] -= static_cast<C>(scale);
  }
  return std::log(static_cast<double>(total)) + (static_cast<double>(top) - static_cast<double>(logit));
}

void check_labels(const int32_t* labels, int64_t num_tokens, int64_t vocab) {
  for (int64_t t = 0; t < num_tokens; t++) {
    SHOAL_CHECK(labels[t] == kIgnoredLabel || (labels[t] >= 0 && labels[t] < vocab),
                "cross_entropy: expected labels in [0, ", vocab, ") or ", kIgnoredLabel, " (ignored), got ",
                labels[t], " at token ", t, "; does the tokenizer's vocabulary fit the model's?");
  }
}

void cross_entropy_fwd_impl(const CrossEntropy& args) {
  const int64_t num_tokens = args.labels_T.numel(), vocab = args.logits_TV.row_size();
  const int32_t* labels = args.labels_T.data<int32_t>();
  check_labels(labels, num_tokens, vocab);
  const Tensor losses_T = Tensor::empty({num_tokens}, DType::f64);
  double* losses = losses_T.data<double>();
  dispatch_storage(args.logits_TV.dtype(), "cross_entropy", [&]<class T>() {
    T* logits = args.logits_TV.data<T>();
    const auto rows = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        T* row = logits + t * vocab;
        if (labels[t] == kIgnoredLabel) {
          losses[t] = 0;
          if (args.want_grad) std::fill(row, row + vocab, T(0));
        } else if (args.want_grad) {
          losses[t] = cross_entropy_row<true>(row, vocab, labels[t], args.scale);
        } else {
          losses[t] = cross_entropy_row<false>(row, vocab, labels[t], args.scale);
        }
      }
    };
    cpu::parallel_rows(num_tokens, vocab, rows);
  });
  double total = 0;
  for (int64_t t = 0; t < num_tokens; t++) total += losses[t];
  args.total.data<double>()[0] += total;
}

template <class T>
void vocab_stats(const Tensor& logits_TV, const int32_t* labels, int64_t first, double* stats) {
  using C = Compute<T>;
  const T* logits = logits_TV.data<T>();
  const int64_t num_tokens = logits_TV.num_rows(), width = logits_TV.row_size();
  cpu::parallel_rows(num_tokens, width, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const T* row = logits + t * width;
      const C top = row_max(row, width);
      C total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t v = 0; v < width; v++) total += fast_exp(static_cast<C>(row[v]) - top);
      if (top == -std::numeric_limits<C>::infinity()) total = 0;  // no probability in this part
      const int64_t own = labels[t] - first;
      stats[t] = static_cast<double>(top);
      stats[num_tokens + t] = static_cast<double>(total);
      stats[2 * num_tokens + t] =
          labels[t] >= 0 && own >= 0 && own < width ? static_cast<double>(static_cast<C>(row[own])) : 0;
    }
  });
}

void vocab_stats_fwd_impl(const Tensor& logits_TV, const Tensor& labels_T, const TablePart& part,
                          const Tensor& stats_3T) {
  const int32_t* labels = labels_T.data<int32_t>();
  check_labels(labels, labels_T.numel(), part.vocab);
  dispatch_storage(logits_TV.dtype(), "cross_entropy", [&]<class T>() {
    vocab_stats<T>(logits_TV, labels, part.first, stats_3T.data<double>());
  });
}

/// The statistics of one token over all parts.
struct TokenStats {
  double top = -std::numeric_limits<double>::infinity(), total = 0, logit = 0;
  TokenStats(const double* stats, int64_t parts, int64_t num_tokens, int64_t t) {
    const auto of = [&](int64_t part, int64_t which) { return stats[(part * 3 + which) * num_tokens + t]; };
    for (int64_t p = 0; p < parts; p++) top = std::max(top, of(p, 0));
    for (int64_t p = 0; p < parts; p++) {
      total += of(p, 1) * std::exp(of(p, 0) - top);
      logit += of(p, 2);
    }
  }
};

void vocab_cross_entropy_fwd_impl(const CrossEntropy& args, const TablePart& part, const Tensor& stats_P3T) {
  const int64_t num_tokens = args.labels_T.numel(), width = args.logits_TV.row_size(), first = part.first;
  const int64_t parts = stats_P3T.size(0);
  const int32_t* labels = args.labels_T.data<int32_t>();
  const double* stats = stats_P3T.data<double>();
  const Tensor losses_T = Tensor::empty({num_tokens}, DType::f64);
  double* losses = losses_T.data<double>();
  dispatch_storage(args.logits_TV.dtype(), "cross_entropy", [&]<class T>() {
    using C = Compute<T>;
    T* logits = args.logits_TV.data<T>();
    cpu::parallel_rows(num_tokens, width, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const bool ignored = labels[t] == kIgnoredLabel;
        const TokenStats s(stats, parts, num_tokens, t);
        losses[t] = ignored ? 0 : std::log(s.total) + (s.top - s.logit);
        if (!args.want_grad) continue;
        T* row = logits + t * width;
        if (ignored) {
          std::fill(row, row + width, T(0));
          continue;
        }
        const C top = static_cast<C>(s.top), factor = static_cast<C>(args.scale / s.total);
        const int64_t own = labels[t] - first;
        const C scale = static_cast<C>(args.scale);
#pragma omp simd
        for (int64_t v = 0; v < width; v++)
          row[v] = fast_exp(static_cast<C>(row[v]) - top) * factor - (v == own ? scale : C(0));
      }
    });
  });
  double total = 0;
  for (int64_t t = 0; t < num_tokens; t++) total += losses[t];
  args.total.data<double>()[0] += total;
}

void expect_seed_impl(const Tensor& dloss) {
  const double factor = dloss.item();
  SHOAL_CHECK(factor == 1,
              "linear_cross_entropy: the weight's gradient was added in forward for a loss that is "
              "backward's seed; got an upstream gradient of ",
              factor, "; pass the factor as `scale`");
}

const bool added[] = {
    cross_entropy_fwd.add(DeviceType::cpu, &cross_entropy_fwd_impl, kIsaLevel),
    vocab_stats_fwd.add(DeviceType::cpu, &vocab_stats_fwd_impl, kIsaLevel),
    vocab_cross_entropy_fwd.add(DeviceType::cpu, &vocab_cross_entropy_fwd_impl, kIsaLevel),
    expect_seed.add(DeviceType::cpu, &expect_seed_impl, kIsaLevel),
};

SHOAL_KERNELS_END
