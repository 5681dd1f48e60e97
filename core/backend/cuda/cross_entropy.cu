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

constexpr int kMostThreads = 1024;

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
    Softmax<C> mine;
    for (int64_t v = start; v < a.vocab; v += step) {
      const auto x = load<N>(row + v);
      for (int j = 0; j < N; j++) mine.add(x.v[j]);
    }
    const C top = block_max(mine.top, -static_cast<C>(INFINITY));
    C total[1] = {mine.top == top ? mine.total : mine.total * fast_exp(mine.top - top)};
    block_sums(total);
    if (threadIdx.x == 0) {
      a.losses[t] =
          std::log(static_cast<double>(total[0])) + (static_cast<double>(top) - static_cast<double>(logit));
    }
    if (!a.want_grad) continue;
    const C factor = a.scale / total[0];
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
    expect_seed.add(DeviceType::cuda, &expect_seed_impl),
};

}  // namespace
}  // namespace shoal::cuda
