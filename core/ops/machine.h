// What the machine can do at best, for the ceilings of profiles and benchmarks: multiply-adds without memory,
// and passes over memory without arithmetic to speak of. Run by the whole team of the calling rank.
#pragma once

#include <cstdint>

#include "core/tensor/kernel.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// `rounds` rounds of independent multiply-adds in registers, on every thread. dtype: f32, f64, or bf16
/// (products of pairs, summed in f32; emulated where the machine has no such instruction). Returns the FLOP
/// done.
inline constinit Kernel<double(DType dtype, int64_t rounds)> multiply_add_rounds("multiply_add_rounds");

enum class MemoryPattern : uint8_t {
  read,    // sum of a
  copy,    // a = b
  triad,   // a = b + factor * c
  update,  // a = factor * a: no line is fetched only to be overwritten
};
/// One pass over equally long f32 tensors; unused ones may be undefined. Returns the bytes read and written.
inline constinit Kernel<double(MemoryPattern, const Tensor& a, const Tensor& b, const Tensor& c)> memory_pass(
    "memory_pass");

}  // namespace shoal
