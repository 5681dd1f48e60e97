// CUDA kernels of core/ops/embedding.h.
#include "core/ops/embedding.h"

#include "core/backend/cuda/fault.h"
#include "core/backend/cuda/map.h"
#include "core/backend/cuda/sort.h"

namespace shoal::cuda {
namespace {

template <class T>
struct Lookup {
  static constexpr int kPack = cuda::kPack<T>;
  const T* weight;
  const int32_t* ids;
  T* y;
  int64_t first, num_rows, vocab, width;
  long long* faults;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const int32_t id = ids[row];
    T* to = y + row * width + column;
    const int64_t own = id - first;
    if (own >= 0 && own < num_rows) return copy<N>(to, weight + own * width + column);
    if (id >= 0 && id < vocab) return store<N>(to, Pack<Compute<T>, N>{});
    store_nan<N>(to);
    if (column == 0) report_fault(faults, FaultKind::embedding_id, row);
  }
};

void embedding_fwd_impl(const Tensor& weight, const Tensor& ids, const Tensor& y, const TablePart& part) {
  const int64_t width = weight.size(1);
  dispatch_storage(weight.dtype(), "embedding", [&]<class T>() {
    const T* from = weight.data<T>();
    T* to = y.data<T>();
    map_rows(y.device(), ids.numel(), width, all_aligned({from, to}),
             Lookup<T>{from, ids.data<int32_t>(), to, part.first, weight.size(0), part.vocab, width,
                       fault_record(y.device())});
  });
}

template <class Grad, class Sum>
struct BackwardArgs {
  const Grad* dy;
  const int32_t* ids;
  Sum* dweight;
  int64_t num_ids, first, num_rows, vocab, width;
  long long* faults;
};

/// Ids outside of the table come last.
struct IdKey {
  const int32_t* ids;
  int64_t vocab;
  SHOAL_DEVICE uint64_t operator()(int32_t t) const {
    const int32_t id = ids[t];
    return static_cast<uint64_t>(id < 0 || id >= vocab ? vocab : id);
  }
};

// order: the tokens sorted by id, those of an id in ascending order. A warp per token and 32 N columns adds
// the rows of all tokens of its id when the token is the first of them.
template <int N, class Grad, class Sum>
__global__ void embedding_bwd_kernel(BackwardArgs<Grad, Sum> a, const int32_t* order) {
  const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const int64_t column = (int64_t{blockIdx.y} * kWarp + lane) * N, stride = int64_t{gridDim.y} * kWarp * N;
  for (int64_t p = int64_t{blockIdx.x} * warps + threadIdx.x / kWarp; p < a.num_ids;
       p += int64_t{gridDim.x} * warps) {
    const int32_t id = a.ids[order[p]];
    if (id < 0 || id >= a.vocab) {
      if (lane == 0 && blockIdx.y == 0) report_fault(a.faults, FaultKind::embedding_id, order[p]);
      continue;
    }
    const int64_t own = id - a.first;
    if (own < 0 || own >= a.num_rows) continue;
    if (p > 0 && a.ids[order[p - 1]] == id) continue;
    for (int64_t d = column; d < a.width; d += stride) {
      Sum* to = a.dweight + own * a.width + d;
      auto sum = load<N>(to);
      for (int64_t q = p; q < a.num_ids; q++) {
        const int32_t t = order[q];
        if (q > p && a.ids[t] != id) break;
        const auto row = load<N>(a.dy + t * a.width + d);
        for (int j = 0; j < N; j++) sum.v[j] += static_cast<Sum>(row.v[j]);
      }
      store<N>(to, sum);
    }
  }
}

template <class Grad, class Sum>
void add_rows(const Tensor& dy, const Tensor& ids, const Tensor& dweight, const TablePart& part) {
  constexpr int kThreads = 256, kPack = std::min(cuda::kPack<Grad>, cuda::kPack<Sum>);
  const Device device = dy.device();
  const BackwardArgs<Grad, Sum> a{dy.data<Grad>(), ids.data<int32_t>(), dweight.data<Sum>(),
                                  ids.numel(),     part.first,          dweight.size(0),
                                  part.vocab,      dweight.size(1),     fault_record(device)};
  const Tensor order = sorted_order(device, a.num_ids, IdKey{a.ids, a.vocab}, key_bits(a.vocab + 1));
  const auto run = [&]<int N>() {
    const int threads = std::min(kThreads, launch_limits().block_threads);
    const int64_t warps = threads / static_cast<int>(kWarp), columns = int64_t{kWarp} * N;
    SHOAL_LAUNCH(
        (embedding_bwd_kernel<N, Grad, Sum>),
        launch_shape(device, (a.num_ids + warps - 1) / warps, threads, (a.width + columns - 1) / columns), a,
        order.data<int32_t>());
  };
  if (all_aligned({a.dy, a.dweight}) && a.width % kPack == 0) {
    run.template operator()<kPack>();
  } else {
    run.template operator()<1>();
  }
}

void embedding_bwd_impl(const Tensor& dy, const Tensor& ids, const Tensor& dweight, const TablePart& part) {
  if (dy.dtype() == DType::bf16) return add_rows<BFloat16, float>(dy, ids, dweight, part);
  dispatch_float(dy.dtype(), "embedding", [&]<class T>() { add_rows<T, T>(dy, ids, dweight, part); });
}

[[maybe_unused]] const bool added[] = {
    embedding_fwd.add(DeviceType::cuda, &embedding_fwd_impl),
    embedding_bwd.add(DeviceType::cuda, &embedding_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
