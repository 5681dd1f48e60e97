// The stand-in of cublasLt refuses what the library's documentation forbids: else it would prove nothing.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include "core/tensor/tensor.h"

namespace shoal::testing {
namespace {

constexpr Device kCuda{DeviceType::cuda, 0};

/// A product of f32 matrices that the stand-in accepts, in parts that a test can spoil.
struct Call {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDescOpaque_t how;
  cublasLtMatrixLayoutOpaque_t a, b, c;
  cublasLtMatmulPreferenceOpaque_t preference;
  cublasLtMatmulHeuristicResult_t chosen{};
  Tensor in_a = Tensor::zeros({300}, DType::f32, kCuda), in_b = Tensor::zeros({300}, DType::f32, kCuda),
         out = Tensor::zeros({64}, DType::f32, kCuda), workspace = Tensor::zeros({64}, DType::f32, kCuda);
  size_t workspace_bytes = 64;
  const float one = 1, zero = 0;

  /// D[4, 2] = A[4, 70] B[70, 2].
  Call() {
    EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(cublasLtMatmulDescInit(&how, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    layout(a, CUDA_R_32F, 4, 70, 4);
    layout(b, CUDA_R_32F, 70, 2, 70);
    layout(c, CUDA_R_32F, 4, 2, 4);
    EXPECT_EQ(cublasLtMatmulPreferenceInit(&preference), CUBLAS_STATUS_SUCCESS);
    const uint64_t most = 1024;
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most);
    EXPECT_EQ(ask(), CUBLAS_STATUS_SUCCESS);
  }
  ~Call() {
    if (handle != nullptr) cublasLtDestroy(handle);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  static void layout(cublasLtMatrixLayoutOpaque_t& to, cudaDataType_t type, uint64_t rows, uint64_t columns,
                     int64_t ld) {
    EXPECT_EQ(cublasLtMatrixLayoutInit(&to, type, rows, columns, ld), CUBLAS_STATUS_SUCCESS);
  }
  template <class T>
  void prefer(cublasLtMatmulPreferenceAttributes_t which, T value) {
    EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(&preference, which, &value, sizeof value),
              CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t ask() {
    int found = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle, &how, &a, &b, &c, &c, &preference, 1, &chosen, &found);
  }
  cublasStatus_t run() {
    return cublasLtMatmul(handle, &how, &one, in_a.bytes(), &a, in_b.bytes(), &b, &zero, out.bytes(), &c,
                          out.bytes(), &c, &chosen.algo, workspace.bytes(), workspace_bytes, nullptr);
  }
};

TEST(CudaCublasStandin, AcceptsAProduct) {
  Call call;
  EXPECT_EQ(call.chosen.workspaceSize, 32U);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_SUCCESS);
}

TEST(CudaCublasStandin, RefusesWrongSizes) {
  Call call;
  Call::layout(call.a, CUDA_R_32F, 4, 70, 3);  // columns overlap
  EXPECT_EQ(call.ask(), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
  Call::layout(call.a, CUDA_R_32F, 4, 69, 4);  // another sum than B's
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
  Call::layout(call.a, CUDA_R_32F, 0, 70, 4);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
  Call::layout(call.a, CUDA_R_32F, 70, 4, 70);  // transposed, which `how` does not say
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
}

TEST(CudaCublasStandin, RefusesTypesThatTheLibraryDoesNotCombine) {
  Call call;
  Call::layout(call.a, CUDA_R_16BF, 4, 70, 4);
  EXPECT_EQ(call.ask(), CUBLAS_STATUS_NOT_SUPPORTED);
  Call::layout(call.b, CUDA_R_16BF, 70, 2, 70);
  EXPECT_EQ(call.ask(), CUBLAS_STATUS_SUCCESS);
  Call::layout(call.c, CUDA_R_64F, 4, 2, 4);
  EXPECT_EQ(call.ask(), CUBLAS_STATUS_NOT_SUPPORTED);
}

TEST(CudaCublasStandin, RefusesAnAlgorithmForOtherProducts) {
  Call call;
  Call::layout(call.a, CUDA_R_16BF, 4, 70, 4);
  Call::layout(call.b, CUDA_R_16BF, 70, 2, 70);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
  cublasLtMatmulHeuristicResult_t result{};
  EXPECT_EQ(cublasLtMatmulAlgoCheck(call.handle, &call.how, &call.a, &call.b, &call.c, &call.c,
                                    &call.chosen.algo, &result),
            CUBLAS_STATUS_INVALID_VALUE);
  call.chosen = {};
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
}

TEST(CudaCublasStandin, RefusesTooSmallAWorkspace) {
  Call call;
  call.workspace_bytes = 31;
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
}

TEST(CudaCublasStandin, RefusesOperandsLessAlignedThanTheAlgorithmNeeds) {
  Call call;
  call.in_a = call.in_a.flat(1, 280);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_INVALID_VALUE);
  call.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{4});
  EXPECT_EQ(call.ask(), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_SUCCESS);
}

TEST(CudaCublasStandin, RefusesAHandleThatIsNoMore) {
  Call call;
  EXPECT_EQ(cublasLtDestroy(call.handle), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(call.run(), CUBLAS_STATUS_NOT_INITIALIZED);
  EXPECT_EQ(cublasLtDestroy(call.handle), CUBLAS_STATUS_NOT_INITIALIZED);
  call.handle = nullptr;
}

TEST(CudaCublasStandin, RefusesAttributesOfAnotherSize) {
  Call call;
  const int64_t wide = CUBLAS_OP_T;
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(&call.how, CUBLASLT_MATMUL_DESC_TRANSA, &wide, sizeof wide),
            CUBLAS_STATUS_INVALID_VALUE);
  const uint32_t narrow = 1;
  EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(&call.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                 &narrow, sizeof narrow),
            CUBLAS_STATUS_INVALID_VALUE);
}

}  // namespace
}  // namespace shoal::testing
