// CUDA kernels of core/ops/assignments.h.
#include "core/ops/assignments.h"

#include "core/backend/cuda/count.h"
#include "core/backend/cuda/fault.h"
#include "core/backend/cuda/map.h"
#include "core/backend/cuda/sort.h"

namespace shoal::cuda {
namespace {

/// The place of an expert in the order; dropped assignments come last.
struct ExpertKey {
  const int32_t *ids, *place;  // place: null: experts are in order
  int64_t num_experts;
  SHOAL_DEVICE uint64_t of(int64_t expert) const {
    return static_cast<uint64_t>(place == nullptr ? expert : place[expert]);
  }
  SHOAL_DEVICE uint64_t operator()(int32_t n) const {
    const int32_t id = ids[n];
    return id < 0 || id >= num_experts ? static_cast<uint64_t>(num_experts) : of(id);
  }
};

/// The first sorted assignment of each place: for as few as there are experts, a sum for each.
struct FillStarts {
  static constexpr int kPack = 1;
  ExpertKey key;
  const int64_t* counts;
  int64_t* starts;
  template <int N>
  SHOAL_DEVICE void at(int64_t expert) const {
    const uint64_t place = key.of(expert);
    int64_t before = 0;
    for (int64_t other = 0; other < key.num_experts; other++)
      before += key.of(other) < place ? counts[other] : 0;
    starts[place] = before;
  }
};

struct FillUnused {
  static constexpr int kPack = 1;
  int64_t *rows, *choices;
  template <int N>
  SHOAL_DEVICE void at(int64_t n) const {
    rows[n] = choices[n] = -1;
  }
};

/// Assignment order[p] goes to row p, or to a row of its expert's own.
struct FillRows {
  static constexpr int kPack = 1;
  ExpertKey key;
  const int32_t* order;
  const int64_t* starts;  // of each place; used with rows_each
  int64_t *slots, *rows, *choices;
  int64_t top_k, rows_each;
  long long* faults;
  template <int N>
  SHOAL_DEVICE void at(int64_t p) const {
    const int32_t n = order[p];
    if (key.ids[n] < -1 || key.ids[n] >= key.num_experts) report_fault(faults, FaultKind::expert_id, n);
    const auto place = static_cast<int64_t>(key(n));
    int64_t row = place == key.num_experts ? -1 : p;
    if (row >= 0 && rows_each > 0) {
      const int64_t of_expert = p - starts[place];
      row = of_expert < rows_each ? place * rows_each + of_expert : -1;
      if (row < 0) report_fault(faults, FaultKind::expert_rows, n);
    }
    slots[n] = row;
    if (row < 0) return;
    rows[row] = n / top_k;
    choices[row] = n % top_k;
  }
};

void sort_assignments_impl(const SortAssignments& s) {
  const Device device = s.ids_TK.device();
  const int64_t count = s.ids_TK.numel(), num_experts = s.counts_E.numel();
  count_assignments(s.ids_TK, s.counts_E, {});
  const ExpertKey key{s.ids_TK.data<int32_t>(), data_or_null<int32_t>(s.place_E), num_experts};
  const Tensor order = sorted_order(device, count, key, key_bits(num_experts + 1));
  Tensor starts;
  if (s.rows_each > 0) {
    starts = Tensor::empty({num_experts}, DType::i64, device);
    map(device, num_experts, false, FillStarts{key, s.counts_E.data<int64_t>(), starts.data<int64_t>()});
    map(device, s.row_N.numel(), false, FillUnused{s.row_N.data<int64_t>(), s.choice_N.data<int64_t>()});
  }
  map(device, count, false,
      FillRows{key, order.data<int32_t>(), data_or_null<int64_t>(starts), s.slots_TK.data<int64_t>(),
               s.row_N.data<int64_t>(), s.choice_N.data<int64_t>(), s.ids_TK.size(1), s.rows_each,
               fault_record(device)});
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
