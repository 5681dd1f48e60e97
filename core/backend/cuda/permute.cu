// CUDA kernels of core/ops/permute.h. Every output element is summed by one thread, in a fixed order.
#include "core/ops/permute.h"

#include "core/backend/cuda/fault.h"
#include "core/backend/cuda/map.h"

namespace shoal::cuda {
namespace {

template <class T>
struct Gather {
  static constexpr int kPack = cuda::kPack<T>;
  const T* x;
  const int64_t* index;
  T* y;
  int64_t num_rows, width;  // num_rows: of x
  long long* faults;
  template <int N>
  SHOAL_DEVICE void at(int64_t row, int64_t column) const {
    const int64_t from = index[row];
    T* to = y + row * width + column;
    if (from >= 0 && from < num_rows) return copy<N>(to, x + from * width + column);
    if (from == -1) return store<N>(to, Pack<Compute<T>, N>{});
    store_nan<N>(to);
    if (column == 0) report_fault(faults, FaultKind::gather_row, row);
  }
};

void gather_rows_fwd_impl(const Tensor& x, const Tensor& index, const Tensor& y) {
  dispatch_storage(x.dtype(), "gather_rows", [&]<class T>() {
    const T* from = x.data<T>();
    T* to = y.data<T>();
    map_rows(x.device(), index.numel(), x.row_size(), all_aligned({from, to}),
             Gather<T>{from, index.data<int64_t>(), to, x.size(0), x.row_size(), fault_record(x.device())});
  });
}

template <class T>
struct Combine {
  static constexpr int kPack = cuda::kPack<T>;
  const T* x;
  const Compute<T>* weights;  // null: all ones
  const int64_t* slots;
  T* y;
  int64_t num_rows, top_k, width;  // num_rows: of x
  long long* faults;
  template <int N>
  SHOAL_DEVICE void at(int64_t token, int64_t column) const {
    Pack<Compute<T>, N> sum{};
    T* to = y + token * width + column;
    for (int64_t k = token * top_k; k < (token + 1) * top_k; k++) {
      const int64_t slot = slots[k];
      if (slot == -1) continue;
      if (slot < 0 || slot >= num_rows) {
        if (column == 0) report_fault(faults, FaultKind::combine_slot, k);
        return store_nan<N>(to);
      }
      const Compute<T> weight = weights == nullptr ? Compute<T>(1) : weights[k];
      const auto values = load<N>(x + slot * width + column);
      for (int j = 0; j < N; j++) sum.v[j] += weight * values.v[j];
    }
    store<N>(to, sum);
  }
};

void combine_rows_fwd_impl(const Tensor& x, const Tensor& weights, const Tensor& slots, const Tensor& y) {
  dispatch_storage(x.dtype(), "combine_rows", [&]<class T>() {
    const T* from = x.data<T>();
    T* to = y.data<T>();
    map_rows(y.device(), slots.size(0), y.row_size(), all_aligned({from, to}),
             Combine<T>{from, data_or_null<Compute<T>>(weights), slots.data<int64_t>(), to, x.size(0),
                        slots.size(1), y.row_size(), fault_record(y.device())});
  });
}

template <class T>
struct BackwardArgs {
  using C = Compute<T>;
  const T *dy, *x;
  const C* weights;  // null: all ones
  const int64_t *tokens, *choices;
  T* dx;        // may be x; null: not wanted
  C* dweights;  // null: not wanted
  int64_t num_rows, num_tokens, top_k, width;
  long long* faults;
};

// A routed row per block and time. Every thread reads and writes its own columns of x and dx.
template <class T, int N>
__global__ void combine_bwd_kernel(BackwardArgs<T> a) {
  using C = Compute<T>;
  using Sums = BlockSums<C, 1>;
  SHOAL_SHARED(C, scratch, Sums::kScratch);
  Sums block_sums(scratch);
  const int64_t start = int64_t{threadIdx.x} * N, step = int64_t{blockDim.x} * N;
  for (int64_t n = blockIdx.x; n < a.num_rows; n += gridDim.x) {
    const int64_t token = a.tokens[n], choice = a.choices[n];
    if (token == -1) {  // no token's: nothing flows back
      for (int64_t d = start; a.dx != nullptr && d < a.width; d += step)
        store<N>(a.dx + n * a.width + d, Pack<C, N>{});
      continue;
    }
    const bool wrong = token < 0 || token >= a.num_tokens || choice < 0 || choice >= a.top_k;
    if (wrong) {
      if (threadIdx.x == 0) report_fault(a.faults, FaultKind::combine_row, n);
      for (int64_t d = start; a.dx != nullptr && d < a.width; d += step) store_nan<N>(a.dx + n * a.width + d);
      continue;
    }
    const int64_t slot = token * a.top_k + choice;
    const T *dy = a.dy + token * a.width, *x = a.x + n * a.width;
    if (a.dweights != nullptr) {
      C dot[1] = {0};
      for (int64_t d = start; d < a.width; d += step) {
        const auto grad = load<N>(dy + d), value = load<N>(x + d);
        for (int j = 0; j < N; j++) dot[0] += grad.v[j] * value.v[j];
      }
      block_sums(dot);
      if (threadIdx.x == 0) a.dweights[slot] = dot[0];
    }
    if (a.dx == nullptr) continue;
    const C weight = a.weights == nullptr ? C(1) : a.weights[slot];
    for (int64_t d = start; d < a.width; d += step) {
      auto grad = load<N>(dy + d);
      for (int j = 0; j < N; j++) grad.v[j] *= weight;
      store<N>(a.dx + n * a.width + d, grad);
    }
  }
}

template <class T>
void combine_bwd(const CombineBackward& args) {
  constexpr int kMostThreads = 512;
  const Device device = args.dy_TD.device();
  const BackwardArgs<T> a{args.dy_TD.data<T>(),
                          args.x_ND.data<T>(),
                          data_or_null<Compute<T>>(args.weights_TK),
                          args.row_N.data<int64_t>(),
                          args.choice_N.data<int64_t>(),
                          data_or_null<T>(args.dx_ND),
                          data_or_null<Compute<T>>(args.dweights_TK),
                          args.row_N.numel(),
                          args.slots_TK.size(0),
                          args.slots_TK.size(1),
                          args.x_ND.row_size(),
                          fault_record(device)};
  if (a.dweights != nullptr) args.dweights_TK.set_zero();  // for slots of -1
  const LaunchShape shape = launch_shape(device, a.num_rows, threads_for(a.width / kPack<T>, kMostThreads));
  if (all_aligned({a.dy, a.x, a.dx}) && a.width % kPack<T> == 0) {
    SHOAL_LAUNCH((combine_bwd_kernel<T, kPack<T>>), shape, a);
  } else {
    SHOAL_LAUNCH((combine_bwd_kernel<T, 1>), shape, a);
  }
}

void combine_rows_bwd_impl(const CombineBackward& args) {
  dispatch_storage(args.x_ND.dtype(), "combine_rows", [&]<class T>() { combine_bwd<T>(args); });
}

[[maybe_unused]] const bool added[] = {
    gather_rows_fwd.add(DeviceType::cuda, &gather_rows_fwd_impl),
    combine_rows_fwd.add(DeviceType::cuda, &combine_rows_fwd_impl),
    combine_rows_bwd.add(DeviceType::cuda, &combine_rows_bwd_impl),
};

}  // namespace
}  // namespace shoal::cuda
