// CUDA kernels of core/ops/assignments.h.
#include "core/ops/assignments.h"

#include "core/backend/cuda/count.h"
#include "core/backend/cuda/fault.h"
#include "core/backend/cuda/map.h"
#include "core/backend/cuda/sort.h"

namespace shoal::cuda {
namespace {

/// Dropped assignments come last.
struct ExpertKey {
  const int32_t* ids;
  int64_t num_experts;
  SHOAL_DEVICE uint64_t operator()(int32_t n) const {
    const int32_t id = ids[n];
    return static_cast<uint64_t>(id < 0 || id >= num_experts ? num_experts : id);
  }
};

/// Row p is assignment order[p].
struct FillRows {
  static constexpr int kPack = 1;
  ExpertKey key;
  const int32_t* order;
  int64_t *slots, *rows, *choices;
  int64_t top_k;
  long long* faults;
  template <int N>
  SHOAL_DEVICE void at(int64_t p) const {
    const int32_t n = order[p];
    if (key.ids[n] < -1 || key.ids[n] >= key.num_experts) report_fault(faults, FaultKind::expert_id, n);
    const bool dropped = key(n) == static_cast<uint64_t>(key.num_experts);
    slots[n] = dropped ? -1 : p;
    if (dropped) return;
    rows[p] = n / top_k;
    choices[p] = n % top_k;
  }
};

void sort_assignments_impl(const SortAssignments& s) {
  const Device device = s.ids_TK.device();
  const int64_t count = s.ids_TK.numel(), num_experts = s.counts_E.numel();
  count_assignments(s.ids_TK, s.counts_E, {});
  const ExpertKey key{s.ids_TK.data<int32_t>(), num_experts};
  const Tensor order = sorted_order(device, count, key, key_bits(num_experts + 1));
  map(device, count, false,
      FillRows{key, order.data<int32_t>(), s.slots_TK.data<int64_t>(), s.row_N.data<int64_t>(),
               s.choice_N.data<int64_t>(), s.ids_TK.size(1), fault_record(device)});
}

/// A block of rows per block (of threads) in y.
__global__ void move_blocks_kernel(const int64_t* moves, int64_t num_moves, int64_t* index,
                                   int64_t* inverse) {
  for (int64_t b = blockIdx.y; b < num_moves; b += gridDim.y) {
    const int64_t from = moves[3 * b], to = moves[3 * b + 1], size = moves[3 * b + 2];
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size;
         i += int64_t{gridDim.x} * blockDim.x) {
      index[to + i] = from + i;
      inverse[from + i] = to + i;
    }
  }
}

void move_blocks_impl(const Tensor& moves_B3, const Tensor& index_R, const Tensor& inverse_R) {
  constexpr int kThreads = 256;
  constexpr int64_t kBlocksPerMove = 8;
  SHOAL_LAUNCH(
      (move_blocks_kernel), launch_shape(index_R.device(), kBlocksPerMove, kThreads, moves_B3.size(0)),
      moves_B3.data<int64_t>(), moves_B3.size(0), index_R.data<int64_t>(), inverse_R.data<int64_t>());
}

[[maybe_unused]] const bool added[] = {
    sort_assignments_fwd.add(DeviceType::cuda, &sort_assignments_impl),
    move_blocks.add(DeviceType::cuda, &move_blocks_impl),
};

}  // namespace
}  // namespace shoal::cuda
