// Rotary position embedding, in place on packed projections. Dimensions from rotary_size on are not touched.
#include "core/backend/cuda/block.h"
#include "core/backend/cuda/fault.h"
#include "core/ops/attention.h"

namespace shoal::cuda {
namespace {

constexpr int kMostThreads = 256;

template <class T>
struct RopeArgs {
  T* data;  // [num_rows, groups, heads + 2, head_size]; the last two are the key and the value
  const Compute<T>*cosines, *sines;
  const int32_t* positions;
  int64_t num_rows, num_positions;
  int groups, turned;  // turned: heads of a group that turn, that is, the queries and the key
  int head_size, pairs;
  bool adjacent;
  Compute<T> sign;  // -1 turns back
  long long* faults;
};

// A row per block and time, a pair per thread and time.
template <class T>
__global__ void rope_kernel(RopeArgs<T> a) {
  using C = Compute<T>;
  const int per_row = a.groups * a.turned * a.pairs;
  for (int64_t row = blockIdx.x; row < a.num_rows; row += gridDim.x) {
    const int32_t position = a.positions[row];
    if (position < 0 || position >= a.num_positions) {
      if (threadIdx.x == 0) report_fault(a.faults, FaultKind::rope_position, row);
      continue;
    }
    const C* cosine = a.cosines + int64_t{position} * a.pairs;
    const C* sine = a.sines + int64_t{position} * a.pairs;
    for (int i = static_cast<int>(threadIdx.x); i < per_row; i += static_cast<int>(blockDim.x)) {
      const int pair = i % a.pairs, head = i / a.pairs;
      const int64_t group = row * a.groups + head / a.turned;
      T* x = a.data + (group * (a.turned + 1) + head % a.turned) * a.head_size;
      T* low = x + (a.adjacent ? 2 * pair : pair);
      T* high = a.adjacent ? low + 1 : low + a.pairs;
      const C p = static_cast<C>(*low), q = static_cast<C>(*high), s = a.sign * sine[pair];
      *low = static_cast<T>(p * cosine[pair] - q * s);
      *high = static_cast<T>(q * cosine[pair] + p * s);
    }
  }
}

void rope_fwd_impl(const Tensor& qkv, const AttentionSpec& spec, const RopeSpec& rope_spec,
                   const Tensor& table, const Tensor& positions, bool inverse) {
  dispatch_storage(qkv.dtype(), "rope", [&]<class T>() {
    RopeArgs<T> a;
    a.data = qkv.data<T>();
    a.num_positions = table.size(1);
    a.pairs = static_cast<int>(table.size(2));
    a.cosines = table.data<Compute<T>>();
    a.sines = a.cosines + a.num_positions * a.pairs;
    a.positions = positions.data<int32_t>();
    a.num_rows = qkv.size(0);
    a.groups = static_cast<int>(spec.kv_heads);
    a.turned = static_cast<int>(spec.heads / spec.kv_heads) + 1;
    a.head_size = static_cast<int>(spec.head_size);
    a.adjacent = rope_spec.form == RopeForm::adjacent;
    a.sign = inverse ? -1 : 1;
    a.faults = fault_record(qkv.device());
    const int threads = threads_for(int64_t{a.groups} * a.turned * a.pairs, kMostThreads);
    SHOAL_LAUNCH((rope_kernel<T>), launch_shape(qkv.device(), a.num_rows, threads), a);
  });
}

[[maybe_unused]] const bool added = rope_fwd.add(DeviceType::cuda, &rope_fwd_impl);

}  // namespace
}  // namespace shoal::cuda
