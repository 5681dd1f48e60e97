#include "core/tensor/kernel.h"

#include <gtest/gtest.h>

namespace shoal {
namespace {

TEST(CpuIsa, TheBestSetThatIsBothSupportedAndBuiltIsChosen) {
  const char* all = "scalar,avx2,avx512,avx512_bf16";
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512_bf16, all, nullptr), CpuIsa::avx512_bf16);
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx2, all, nullptr), CpuIsa::avx2);
  // A name that begins like another one is not the other one.
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512, "scalar,avx512_bf16", nullptr), CpuIsa::scalar);
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512_bf16, "scalar,avx2,avx512", nullptr), CpuIsa::avx512);
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512_bf16, "scalar;", nullptr), CpuIsa::scalar);
}

TEST(CpuIsa, AForcedSetOnlyLowersTheChoice) {
  const char* all = "scalar,avx2,avx512,avx512_bf16";
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512_bf16, all, "avx2"), CpuIsa::avx2);
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx2, all, "avx512"), CpuIsa::avx2);
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512, all, "sse9"), CpuIsa::avx512);
  EXPECT_EQ(choose_cpu_isa(CpuIsa::avx512, "scalar,avx512", "avx2"), CpuIsa::scalar);
}

}  // namespace
}  // namespace shoal
