// Compiling a kernel file once per instruction set. A kernel file looks like
//
//   #include "core/backend/cpu/isa.h"      // and every other header, before SHOAL_KERNELS_BEGIN
//   SHOAL_KERNELS_BEGIN
//   void rms_norm_fwd_impl(...) { ... }    // plain loops; reductions need `#pragma omp simd` to vectorise
//   const bool added = rms_norm_fwd.add(DeviceType::cpu, &rms_norm_fwd_impl, kIsaLevel);
//   SHOAL_KERNELS_END
//
// CMake compiles it with SHOAL_ISA_scalar, SHOAL_ISA_avx2 and SHOAL_ISA_avx512; files whose name starts with
// bf16_ also with SHOAL_ISA_avx512_bf16. Only the code between the two
// macros is compiled for the set: headers stay portable, so no inline function of theirs can end up in the
// program with instructions that the machine lacks. Therefore nothing may be included inside, except
// the .inc files of this folder and of core/backend/functors, which are written for it.
#pragma once

#include "core/tensor/kernel.h"

// The formatter would split the string of a _Pragma, which is an error.
// clang-format off
#if defined(SHOAL_ISA_avx512_bf16) && defined(__x86_64__)
#define SHOAL_ISA_NAMESPACE isa_avx512_bf16
#define SHOAL_ISA_TARGET \
  _Pragma("GCC target(\"avx2,fma,bmi,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512bf16,prefer-vector-width=512\")")
#define SHOAL_ISA_LEVEL ::shoal::CpuIsa::avx512_bf16
#elif defined(SHOAL_ISA_avx512) && defined(__x86_64__)
#define SHOAL_ISA_NAMESPACE isa_avx512
#define SHOAL_ISA_TARGET \
  _Pragma("GCC target(\"avx2,fma,bmi,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,prefer-vector-width=512\")")
#define SHOAL_ISA_LEVEL ::shoal::CpuIsa::avx512
#elif defined(SHOAL_ISA_avx2) && defined(__x86_64__)
#define SHOAL_ISA_NAMESPACE isa_avx2
#define SHOAL_ISA_TARGET _Pragma("GCC target(\"avx2,fma,bmi,bmi2,f16c\")")
#define SHOAL_ISA_LEVEL ::shoal::CpuIsa::avx2
#else
#define SHOAL_ISA_NAMESPACE isa_scalar
#define SHOAL_ISA_TARGET
#define SHOAL_ISA_LEVEL ::shoal::CpuIsa::scalar
#endif
// clang-format on

#define SHOAL_KERNELS_BEGIN                                      \
  _Pragma("GCC push_options") SHOAL_ISA_TARGET namespace shoal { \
    namespace SHOAL_ISA_NAMESPACE {                              \
    namespace {                                                  \
    [[maybe_unused]] constexpr CpuIsa kIsaLevel = SHOAL_ISA_LEVEL;
#define SHOAL_KERNELS_END \
  }                       \
  }                       \
  }                       \
  _Pragma("GCC pop_options")
