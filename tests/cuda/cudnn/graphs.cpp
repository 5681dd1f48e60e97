// cuDNN as an oracle: does the library, for GPUs that are not here, take attention and expert products in the
// layouts in which Shoal keeps them? The graphs of attention are those of the backend. Expert products by
// cuDNN are not part of it; the suite says what their layout leaves possible.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "core/backend/cuda/cudnn_attention_graphs.h"
#include "tests/cuda/cudnn/gpus.h"
#include "tests/support/attention_cases.h"

namespace shoal::testing {
namespace {

using cuda::CudnnGraph, cuda::CudnnObject;

constexpr cudnnDataType_t kBf16 = CUDNN_DATA_BFLOAT16, kF32 = CUDNN_DATA_FLOAT, kI32 = CUDNN_DATA_INT32;

/// y_RN[rows of e] = x_RK[rows of e] * weight[e]^T, with the first row of each expert on the device.
/// `transposed`: the weight is [E, K, N] instead of [E, N, K].
CudnnGraph expert_products(int64_t experts, int64_t rows, int64_t n, int64_t k, bool transposed) {
  CudnnGraph graph("expert products");
  constexpr cudnnMoeGroupedMatmulMode_t kMode = CUDNN_MOE_GROUPED_MATMUL_MODE_NONE;
  const std::vector<int64_t> strides =
      transposed ? std::vector<int64_t>{n * k, n, 1} : std::vector<int64_t>{n * k, 1, k};
  CudnnObject operation(CUDNN_BACKEND_OPERATION_MOE_GROUPED_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_MODE, CUDNN_TYPE_MOE_GROUPED_MATMUL_MODE, 1, &kMode)
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_MATH_PREC, kF32)
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_TOKEN_DESC,
           graph.real(1, kBf16, {1, rows, k}, {rows * k, k, 1}))
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_WEIGHT_DESC,
           graph.real(2, kBf16, {experts, k, n}, strides))
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_FIRST_TOKEN_OFFSET_DESC,
           graph.real(3, kI32, {experts, 1, 1}, {1, 1, 1}))
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_OUTPUT_DESC,
           graph.real(4, kBf16, {1, rows, n}, {rows * n, n, 1}));
  graph.add(operation.finalize("expert products"));
  return graph;
}

class Cudnn : public ::testing::TestWithParam<GpuProperties> {};

EngineCounts forward_engines(const AttentionSpec& spec, const GpuProperties& gpu, int built = 0) {
  return engines_of(cuda::attention_forward_graph(cuda::cudnn_calls(spec).each), gpu, built);
}
EngineCounts backward_engines(const AttentionSpec& spec, const GpuProperties& gpu, int built = 0) {
  return engines_of(cuda::attention_backward_graph(cuda::cudnn_calls(spec).each), gpu, built);
}
AttentionSpec with_alibi(AttentionSpec spec) {
  spec.alibi_slopes_H = Tensor::from(alibi_slopes(spec.heads), {spec.heads});
  return spec;
}

TEST_P(Cudnn, TakesAttentionOnPackedProjections) {
  for (const bool causal : {true, false}) {
    const AttentionSpec specs[] = {make_spec(2, 4096, 16, 16, 128, causal),  // multi-head
                                   make_spec(2, 1000, 16, 1, 64, causal),    // multi-query
                                   make_spec(2, 4096, 16, 4, 128, causal),   // a call for each sequence
                                   make_spec(4, 4096, 16, 2, 128, causal),   // a call for each group
                                   make_spec(2, 77, 2, 2, 72, causal),       // ragged
                                   make_spec(1, 1, 2, 2, 64, causal),        // one token
                                   with_alibi(make_spec(2, 4096, 16, 4, 128, causal)),
                                   with_alibi(make_spec(2, 4096, 16, 16, 64, causal))};
    for (const AttentionSpec& spec : specs) {
      const std::string name = cuda::attention_forward_graph(cuda::cudnn_calls(spec).each).name();
      EXPECT_GE(forward_engines(spec, GetParam()).deterministic, 1) << name;
      EXPECT_GE(backward_engines(spec, GetParam()).deterministic, 1) << name;
    }
  }
}

TEST_P(Cudnn, MakesPlansForAttention) {
  const AttentionSpec spec = make_spec(2, 4096, 16, 4, 128);
  EXPECT_GE(forward_engines(spec, GetParam(), 1).deterministic, 1);
  EXPECT_GE(backward_engines(spec, GetParam(), 1).deterministic, 1);
}

TEST_P(Cudnn, HeadSizesAreLimited) {
  const int64_t hopper_only = GetParam().version == 900 ? 1 : 0;
  EXPECT_GE(forward_engines(make_spec(2, 256, 2, 2, 256), GetParam()).all, 1);
  EXPECT_EQ(backward_engines(make_spec(2, 256, 2, 2, 256), GetParam()).all, hopper_only);
  EXPECT_EQ(forward_engines(make_spec(2, 256, 2, 2, 36), GetParam()).all, 0) << "no multiple of 8";
}

TEST_P(Cudnn, ABackwardWithTheSameBitsEachTimeStoresGradientsOfScores) {
  const cuda::CudnnObject device = described(GetParam());
  const auto engines = cuda::attention_backward_graph(cuda::cudnn_calls(make_spec(2, 4096, 16, 16, 128)).each)
                           .engines({nullptr, &device});
  ASSERT_FALSE(engines.empty());
  EXPECT_GE(engines[0].workspace_bytes(), int64_t{2} * 16 * 4096 * 4096 * 2);
}

TEST_P(Cudnn, TakesExpertProductsWithWeightsAsTheyAreKept) {
  EXPECT_GE(engines_of(expert_products(64, 65536, 1408, 2048, false), GetParam(), 1).all, 1);
}

TEST_P(Cudnn, RefusesExpertProductsWithTransposedWeights) {
  EXPECT_EQ(engines_of(expert_products(64, 65536, 1408, 2048, true), GetParam(), 0).all, 0);
}

INSTANTIATE_TEST_SUITE_P(On, Cudnn, ::testing::Values(kA100, kH200, kB200),
                         [](const auto& info) { return "Sm" + std::to_string(info.param.version / 10); });

}  // namespace
}  // namespace shoal::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // cuDNN wants the driver's library. Without one, that of the toolkit, in which every function fails, will
  // do.
  if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) == nullptr &&
      dlopen(CUDA_DRIVER_STUB, RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "neither libcuda.so.1 nor %s can be loaded: %s\n", CUDA_DRIVER_STUB, dlerror());
    return 1;
  }
  return RUN_ALL_TESTS();
}
