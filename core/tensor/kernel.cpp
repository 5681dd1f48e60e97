#include "core/tensor/kernel.h"

#include <algorithm>
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

}  // namespace

CpuIsa choose_cpu_isa(CpuIsa supported, const std::string& built, const char* forced) {
  CpuIsa isa = supported;
  for (const CpuIsa wanted : {CpuIsa::scalar, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16}) {
    if (forced != nullptr && std::strcmp(forced, cpu_isa_name(wanted)) == 0) isa = std::min(isa, wanted);
  }
  const auto is_built = [list = "," + built + ","](CpuIsa candidate) {
    return list.find(std::string(",") + cpu_isa_name(candidate) + ",") != std::string::npos;
  };
  while (isa != CpuIsa::scalar && !is_built(isa)) isa = static_cast<CpuIsa>(static_cast<int>(isa) - 1);
  return isa;
}

CpuIsa cpu_isa() {
  static const CpuIsa isa = choose_cpu_isa(best_supported(), SHOAL_CPU_ISAS, std::getenv("SHOAL_CPU_ISA"));
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
