// CUDA kernels of core/ops/embedding.h.
#include "core/ops/embedding.h"

#include "core/backend/cuda/fault.h"
#include "core/backend/cuda/map.h"

namespace shoal::cuda {
namespace {

template <class T>
struct Lookup {
  static constexpr int kPack = cuda::kPack<T>;
  const T* weight;
  const int32_t* ids;
  T* y;
  int64_t vocab, width;
  long long* faults;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const int32_t id = ids[row];
    T* to = y + row * width + column;
    if (id >= 0 && id < vocab) return copy<N>(to, weight + id * width + column);
    store_nan<N>(to);
    if (column == 0) report_fault(faults, FaultKind::embedding_id, row);
  }
};

void embedding_fwd_impl(const Tensor& weight, const Tensor& ids, const Tensor& y) {
  const int64_t width = weight.size(1);
  dispatch_storage(weight.dtype(), "embedding", [&]<class T>() {
    const T* from = weight.data<T>();
    T* to = y.data<T>();
    map_rows(y.device(), ids.numel(), width, all_aligned({from, to}),
             Lookup<T>{from, ids.data<int32_t>(), to, weight.size(0), width, fault_record(y.device())});
  });
}

template <class Grad, class Sum>
struct BackwardArgs {
  const Grad* dy;
  const int32_t* ids;
  Sum* dweight;
  int64_t num_ids, vocab, width;
  long long* faults;
};

// The block of the first token of an id adds the rows of all its tokens, in ascending order. Tokens are
// searched blockDim.x at a time; which of them have the id is written to `found`, whose halves are used in
// turn.
template <class Grad, class Sum>
__global__ void embedding_bwd_kernel(BackwardArgs<Grad, Sum> a) {
  SHOAL_SHARED(unsigned, found, 2 * kMaxWarps);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  unsigned turn = 0;
  for (int64_t t = blockIdx.x; t < a.num_ids; t += gridDim.x) {
    const int32_t id = a.ids[t];
    if (id < 0 || id >= a.vocab) {
      if (threadIdx.x == 0) report_fault(a.faults, FaultKind::embedding_id, t);
      continue;
    }
    bool earlier = false;
    for (int64_t i = threadIdx.x; i < t; i += blockDim.x) earlier = earlier || a.ids[i] == id;
    if (__syncthreads_or(earlier ? 1 : 0) != 0) continue;
    for (int64_t base = t; base < a.num_ids; base += blockDim.x) {
      const int64_t i = base + threadIdx.x;
      const unsigned votes = __ballot_sync(kAllLanes, i < a.num_ids && a.ids[i] == id ? 1 : 0);
      unsigned* area = found + turn * kMaxWarps;
      turn ^= 1U;
      if (lane == 0) area[warp] = votes;
      __syncthreads();
      unsigned any = 0;
      for (unsigned w = 0; w < num_warps; w++) any |= area[w];
      if (any == 0) continue;
      for (int64_t d = threadIdx.x; d < a.width; d += blockDim.x) {
        Sum sum = a.dweight[id * a.width + d];
        for (unsigned w = 0; w < num_warps; w++) {
          for (unsigned bits = area[w]; bits != 0; bits &= bits - 1) {
            const int64_t from = base + w * kWarp + static_cast<unsigned>(__ffs(bits) - 1);
            sum += static_cast<Sum>(load<1>(a.dy + from * a.width + d).v[0]);
          }
        }
        a.dweight[id * a.width + d] = sum;
      }
    }
  }
}

template <class Grad, class Sum>
void add_rows(const Tensor& dy, const Tensor& ids, const Tensor& dweight) {
  constexpr int kMostThreads = 256;
  const BackwardArgs<Grad, Sum> a{dy.data<Grad>(), ids.data<int32_t>(), dweight.data<Sum>(),      ids.numel(),
                                  dweight.size(0), dweight.size(1),     fault_record(dy.device())};
  SHOAL_LAUNCH((embedding_bwd_kernel<Grad, Sum>),
               launch_shape(dy.device(), a.num_ids, threads_for(a.width, kMostThreads)), a);
}

void embedding_bwd_impl(const Tensor& dy, const Tensor& ids, const Tensor& dweight) {
  if (dy.dtype() == DType::bf16) return add_rows<BFloat16, float>(dy, ids, dweight);
  dispatch_float(dy.dtype(), "embedding", [&]<class T>() { add_rows<T, T>(dy, ids, dweight); });
}

[[maybe_unused]] const bool added[] = {
    embedding_fwd.add(DeviceType::cuda, &embedding_fwd_impl),
    embedding_bwd.add(DeviceType::cuda, &embedding_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
