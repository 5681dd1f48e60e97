// Wrong indices in device memory. A kernel that meets one leaves it out (and writes NaN where a row is then
// missing), and reports it into a record of the device; nothing waits. When the host next waits for the
// device (Tensor::item, to_vector: once in each training step at least), that throws. Of several reports the
// one of the lowest position is named, whatever the order of threads.
#pragma once

#include "core/backend/cuda/fault_record.h"
#include "core/backend/cuda/launch.h"

namespace shoal::cuda {

enum class FaultKind : uint8_t {
  embedding_id,
  rope_position,
  label,
  gather_row,
  combine_slot,
  combine_row,
  loss_gradient,
  expert_id,
  expert_rows
};
inline constexpr int64_t kFaultKinds = 16;

/// Called by kernels: index number `position` is wrong.
SHOAL_DEVICE void report_fault(long long* record, FaultKind kind, int64_t position) {
  atomicMin(record, static_cast<long long>(position * kFaultKinds + static_cast<int64_t>(kind)));
}

}  // namespace shoal::cuda
