// CUDA kernel of core/ops/cross_entropy.h: a block works on one token at a time, reads its logits twice and
// writes the gradient over them once.
#include "core/ops/cross_entropy.h"

#include <cmath>

#include "core/backend/cuda/block.h"
#include "core/backend/cuda/fault.h"
#include "core/backend/cuda/sum.h"

namespace shoal::cuda {
namespace {

#include "core/backend/functors/vector_math.inc"

constexpr int kMostThreads = 1024, kMostVocabThreads = 512;  // double logarithms take registers

template <class T>
struct Args {
  T* logits;
  const int32_t* labels;
  double* losses;
  int64_t num_tokens, vocab;
  Compute<T> scale;
  bool want_grad;
  long long* faults;
};

/// The largest of some values, and the sum of exp(value - largest).
template <class C>
struct Softmax {
  C top = -static_cast<C>(INFINITY), total = 0;
  SHOAL_DEVICE void add(C value) {
    if (value == -static_cast<C>(INFINITY))
      return;  // adds nothing, and is no start for the differences below
    if (value > top) {
      total *= fast_exp(top - value);
      top = value;
    }
    total += fast_exp(value - top);
  }
};

/// Of a whole row, for all threads of a block.
template <class T, int N, class C = Compute<T>>
SHOAL_DEVICE Softmax<C> row_softmax(const T* row, int64_t width, BlockMax<C>& block_max,
                                    BlockSums<C, 1>& block_sums) {
  Softmax<C> mine;
  for (int64_t v = int64_t{threadIdx.x} * N; v < width; v += int64_t{blockDim.x} * N) {
    const auto x = load<N>(row + v);
    for (int j = 0; j < N; j++) mine.add(x.v[j]);
  }
  const C top = block_max(mine.top, -static_cast<C>(INFINITY));
  C total[1] = {mine.top == top ? mine.total : mine.total * fast_exp(mine.top - top)};
  block_sums(total);
  return {top, total[0]};
}

// Thread t has the packs t, t + blockDim.x, ...: nobody else reads or writes them, but for the label's logit.
template <class T, int N>
__global__ void __launch_bounds__(kMostThreads) cross_entropy_kernel(Args<T> a) {
  using C = Compute<T>;
  using Sums = BlockSums<C, 1>;
  using Max = BlockMax<C>;
  SHOAL_SHARED(C, max_scratch, Max::kScratch);
  SHOAL_SHARED(C, sum_scratch, Sums::kScratch);
  Max block_max(max_scratch);
  Sums block_sums(sum_scratch);
  const int64_t start = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  for (int64_t t = blockIdx.x; t < a.num_tokens; t += gridDim.x) {
    T* row = a.logits + t * a.vocab;
    const int32_t label = a.labels[t];
    const bool ignored = label == kIgnoredLabel;
    if (ignored || label < 0 || label >= a.vocab) {
      if (threadIdx.x == 0) a.losses[t] = ignored ? 0.0 : static_cast<double>(NAN);
      if (threadIdx.x == 0 && !ignored) report_fault(a.faults, FaultKind::label, t);
      for (int64_t v = start; a.want_grad && v < a.vocab; v += step) store<N>(row + v, Pack<C, N>{});
      continue;
    }
    const C logit = threadIdx.x == 0 ? load<1>(row + label).v[0] : C(0);  // before anyone overwrites it
    const auto [top, total] = row_softmax<T, N>(row, a.vocab, block_max, block_sums);
    if (threadIdx.x == 0) {
      a.losses[t] =
          std::log(static_cast<double>(total)) + (static_cast<double>(top) - static_cast<double>(logit));
    }
    if (!a.want_grad) continue;
    const C factor = a.scale / total;
    for (int64_t v = start; v < a.vocab; v += step) {
      auto x = load<N>(row + v);
      for (int j = 0; j < N; j++) {
        x.v[j] = fast_exp(x.v[j] - top) * factor - (v + j == label ? a.scale : C(0));
      }
      store<N>(row + v, x);
    }
  }
}

void cross_entropy_fwd_impl(const CrossEntropy& args) {
  const Device device = args.logits_TV.device();
  const int64_t num_tokens = args.labels_T.numel(), vocab = args.logits_TV.row_size();
  const Tensor losses = Tensor::empty({num_tokens}, DType::f64, device);
  dispatch_storage(args.logits_TV.dtype(), "cross_entropy", [&]<class T>() {
    const Args<T> a{args.logits_TV.data<T>(),
                    args.labels_T.data<int32_t>(),
                    losses.data<double>(),
                    num_tokens,
                    vocab,
                    static_cast<Compute<T>>(args.scale),
                    args.want_grad,
                    fault_record(device)};
    const LaunchShape shape = launch_shape(device, num_tokens, threads_for(vocab / kPack<T>, kMostThreads));
    if (all_aligned({a.logits}) && vocab % kPack<T> == 0) {
      SHOAL_LAUNCH((cross_entropy_kernel<T, kPack<T>>), shape, a);
    } else {
      SHOAL_LAUNCH((cross_entropy_kernel<T, 1>), shape, a);
    }
  });
  add_sum(losses, args.total);
}

struct VocabArgs {
  const int32_t* labels;
  double *losses, *stats;  // stats: [parts, 3, num_tokens]
  int64_t num_tokens, parts, first, width, vocab;
  long long* faults;
  SHOAL_DEVICE double& stat(int64_t part, int which, int64_t t) const {
    return stats[(part * 3 + which) * num_tokens + t];
  }
};

VocabArgs vocab_args(const Tensor& logits_TV, const Tensor& labels_T, const TablePart& part,
                     const Tensor& stats, double* losses) {
  return {labels_T.data<int32_t>(),
          losses,
          stats.data<double>(),
          labels_T.numel(),
          stats.numel() / std::max<int64_t>(1, 3 * labels_T.numel()),
          part.first,
          logits_TV.row_size(),
          part.vocab,
          fault_record(logits_TV.device())};
}

template <class T, int N>
__global__ void __launch_bounds__(kMostThreads) vocab_stats_kernel(const T* logits, VocabArgs a) {
  using C = Compute<T>;
  using Sums = BlockSums<C, 1>;
  using Max = BlockMax<C>;
  SHOAL_SHARED(C, max_scratch, Max::kScratch);
  SHOAL_SHARED(C, sum_scratch, Sums::kScratch);
  Max block_max(max_scratch);
  Sums block_sums(sum_scratch);
  for (int64_t t = blockIdx.x; t < a.num_tokens; t += gridDim.x) {
    const T* row = logits + t * a.width;
    const auto [top, total] = row_softmax<T, N>(row, a.width, block_max, block_sums);
    if (threadIdx.x > 0) continue;
    const int32_t label = a.labels[t];
    const int64_t own = label - a.first;
    if (label != kIgnoredLabel && (label < 0 || label >= a.vocab))
      report_fault(a.faults, FaultKind::label, t);
    a.stat(0, 0, t) = static_cast<double>(top);
    a.stat(0, 1, t) = static_cast<double>(total);
    a.stat(0, 2, t) =
        label >= 0 && own >= 0 && own < a.width ? static_cast<double>(load<1>(row + own).v[0]) : 0.0;
  }
}

void vocab_stats_fwd_impl(const Tensor& logits_TV, const Tensor& labels_T, const TablePart& part,
                          const Tensor& stats_3T) {
  const VocabArgs a = vocab_args(logits_TV, labels_T, part, stats_3T, nullptr);
  dispatch_storage(logits_TV.dtype(), "cross_entropy", [&]<class T>() {
    const T* logits = logits_TV.data<T>();
    const LaunchShape shape =
        launch_shape(logits_TV.device(), a.num_tokens, threads_for(a.width / kPack<T>, kMostThreads));
    if (all_aligned({logits}) && a.width % kPack<T> == 0) {
      SHOAL_LAUNCH((vocab_stats_kernel<T, kPack<T>>), shape, logits, a);
    } else {
      SHOAL_LAUNCH((vocab_stats_kernel<T, 1>), shape, logits, a);
    }
  });
}

template <class T, int N>
__global__ void __launch_bounds__(kMostVocabThreads)
    vocab_cross_entropy_kernel(T* logits, VocabArgs a, double scale, bool want_grad) {
  using C = Compute<T>;
  const int64_t start = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  for (int64_t t = blockIdx.x; t < a.num_tokens; t += gridDim.x) {
    const int32_t label = a.labels[t];
    const bool ignored = label == kIgnoredLabel;
    double top = -static_cast<double>(INFINITY), total = 0, logit = 0;
    for (int64_t p = 0; p < a.parts; p++) top = a.stat(p, 0, t) > top ? a.stat(p, 0, t) : top;
    for (int64_t p = 0; p < a.parts; p++) {
      total += a.stat(p, 1, t) * std::exp(a.stat(p, 0, t) - top);
      logit += a.stat(p, 2, t);
    }
    const bool wrong = !ignored && (label < 0 || label >= a.vocab);  // was reported with its statistics
    if (threadIdx.x == 0)
      a.losses[t] = ignored ? 0.0 : wrong ? static_cast<double>(NAN) : std::log(total) + (top - logit);
    if (!want_grad) continue;
    T* row = logits + t * a.width;
    const C factor = static_cast<C>(scale / total), largest = static_cast<C>(top);
    const int64_t own = label - a.first;
    for (int64_t v = start; v < a.width; v += step) {
      auto x = load<N>(row + v);
      for (int j = 0; j < N; j++) {
        x.v[j] = ignored || wrong
                     ? C(0)
                     : fast_exp(x.v[j] - largest) * factor - (v + j == own ? static_cast<C>(scale) : C(0));
      }
      store<N>(row + v, x);
    }
  }
}

void vocab_cross_entropy_fwd_impl(const CrossEntropy& args, const TablePart& part, const Tensor& stats_P3T) {
  const Device device = args.logits_TV.device();
  const Tensor losses = Tensor::empty({args.labels_T.numel()}, DType::f64, device);
  const VocabArgs a = vocab_args(args.logits_TV, args.labels_T, part, stats_P3T, losses.data<double>());
  dispatch_storage(args.logits_TV.dtype(), "cross_entropy", [&]<class T>() {
    T* logits = args.logits_TV.data<T>();
    const LaunchShape shape =
        launch_shape(device, a.num_tokens, threads_for(a.width / kPack<T>, kMostVocabThreads));
    if (all_aligned({logits}) && a.width % kPack<T> == 0) {
      SHOAL_LAUNCH((vocab_cross_entropy_kernel<T, kPack<T>>), shape, logits, a, args.scale, args.want_grad);
    } else {
      SHOAL_LAUNCH((vocab_cross_entropy_kernel<T, 1>), shape, logits, a, args.scale, args.want_grad);
    }
  });
  add_sum(losses, args.total);
}

template <class T>
__global__ void expect_seed_kernel(const T* dloss, long long* faults) {
  if (threadIdx.x == 0 && !(dloss[0] == T(1))) report_fault(faults, FaultKind::loss_gradient, 0);
}

void expect_seed_impl(const Tensor& dloss) {
  const Device device = dloss.device();
  dispatch_float(dloss.dtype(), "expect_seed", [&]<class T>() {
    SHOAL_LAUNCH((expect_seed_kernel<T>), launch_shape(device, 1, 32), dloss.data<T>(), fault_record(device));
  });
}

[[maybe_unused]] const bool added[] = {
    cross_entropy_fwd.add(DeviceType::cuda, &cross_entropy_fwd_impl),
    vocab_stats_fwd.add(DeviceType::cuda, &vocab_stats_fwd_impl),
    vocab_cross_entropy_fwd.add(DeviceType::cuda, &vocab_cross_entropy_fwd_impl),
    expect_seed.add(DeviceType::cuda, &expect_seed_impl),
};

}  // namespace
}  // namespace shoal::cuda
