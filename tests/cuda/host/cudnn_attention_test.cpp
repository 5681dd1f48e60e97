// Attention by cuDNN: the host code, run on a stand-in of the library that interprets the graphs.
#include "core/backend/cuda/cudnn_attention.h"

#include <cudnn.h>

#include "core/backend/cuda/cudnn_graph.h"
#include "core/backend/cuda/library_attention.h"
#include "core/tensor/stream.h"
#include "tests/cuda/attention_calls.h"
#include "tests/cuda/standin/cudnn.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::testing {
namespace {

class ByCudnn {
 public:
  ByCudnn() {
    cuda::attention_kernels() = cuda::AttentionKernels::cudnn;
    standin::take_cudnn_counts();
  }
  ~ByCudnn() {
    cuda::attention_kernels() = cuda::AttentionKernels::own;
    cuda::cudnn_limits() = {};
  }
  ByCudnn(const ByCudnn&) = delete;
  ByCudnn& operator=(const ByCudnn&) = delete;
};

struct Inputs {
  Tensor qkv, dy;
};
Inputs inputs_of(const AttentionSpec& spec) {
  const Shape output{spec.batch * spec.seq, spec.heads * spec.head_size};
  return {as(normal(packed_shape(spec), 1), DType::bf16), as(normal(output, 2), DType::bf16)};
}
/// y, lse, dqkv on the CPU.
Tensors all_results(const AttentionSpec& spec, DType dtype, Device device) {
  const Inputs in = inputs_of(spec);
  const Tensor qkv = as(in.qkv, dtype).to(device).clone(), dy = as(in.dy, dtype).to(device).clone();
  Tensors results = forward(qkv, spec);
  results.push_back(backward(qkv, dy, spec)[0]);
  return all_to(results, kCpu);
}
void expect_like_cpu(const AttentionSpec& spec) {
  const Tensors got = all_results(spec, DType::bf16, kCuda), cpu = all_results(spec, DType::bf16, kCpu),
                exact = all_results(spec, DType::f64, kCpu);
  const std::string what = str(spec.batch, " x ", spec.seq, ", ", spec.heads, " heads of ", spec.head_size,
                               ", ", spec.kv_heads, " of keys");
  constexpr Tolerance kOfGradients{2e-2, 3e-2};
  expect_close({got[0], got[1]}, {cpu[0], cpu[1]}, tolerance_of(DType::bf16), what + " against the CPU");
  expect_close({got[0], got[1]}, {exact[0], exact[1]}, tolerance_of(DType::bf16), what + " against f64");
  expect_close({got[2]}, {cpu[2]}, kOfGradients, what + ", gradients against the CPU");
  expect_close({got[2]}, {exact[2]}, kOfGradients, what + ", gradients against f64");
}

bool taken(const AttentionSpec& spec) {
#ifdef __SANITIZE_ADDRESS__
  if (spec.seq > 100) return false;  // slow there
#endif
  return spec.batch * spec.seq > 0 && spec.head_size % 8 == 0 && !spec.document_BS.defined();
}

TEST(CudnnAttention, ResultsAreTheCpusForAllMasksAndSizes) {
  const ByCudnn chosen;
  for (const AttentionSpec& spec : attention_cases()) {
    if (!taken(spec)) continue;
    expect_like_cpu(spec);
    const auto [plans, executions] = standin::take_cudnn_counts();
    EXPECT_EQ(plans, 2);
    // forward alone, then forward and backward
    const bool grouped = spec.kv_heads > 1 && spec.heads > spec.kv_heads;
    EXPECT_EQ(executions, 3 * (grouped ? std::min(spec.batch, spec.kv_heads) : 1));
  }
}

AttentionSpec grouped_with_alibi(int64_t batch, int64_t heads, int64_t kv_heads) {
  AttentionSpec spec = make_spec(batch, 13, heads, kv_heads, 8);
  spec.alibi_slopes_H = Tensor::from(alibi_slopes(heads), {heads});
  return spec;
}

TEST(CudnnAttention, GroupsOfHeadsAreCallsPerSequenceOrPerGroup) {
  const ByCudnn chosen;
  expect_like_cpu(grouped_with_alibi(2, 6, 3));
  EXPECT_EQ(standin::take_cudnn_counts().executions, 3 * 2);  // a call for each sequence
  expect_like_cpu(grouped_with_alibi(3, 6, 2));
  EXPECT_EQ(standin::take_cudnn_counts().executions, 3 * 2);  // a call for each group
  expect_like_cpu(grouped_with_alibi(3, 4, 4));
  expect_like_cpu(grouped_with_alibi(3, 4, 1));
  EXPECT_EQ(standin::take_cudnn_counts().executions, 3 * 2);  // one for each
}

TEST(CudnnAttention, APlanIsMadeOncePerShape) {
  const ByCudnn chosen;
  const AttentionSpec spec = make_spec(1, 19, 2, 1, 8);
  for (int i = 0; i < 3; i++) all_results(spec, DType::bf16, kCuda);
  const auto [plans, executions] = standin::take_cudnn_counts();
  EXPECT_EQ(plans, 2);
  EXPECT_EQ(executions, 9);
}

TEST(CudnnAttention, IsInTheOrderOfTheCurrentStreamUnderEveryPolicy) {
  const ByCudnn chosen;
  const AttentionSpec spec = make_spec(2, 21, 4, 2, 16);
  const Tensors want = all_results(spec, DType::bf16, kCuda);
  using standin::Policy;
  for (const standin::Options& options : {standin::Options{Policy::lazy, 0, 1},
                                          {Policy::favour, 0, 1},
                                          {Policy::favour, 1, 1},
                                          {Policy::random, 0, 7}}) {
    standin::set_options(options);
    const StreamScope scope(make_stream(kCuda));
    const Tensors got = all_results(spec, DType::bf16, kCuda);
    for (size_t i = 0; i < want.size(); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << "result " << i;
  }
  standin::set_options({});
}

TEST(CudnnAttention, WhatItDoesNotTakeIsDoneByOurKernels) {
  const ByCudnn chosen;
  AttentionSpec packed = make_spec(1, 20, 2, 1, 8);
  packed.document_BS = documents(1, {13, 7});
  for (const AttentionSpec& spec : {packed, make_spec(1, 9, 2, 1, 12)}) expect_like_cpu(spec);
  EXPECT_EQ(standin::take_cudnn_counts().executions, 0);
  expect_like_cpu(make_spec(1, 7, 1, 1, 136));
  EXPECT_EQ(standin::take_cudnn_counts().executions, 2);  // forward
}

TEST(CudnnAttention, ABackwardThatWantsTooMuchMemoryIsDoneByOurKernels) {
  const ByCudnn chosen;
  cuda::cudnn_limits().workspace_bytes = 2 * 2 * 23 * 23 - 1;
  expect_like_cpu(make_spec(1, 23, 2, 1, 8));
  EXPECT_EQ(standin::take_cudnn_counts().executions, 2);  // forward
}

TEST(CudnnAttention, ShapesBeyondTheLimitOfPlansAreDoneByOurKernels) {
  const ByCudnn chosen;
  cuda::cudnn_limits().plans = 0;
  expect_like_cpu(make_spec(1, 24, 2, 1, 8));
  EXPECT_EQ(standin::take_cudnn_counts().plans, 0);
}

TEST(CudnnAttention, AFailureNamesTheGraphAndHowToDoWithoutIt) {
  const ByCudnn chosen;
  const AttentionSpec spec = make_spec(1, 25, 2, 1, 8);
  for (const char* function : {"cudnnBackendExecute", "cudnnBackendFinalize"}) {
    standin::fail_next_cudnn_call(function, CUDNN_STATUS_EXECUTION_FAILED);
    const std::string error = error_of([&] { all_results(spec, DType::bf16, kCuda); });
    for (const char* part : {"cuDNN: ", "attention forward of 1 x 25 tokens, 2 heads of 8, 1 of keys, causal",
                             "CUDNN_STATUS_EXECUTION_FAILED", "SHOAL_ATTENTION=own"})
      EXPECT_NE(error.find(part), std::string::npos) << function << ": " << error;
    cuda::cudnn_limits().plans++;  // a shape of its own next
  }
}

TEST(CudnnAttention, IsNotTheDefault) {
  using enum cuda::AttentionKernels;
  EXPECT_EQ(cuda::attention_kernels_named(nullptr), own);
  EXPECT_EQ(cuda::attention_kernels_named("auto"), own);
  EXPECT_EQ(cuda::attention_kernels_named("own"), own);
  EXPECT_EQ(cuda::attention_kernels_named("cudnn"), cudnn);
  EXPECT_NE(
      error_of([] { cuda::attention_kernels_named("fast"); }).find("expected auto, own or cudnn, got 'fast'"),
      std::string::npos);
  all_results(make_spec(1, 5, 1, 1, 8), DType::bf16, kCuda);
  EXPECT_EQ(standin::take_cudnn_counts().executions, 0);
}

// What the stand-in must refuse, so that it can show mistakes.

TEST(CudnnStandin, RefusesWhatTheLibraryRefuses) {
  using cuda::CudnnObject;
  EXPECT_NE(error_of([] {
              CudnnObject(CUDNN_BACKEND_TENSOR_DESCRIPTOR).finalize("no attributes");
            }).find("BAD_PARAM"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              cuda::CudnnGraph("g").real(1, CUDNN_DATA_FLOAT, {1, 2, 3, 4}, {24, 12, 4});
            }).find("tensor of g"),
            std::string::npos)
      << "a stride too few";
  EXPECT_NE(error_of([] {
              CudnnObject graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
              graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS,
                        CudnnObject(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR));
            }),
            "")
      << "an operation that is not finalised";
  EXPECT_NE(error_of([] {
              cuda::CudnnGraph g("g");
              g.matmul(g.real(1, CUDNN_DATA_BFLOAT16, {1, 1, 4, 8}, {32, 32, 8, 1}),
                       g.real(2, CUDNN_DATA_BFLOAT16, {1, 1, 4, 8}, {32, 32, 8, 1}),
                       g.inner(CUDNN_DATA_FLOAT, {1, 1, 4, 4}, {16, 16, 4, 1}));
            }).find("matmul of g"),
            std::string::npos)
      << "sizes that do not fit";
}

TEST(CudnnStandin, RefusesPointersThatAreNotAlignedOrNotOfTheDevice) {
  cudnnHandle_t handle = nullptr;
  cudnnCreate(&handle);
  cuda::CudnnGraph graph("sum");
  const std::vector<int64_t> rows{1, 1, 4, 8}, strides{32, 32, 8, 1};
  // The least that the engines of the stand-in take: two products.
  const auto inner = graph.inner(CUDNN_DATA_BFLOAT16, {1, 1, 4, 4}, {16, 16, 4, 1});
  const auto x = graph.real(1, CUDNN_DATA_BFLOAT16, rows, strides);
  graph.matmul(x, graph.real(2, CUDNN_DATA_BFLOAT16, {1, 1, 8, 4}, {32, 32, 1, 8}), inner);
  graph.matmul(inner, x, graph.real(3, CUDNN_DATA_BFLOAT16, rows, strides));
  const cuda::CudnnTarget target{handle, nullptr};
  const auto plan = graph.engines(target).at(2).plan(target, "sum");
  const Tensor data = Tensor::empty({3, 64}, DType::bf16, kCuda),
               host = Tensor::empty({64}, DType::bf16, kCpu);
  const Tensor workspace = Tensor::empty({256}, DType::u8, kCuda);
  const auto run = [&](void* first, void* space) {
    return error_of([&] {
      cuda::execute(handle, plan, {1, 2, 3}, {first, data.bytes() + 128, data.bytes() + 256}, space, "sum");
    });
  };
  EXPECT_NE(run(data.bytes() + 2, workspace.bytes()).find("MISALIGNED"), std::string::npos);
  EXPECT_NE(run(host.bytes(), workspace.bytes()), "");
  EXPECT_NE(run(data.bytes(), nullptr), "");
  EXPECT_EQ(run(data.bytes(), workspace.bytes()), "");
  device_runtime(kCuda.type).synchronize();  // the graph must live until then
  cudnnDestroy(handle);
}

}  // namespace
}  // namespace shoal::testing
