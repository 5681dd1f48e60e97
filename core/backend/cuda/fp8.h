// fp8 operands (core/ops/fp8.h) on the device, for the products of cublas_fp8.cpp.
#pragma once

#include "core/ops/fp8.h"

namespace shoal::cuda {

/// The numbers of an operand in bf16, which holds each of them exactly, in the order of its codes. What lies
/// behind its last matrix is left as it is.
Tensor fp8_numbers(const Fp8Operand& operand);

}  // namespace shoal::cuda
