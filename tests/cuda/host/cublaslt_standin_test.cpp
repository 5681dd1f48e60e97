// The stand-in of cublasLt refuses what the library's documentation forbids: else it would prove nothing.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include "core/tensor/tensor.h"
#include "tests/cuda/standin/cublaslt.h"

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

/// The fp8 product D[16, 8] = A[32, 16]^T B[32, 8] with scales, in parts that a test can spoil.
struct Fp8Call : Call {
  int32_t mode_a = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, mode_b = mode_a;
  int32_t transpose_a = CUBLAS_OP_T, transpose_b = CUBLAS_OP_N;
  cudaDataType_t type_a = CUDA_R_8F_E4M3, type_b = CUDA_R_8F_E4M3, type_c = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  uint64_t m = 16, n = 8, k = 32;
  const void *scale_a = in_a.bytes(), *scale_b = in_b.bytes();

  void set(cublasLtMatmulDescAttributes_t which, const void* value, size_t bytes) {
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(&how, which, value, bytes), CUBLAS_STATUS_SUCCESS);
  }
  cublasStatus_t answer() {
    EXPECT_EQ(cublasLtMatmulDescInit(&how, compute, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
    set(CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a, sizeof transpose_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b, sizeof transpose_b);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &mode_a, sizeof mode_a);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &mode_b, sizeof mode_b);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(&scale_a), sizeof scale_a);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(&scale_b), sizeof scale_b);
    const bool ta = transpose_a == CUBLAS_OP_T, tb = transpose_b == CUBLAS_OP_T;
    layout(a, type_a, ta ? k : m, ta ? m : k, static_cast<int64_t>(ta ? k : m));
    layout(b, type_b, tb ? n : k, tb ? k : n, static_cast<int64_t>(tb ? n : k));
    layout(c, type_c, m, n, static_cast<int64_t>(m));
    return ask();
  }
  void use_vectors_and_blocks() {
    mode_a = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    mode_b = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
  }
};

template <class Spoil>
cublasStatus_t answer_to(bool blocks, const Spoil& spoil) {
  Fp8Call call;
  if (blocks) call.use_vectors_and_blocks();
  spoil(call);
  return call.answer();
}

TEST(CudaCublasStandin, AcceptsFp8ProductsOfItsCardAndRefusesThoseThatTheLibraryHasNot) {
  constexpr auto kFine = CUBLAS_STATUS_SUCCESS, kMissing = CUBLAS_STATUS_NOT_SUPPORTED,
                 kWrong = CUBLAS_STATUS_INVALID_VALUE;
  for (const bool blocks : {false, true}) {
    const auto with = [&](const auto& spoil) { return answer_to(blocks, spoil); };
    EXPECT_EQ(with([](Fp8Call&) {}), kFine);
    EXPECT_EQ(with([](Fp8Call& c) { c.type_b = CUDA_R_8F_E5M2; }), kFine);
    EXPECT_EQ(with([](Fp8Call& c) { c.type_c = CUDA_R_16BF; }), kFine);
    EXPECT_EQ(with([](Fp8Call& c) { c.type_a = c.type_b = CUDA_R_8F_E5M2; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.type_b = CUDA_R_16BF; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.type_c = CUDA_R_64F; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.compute = CUBLAS_COMPUTE_64F; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.transpose_a = CUBLAS_OP_N; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.transpose_b = CUBLAS_OP_T; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.k = 24; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.m = 18; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.n = 7; }), blocks ? kMissing : kFine);
    EXPECT_EQ(with([](Fp8Call& c) { c.scale_b = nullptr; }), blocks ? kWrong : kFine);
    EXPECT_EQ(with([](Fp8Call& c) { c.scale_a = c.in_a.bytes() + 4; }), blocks ? kWrong : kFine);
    EXPECT_EQ(with([](Fp8Call& c) { c.mode_a = c.mode_b = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F; }),
              kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.mode_b = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0; }), kMissing);
    EXPECT_EQ(with([](Fp8Call& c) { c.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{8}); }),
              kMissing);
    for (const auto& [card, expected] : {std::pair{80, kMissing},
                                         {89, blocks ? kMissing : kFine},
                                         {90, kFine},
                                         {100, blocks ? kMissing : kFine}}) {
      standin::set_compute_capability(card);
      EXPECT_EQ(with([](Fp8Call&) {}), expected) << card;
    }
    standin::set_compute_capability(90);
  }
  Call plain;  // scales of operands that are not fp8
  const void* scale = plain.in_a.bytes();
  EXPECT_EQ(cublasLtMatmulDescSetAttribute(&plain.how, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                           static_cast<const void*>(&scale), sizeof scale),
            CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(plain.ask(), kWrong);
}

TEST(CudaCublasStandin, RefusesAnAlgorithmForOtherScales) {
  Fp8Call call;
  EXPECT_EQ(call.answer(), CUBLAS_STATUS_SUCCESS);
  const cublasLtMatmulHeuristicResult_t for_scalars = call.chosen;
  call.use_vectors_and_blocks();
  EXPECT_EQ(call.answer(), CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulHeuristicResult_t result{};
  const auto check = [&](const cublasLtMatmulHeuristicResult_t& chosen) {
    return cublasLtMatmulAlgoCheck(call.handle, &call.how, &call.a, &call.b, &call.c, &call.c, &chosen.algo,
                                   &result);
  };
  EXPECT_EQ(check(call.chosen), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(check(for_scalars), CUBLAS_STATUS_INVALID_VALUE);
}

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
