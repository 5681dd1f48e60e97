// Assignments per expert, for kernels of routing.
#pragma once

#include "core/backend/cuda/block.h"

namespace shoal::cuda {

/// counts_E (i64): how often each expert is in ids_TK; other ids are left out. When frequency_GE is defined,
/// also the share of each expert in the assignments of each group of rows (0 in a group without any).
void count_assignments(const Tensor& ids_TK, const Tensor& counts_E, const Tensor& frequency_GE);

}  // namespace shoal::cuda
