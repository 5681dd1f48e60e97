// The PTX instructions that kernels use, one function each: inline assembly for nvcc; for the emulator C++
// that does exactly what the PTX ISA says (tests/cuda/emulator/emulated_ptx.h). Inline assembly is nowhere
// else.
//
// Operands of multiply_add lie in registers of the 32 lanes of a warp. With g = lane / 4 and t = lane % 4,
// "pair k" being the elements 2k (low half) and 2k + 1:
//   a, 16 x 16:    a[0] row g, pair t;   a[1] row g + 8, pair t;   a[2] row g, pair t + 4;   a[3] row g + 8,
//   pair t + 4 b, 16 x 8:     b0 column g, pair t of its rows;   b1 column g, pair t + 4 sums, 16 x 8:
//   sums[0], [1] row g, columns 2t and 2t + 1;   sums[2], [3] the same of row g + 8
#pragma once

#ifndef __CUDACC__
#include <emulated_ptx.h>
#else
#include <cstdint>

#include "core/backend/cuda/launch.h"

namespace shoal::cuda {

/// sums += a b, of bf16 with sums in f32. All lanes of the warp together.
SHOAL_DEVICE void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four matrices of 8 x 8 elements of 16 bits in shared memory, all lanes together: lane 8m + r says where
/// row r of matrix m is (16 bytes, aligned so), and gets in matrices[m] the elements 2t and 2t + 1 of its row
/// g.
SHOAL_DEVICE void load_matrices(uint32_t (&matrices)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}
/// The same, of each matrix transposed: a lane gets the elements of rows 2t and 2t + 1 in column g.
SHOAL_DEVICE void load_matrices_transposed(uint32_t (&matrices)[4], const void* row) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

/// Starts to copy 16 bytes from global to shared memory, both aligned so: the first `bytes` from there, then
/// zeros. They arrive at any moment until a wait of this thread, and are seen by others after a barrier that
/// follows it.
SHOAL_DEVICE void copy_async(void* shared, const void* global, unsigned bytes) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes)
               : "memory");
}
/// Closes the group of this thread's copies since the last call.
SHOAL_DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until only the last kPending groups of this thread may still be on their way.
template <int kPending>
SHOAL_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Both rounded to bf16, to the nearest, ties to even; NaN becomes 0x7FFF.
SHOAL_DEVICE uint32_t round_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// 2^x to within 2 units in the last place; denormal results are 0. 2^-inf = 0, 2^NaN = NaN.
SHOAL_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace shoal::cuda
#endif
