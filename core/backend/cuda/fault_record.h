// The record of wrong indices that kernels met (fault.h), for host code.
#pragma once

#include <cstdint>
#include <limits>

#include "core/tensor/types.h"

namespace shoal::cuda {

inline constexpr int64_t kNoFault = std::numeric_limits<int64_t>::max();

/// The record of a device, in its memory, for kernels of the calling thread (ranks may be threads); made at
/// first use, which waits for the current stream.
long long* fault_record(Device device);

/// recorded: what the record held when the device had done the work that the host waited for. Unless that is
/// kNoFault, puts kNoFault there and throws Error.
void throw_fault(Device device, int64_t recorded);

}  // namespace shoal::cuda
