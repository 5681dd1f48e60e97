#include "core/tensor/kernel.h"

#include <cstdlib>
#include <cstring>
#include <string>

namespace shoal {

namespace {

CpuIsa best_supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return CpuIsa::avx512_bf16;
  return avx512 ? CpuIsa::avx512 : avx2 ? CpuIsa::avx2 : CpuIsa::scalar;
#else
  return CpuIsa::scalar;
#endif
}

/// Whether this build has kernels for it: SHOAL_CPU_ISAS is CMake's list, joined by commas.
bool is_built(CpuIsa isa) {
  const std::string list = std::string(",") + SHOAL_CPU_ISAS + ",";
  return list.find(std::string(",") + cpu_isa_name(isa) + ",") != std::string::npos;
}

CpuIsa choose() {
  CpuIsa best = best_supported();
  while (best != CpuIsa::scalar && !is_built(best)) best = static_cast<CpuIsa>(static_cast<int>(best) - 1);
  const char* forced = std::getenv("SHOAL_CPU_ISA");
  if (forced != nullptr) {
    for (const CpuIsa isa : {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16}) {
      if (std::strcmp(forced, cpu_isa_name(isa)) == 0 && isa < best) return isa;
    }
  }
  return best;
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = choose();
  return isa;
}

const char* cpu_isa_name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::scalar:
      return "scalar";
    case CpuIsa::avx2:
      return "avx2";
    case CpuIsa::avx512:
      return "avx512";
    case CpuIsa::avx512_bf16:
      return "avx512_bf16";
  }
  return "?";
}

}  // namespace shoal
