// Wrong indices in device memory. A kernel that meets one leaves it out (and writes NaN where a row is then
// missing), and reports it into a record of the device; nothing waits. The next kernel whose result goes to
// the host (cross_entropy_fwd, sum_squares, all_finite: each training step has them) throws. Of several
// reports the one of the lowest position is named, whatever the order of threads.
#pragma once

#include "core/backend/cuda/launch.h"

namespace shoal::cuda {

enum class FaultKind : uint8_t { embedding_id, rope_position, label, gather_row, combine_slot, combine_row };
inline constexpr int64_t kFaultKinds = 16;

/// The record of a device, in its memory; allocated at first use.
long long* fault_record(Device device);

/// Throws Error when something was reported since the last call. Waits for the current stream.
void check_faults(Device device);

/// Called by kernels: index number `position` is wrong.
SHOAL_DEVICE void report_fault(long long* record, FaultKind kind, int64_t position) {
  atomicMin(record, static_cast<long long>(position * kFaultKinds + static_cast<int64_t>(kind)));
}

}  // namespace shoal::cuda
