// cuDNN as an oracle: does the library, for GPUs that are not here, take attention and expert products in the
// layouts in which Shoal keeps them? Shoal does not call cuDNN; this says what its layouts leave possible.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "tests/cuda/cudnn/graph.h"

namespace shoal::testing {
namespace {

constexpr cudnnDataType_t kBf16 = CUDNN_DATA_BFLOAT16, kF32 = CUDNN_DATA_FLOAT, kI32 = CUDNN_DATA_INT32;

/// Attention on packed projections (core/ops/attention.h): rows of [G, H/G + 2, C].
struct PackedAttention {
  int64_t batch, seq, heads, kv_heads, size;
};

/// y and log-sum-exp of causal attention, with one group of key/value heads or as many as query heads: only
/// then do the query heads lie at equal distances. Written out as matrix products, mask and softmax, which is
/// the form that cuDNN recognises.
CudnnGraph causal_attention(const PackedAttention& a) {
  const int64_t B = a.batch, S = a.seq, H = a.heads, G = a.kv_heads, C = a.size, row = (H + 2 * G) * C;
  const int64_t q_head = G == 1 ? C : (H / G + 2) * C, kv_head = (H / G + 2) * C;
  CudnnGraph graph;
  const std::vector<int64_t> scores{B, H, S, S}, rows{B, H, S, 1}, one{1, 1, 1, 1};
  const std::vector<int64_t> scores_strides{H * S * S, S * S, S, 1}, rows_strides{H * S, S, 1, 1};
  const auto inner = [&](cudnnDataType_t type) {
    return graph.tensor(type, scores, scores_strides, TensorKind::inner);
  };
  const auto inner_rows = [&] { return graph.tensor(kF32, rows, rows_strides, TensorKind::inner); };
  const CudnnObject q = graph.tensor(kBf16, {B, H, S, C}, {S * row, q_head, row, 1});
  const CudnnObject k = graph.tensor(kBf16, {B, G, C, S}, {S * row, kv_head, 1, row});
  const CudnnObject v = graph.tensor(kBf16, {B, G, S, C}, {S * row, kv_head, row, 1});
  const CudnnObject y = graph.tensor(kBf16, {B, H, S, C}, {S * H * C, C, H * C, 1});
  const CudnnObject lse = graph.tensor(kF32, rows, rows_strides);
  const CudnnObject scale = graph.tensor(kF32, one, one, TensorKind::host_scalar),
                    lowest = graph.tensor(kF32, one, one, TensorKind::host_scalar);

  const CudnnObject raw = inner(kF32), scaled = inner(kF32), query = inner(kI32), key = inner(kI32),
                    seen = inner(CUDNN_DATA_BOOLEAN), masked = inner(kF32), centred = inner(kF32),
                    exponential = inner(kF32), weights = inner(kBf16);
  const CudnnObject most = inner_rows(), sum = inner_rows(), log = inner_rows();
  graph.matmul(q, k, raw);
  graph.pointwise({CUDNN_POINTWISE_MUL, raw, scaled, &scale});
  graph.pointwise({CUDNN_POINTWISE_GEN_INDEX, scaled, query, nullptr, nullptr, 2, kI32});
  graph.pointwise({CUDNN_POINTWISE_GEN_INDEX, scaled, key, nullptr, nullptr, 3, kI32});
  graph.pointwise({CUDNN_POINTWISE_CMP_GE, query, seen, &key, nullptr, -1, kI32});
  graph.pointwise({CUDNN_POINTWISE_BINARY_SELECT, scaled, masked, &lowest, &seen});
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, masked, most);
  graph.pointwise({CUDNN_POINTWISE_SUB, masked, centred, &most});
  graph.pointwise({CUDNN_POINTWISE_EXP, centred, exponential});
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, exponential, sum);
  graph.pointwise({CUDNN_POINTWISE_LOG, sum, log});
  graph.pointwise({CUDNN_POINTWISE_ADD, most, lse, &log});
  graph.pointwise({CUDNN_POINTWISE_DIV, exponential, weights, &sum});
  graph.matmul(weights, v, y);
  return graph;
}

/// y_RN[rows of e] = x_RK[rows of e] * weight[e]^T, with the first row of each expert on the device.
/// `transposed`: the weight is [E, K, N] instead of [E, N, K].
CudnnGraph expert_products(int64_t experts, int64_t rows, int64_t n, int64_t k, bool transposed) {
  CudnnGraph graph;
  constexpr cudnnMoeGroupedMatmulMode_t kMode = CUDNN_MOE_GROUPED_MATMUL_MODE_NONE;
  const std::vector<int64_t> strides =
      transposed ? std::vector<int64_t>{n * k, n, 1} : std::vector<int64_t>{n * k, 1, k};
  CudnnObject operation(CUDNN_BACKEND_OPERATION_MOE_GROUPED_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_MODE, CUDNN_TYPE_MOE_GROUPED_MATMUL_MODE, 1, &kMode)
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_MATH_PREC, kF32)
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_TOKEN_DESC,
           graph.tensor(kBf16, {1, rows, k}, {rows * k, k, 1}))
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_WEIGHT_DESC, graph.tensor(kBf16, {experts, k, n}, strides))
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_FIRST_TOKEN_OFFSET_DESC,
           graph.tensor(kI32, {experts, 1, 1}, {1, 1, 1}))
      .set(CUDNN_ATTR_OPERATION_MOE_GROUPED_MATMUL_OUTPUT_DESC,
           graph.tensor(kBf16, {1, rows, n}, {rows * n, n, 1}));
  graph.add(operation.finalize("expert products"));
  return graph;
}

class Cudnn : public ::testing::TestWithParam<GpuProperties> {};

TEST_P(Cudnn, TakesCausalAttentionOnPackedProjections) {
  EXPECT_GE(causal_attention({2, 4096, 16, 16, 128}).engines(GetParam(), 1), 1) << "multi-head";
  EXPECT_GE(causal_attention({2, 1000, 16, 1, 64}).engines(GetParam(), 1), 1) << "multi-query";
  // A group of the packed layout as a batch entry: grouped-query attention of one sequence.
  EXPECT_GE(causal_attention({1, 4096, 4, 1, 128}).engines(GetParam(), 0), 1) << "one group";
}

TEST_P(Cudnn, TakesExpertProductsWithWeightsAsTheyAreKept) {
  EXPECT_GE(expert_products(64, 65536, 1408, 2048, false).engines(GetParam(), 1), 1);
}

TEST_P(Cudnn, RefusesExpertProductsWithTransposedWeights) {
  EXPECT_EQ(expert_products(64, 65536, 1408, 2048, true).engines(GetParam(), 0), 0);
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
