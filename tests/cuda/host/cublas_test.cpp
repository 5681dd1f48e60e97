#include "core/backend/cuda/cublas.h"

#include <set>
#include <thread>

#include "core/autograd/tape.h"
#include "core/ops/bf16_linear.h"
#include "core/ops/linear.h"
#include "tests/cuda/standin/cublaslt.h"
#include "tests/cuda/standin/streams.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

using Rows = std::vector<int64_t>;

constexpr int kInvalidValue = 7, kNotSupported = 15;  // cublasStatus_t

int64_t sum_of(const Rows& rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  return total;
}

Tolerance product_tolerance(DType dtype) {
  return dtype == DType::f64   ? Tolerance{1e-12, 1e-11}
         : dtype == DType::f32 ? Tolerance{1e-5, 5e-5}
                               : Tolerance{1e-2, 1e-2};
}

TEST(CudaProducts, AreThoseOfTheCpuWithAllTransposes) {
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 1, 1},
                                {5, 7, 9},
                                {16, 8, 24},
                                {33, 17, 70},
                                {4, 3, 0},
                                {0, 3, 4},
                                {3, 0, 4}}) {
    for (int bits = 0; bits < 8; bits++) {
      const Gemm how{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
      const Tensors inputs = {normal(how.transpose_a ? Shape{k, m} : Shape{m, k}, 1),
                              normal(how.transpose_b ? Shape{n, k} : Shape{k, n}, 2), normal({m, n}, 3)};
      const auto body = [&](const Tensors& in) {
        const Tensor c = how.accumulate ? in[2].clone() : Tensor::empty_like(in[2]);
        gemm(c.device(), how, in[0], in[1], c);
        return Tensors{c};
      };
      for (const DType dtype : {DType::f32, DType::f64})
        expect_like_cpu(inputs, dtype, body, product_tolerance(dtype));
    }
  }
}

TEST(CudaProducts, OfGroupsAreThoseOfTheCpu) {
  for (const Rows& rows : {Rows{5}, Rows{3, 0, 40, 1, 7, 2, 0}, Rows{0, 0}, Rows{}}) {
    const auto groups = static_cast<int64_t>(rows.size());
    const int64_t n = 11, k = 66;
    const Tensors inputs = {normal({sum_of(rows), k}, 1), normal({groups, n, k}, 2),
                            normal({sum_of(rows), n}, 3)};
    const auto body = [&](const Tensors& in) {
      const Device device = in[0].device();
      const Tensor y = Tensor::empty_like(in[2]), added = in[2].clone(), dx = Tensor::empty_like(in[0]);
      const Tensor dweight = Tensor::empty_like(in[1]), dadded = in[1].clone();
      grouped_gemm_rows(device, {.transpose_b = true}, in[0], in[1], y, rows);
      grouped_gemm_rows(device, {.transpose_b = true, .accumulate = true}, in[0], in[1], added, rows);
      grouped_gemm_rows(device, {}, in[2], in[1], dx, rows);
      grouped_gemm_reduce(device, {}, in[2], in[0], dweight, rows);
      grouped_gemm_reduce(device, {.accumulate = true}, in[2], in[0], dadded, rows);
      return Tensors{y, added, dx, dweight, dadded};
    };
    for (const DType dtype : {DType::f32, DType::f64})
      expect_like_cpu(inputs, dtype, body, product_tolerance(dtype));
  }
}

/// y, dx and the weight gradient of bf16 rows, from f32 weights.
Tensors bf16_products(const Tensors& in, const Rows& rows) {
  const Device device = in[0].device();
  const Tensor x = as(in[0], DType::bf16), dy = as(in[2], DType::bf16), weight = as(in[1], DType::f32);
  const Tensor y = Tensor::empty(dy.shape(), DType::f32, device), low = Tensor::empty_like(dy);
  const Tensor dx = Tensor::empty_like(x), dweight = Tensor::empty_like(weight), added = weight.clone();
  const PackedWeight copies = packed_weight(weight);
  packed_gemm_rows(device, PackedUse::forward, x, copies.forward, y, rows);
  packed_gemm_rows(device, PackedUse::forward, x, copies.forward, low, rows);
  packed_gemm_rows(device, PackedUse::backward, dy, copies.backward, dx, rows);
  bf16_gemm_reduce(device, false, dy, x, dweight, rows);
  bf16_gemm_reduce(device, true, dy, x, added, rows);
  return {y, low, dx, dweight, added};
}

TEST(CudaProducts, OfBf16AreThoseOfTheCpu) {
  struct Case {
    Rows rows;
    int64_t outputs, inputs;
    bool by_library;
  };
  for (const Case& c : {Case{{9}, 24, 40, true}, Case{{5}, 13, 7, true}, Case{{300, 0, 500}, 9, 16, true},
                        Case{{3, 0, 70, 1}, 24, 40, false}, Case{{0}, 5, 6, true},
                        Case{{2, 130, 0, 5, 128, 127}, 9, 16, true}}) {
    const auto groups = static_cast<int64_t>(c.rows.size());
    const Tensors in =
        all_as({normal({sum_of(c.rows), c.inputs}, 1), normal({groups, c.outputs, c.inputs}, 2),
                normal({sum_of(c.rows), c.outputs}, 3)},
               DType::f32);
    const Tensors cpu = bf16_products(in, c.rows);
    standin::take_product_calls();
    const Tensors got = all_to(bf16_products(all_to(in, kCuda), c.rows), kCpu);
    EXPECT_EQ(standin::take_product_calls().empty(), !c.by_library || sum_of(c.rows) == 0);
    const Tensor exact = Tensor::empty(in[2].shape(), DType::f64),
                 dexact = Tensor::empty(in[1].shape(), DType::f64);
    const Tensors wide = all_as(all_as(in, DType::bf16), DType::f64);
    grouped_gemm_rows(kCpu, {.transpose_b = true}, wide[0], wide[1], exact, c.rows);
    grouped_gemm_reduce(kCpu, {}, wide[2], wide[0], dexact, c.rows);
    const std::string what = str(sum_of(c.rows), " rows");
    for (size_t i = 0; i < got.size(); i++)
      expect_close({got[i]}, {cpu[i]}, product_tolerance(got[i].dtype()), what + " against the CPU");
    expect_close({got[0], got[3]}, {exact, dexact}, {1e-4, 2e-4}, what + " against f64");
  }
}

// Experts may be computed in parts, with no rows for those of other parts.
TEST(CudaProducts, OfBf16HaveTheSameBitsWhateverTheRowsOfOtherGroups) {
  const Rows rows = {2, 130, 0, 5};
  const Tensors in =
      all_as({normal({137, 200}, 1), normal({4, 24, 200}, 2), normal({137, 24}, 3)}, DType::f32);
  const Tensors whole = all_to(bf16_products(all_to(in, kCuda), rows), kCpu);
  int64_t first = 0;
  for (size_t g = 0; g < rows.size(); g++) {
    Rows alone(rows.size(), 0);
    alone[g] = rows[g];
    const int64_t end = first + rows[g], group = static_cast<int64_t>(g);
    const Tensors own = {in[0].rows(first, end).clone(), in[1], in[2].rows(first, end).clone()};
    const Tensors got = all_to(bf16_products(all_to(own, kCuda), alone), kCpu);
    for (const size_t i : {0, 1, 2}) EXPECT_TRUE(same_bits(got[i], whole[i].rows(first, end).clone())) << i;
    for (const size_t i : {3, 4})
      EXPECT_TRUE(same_bits(got[i].rows(group, group + 1).clone(), whole[i].rows(group, group + 1).clone()))
          << i;
    first = end;
  }
}

TEST(CudaProducts, LayersTrainAsOnTheCpu) {
  const Rows rows = {4, 0, 3};
  const auto train = [&](Device device, DType dtype) {
    const auto there = [&](const Shape& shape, uint64_t seed, DType type) {
      return as(normal(shape, seed), type).to(device);
    };
    Leaf x_leaf, weight_leaf, bias_leaf;
    Tensor x = there({7, 12}, 1, dtype), weight = there({3, 10, 12}, 2, DType::f32),
           bias = there({3, 10}, 3, DType::f32);
    x.grad_ref.leaf = &x_leaf;
    weight.grad_ref.leaf = &weight_leaf;
    bias.grad_ref.leaf = &bias_leaf;
    Tape tape;
    const Tensor y = grouped_linear(x, weight, rows, bias);
    tape.backward({y}, {there({7, 10}, 4, dtype)});
    return all_to({y.detach(), x_leaf.grad, weight_leaf.grad, bias_leaf.grad}, kCpu);
  };
  for (const DType dtype : {DType::f32, DType::bf16})
    expect_close(train(kCuda, dtype), train(kCpu, dtype), product_tolerance(dtype), str(dtype));
}

/// A product of f32 matrices on the device with its operands.
struct OneProduct {
  Tensor a, b, c;
  cuda::Product product;
  OneProduct(int64_t m, int64_t n, int64_t k)
      : a(Tensor::zeros({m, k}, DType::f32, kCuda)),
        b(Tensor::zeros({k, n}, DType::f32, kCuda)),
        c(Tensor::empty({m, n}, DType::f32, kCuda)) {
    product = {.m = m, .n = n, .k = k, .a = a.bytes(), .b = b.bytes(), .c = c.bytes()};
  }
  void run() const { cuda::multiply(kCuda, {&product, 1}); }
};

TEST(CudaProducts, AnAlgorithmIsChosenOncePerKindOfProduct) {
  const auto choices_of = [](const auto& body) {
    const int64_t before = cuda::product_counts().choices;
    body();
    return cuda::product_counts().choices - before;
  };
  const OneProduct one(21, 19, 23);
  EXPECT_EQ(choices_of([&] { one.run(); }), 1);
  EXPECT_EQ(choices_of([&] { one.run(); }), 0);
  OneProduct added = one;
  added.product.accumulate = true;
  EXPECT_EQ(choices_of([&] { added.run(); }), 1);
  EXPECT_EQ(choices_of([&] { OneProduct(21, 19, 22).run(); }), 1);
  // Less aligned operands.
  const Tensor wide = Tensor::zeros({21 * 23 + 1}, DType::f32, kCuda);
  OneProduct odd = one;
  odd.product.a = wide.flat(1, 21 * 23).bytes();
  EXPECT_EQ(choices_of([&] { odd.run(); }), 1);
  // Rows of an expert.
  const auto ragged = [](int64_t m) {
    OneProduct rows(m, 19, 23);
    rows.product.ragged = cuda::Product::Ragged::m;
    rows.run();
  };
  EXPECT_EQ(choices_of([&] { ragged(129); }), 1);
  EXPECT_EQ(choices_of([&] {
              for (const int64_t m : {130, 150, 160}) ragged(m);
            }),
            0);
  EXPECT_EQ(choices_of([&] { ragged(161); }), 1);
}

TEST(CudaProducts, RangesOfRaggedSizesAreAQuarterWide) {
  EXPECT_EQ(cuda::ragged_range(1), 16);
  EXPECT_EQ(cuda::ragged_range(16), 16);
  EXPECT_EQ(cuda::ragged_range(17), 32);
  EXPECT_EQ(cuda::ragged_range(129), 160);
  EXPECT_EQ(cuda::ragged_range(8192), 8192);
  EXPECT_EQ(cuda::ragged_range(8193), 10240);
}

TEST(CudaProducts, AnAlgorithmThatDoesNotFitTheRowsIsChosenForThem) {
  OneProduct rows(100, 5, 6);
  rows.product.ragged = cuda::Product::Ragged::m;
  fill(kCuda, rows.a, 2);
  fill(kCuda, rows.b, 3);
  const int64_t before = cuda::product_counts().choices;
  standin::fail_next_call("cublasLtMatmulAlgoCheck", kInvalidValue);
  rows.run();
  EXPECT_EQ(cuda::product_counts().choices, before + 2);
  for (const double value : to_doubles(rows.c)) EXPECT_EQ(value, 36);
}

TEST(CudaProducts, LongSumsGetAWorkspace) {
  standin::take_product_calls();
  const OneProduct longer(3, 5, 200), shorter(3, 5, 20);
  longer.run();
  shorter.run();
  const auto calls = standin::take_product_calls();
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_EQ(calls[0].workspace_bytes, 3U * 5 * 4);
  EXPECT_EQ(calls[1].workspace_bytes, 0U);
  EXPECT_EQ(calls[0].m, 5U);  // column-major: the transposed product
  EXPECT_EQ(calls[0].n, 3U);
}

/// A product of groups between kernels of the current stream, and the operands overwritten behind it.
Tensor product_between_kernels(const Tensor& a, const Tensor& weight, const Rows& rows) {
  const Tensor there = a.to(kCuda), matrices = weight.to(kCuda);
  const Tensor x = Tensor::empty_like(there),
               y = Tensor::empty({a.size(0), weight.size(1)}, a.dtype(), kCuda);
  const Tensor z = Tensor::empty_like(y);
  scale_fwd(kCuda, there, 2, x);
  grouped_gemm_rows(kCuda, {.transpose_b = true}, x, matrices, y, rows);
  scale_fwd(kCuda, y, 0.5, z);
  fill(kCuda, x, 7);
  fill(kCuda, y, 7);
  return z.to(kCpu);
}

TEST(CudaProducts, OfGroupsRunOnSeveralStreamsBetweenTheWorkBeforeAndBehind) {
  const Rows rows = {5, 3, 0, 9, 1, 4};
  const Tensor a = normal({sum_of(rows), 70}, 1), weight = normal({6, 7, 70}, 2);
  const Tensor want = Tensor::empty({sum_of(rows), 7}, DType::f64);
  grouped_gemm_rows(kCpu, {.transpose_b = true}, a, weight, want, rows);
  std::vector<standin::Options> policies = {{standin::Policy::eager}, {standin::Policy::lazy}};
  for (const int stream : {0, 1, 2, 3}) policies.push_back({standin::Policy::favour, stream});
  for (const uint64_t seed : {1, 2, 3}) policies.push_back({standin::Policy::random, 0, seed});
  for (const standin::Options& policy : policies) {
    Tensor got;
    std::set<void*> streams;
    std::thread([&] {  // which makes streams of its own: they are what a policy may favour
      const NarrowLaunches narrow;
      standin::set_options(policy);
      standin::take_product_calls();
      got = product_between_kernels(a, weight, rows);
      for (const standin::ProductCall& call : standin::take_product_calls()) streams.insert(call.stream);
    })
        .join();
    EXPECT_TRUE(close(got, want, {1e-12, 1e-12}))
        << "policy " << static_cast<int>(policy.policy) << ' ' << policy.favoured << ' ' << policy.seed;
    EXPECT_EQ(streams.size(), 4U);
  }
  standin::set_options({});
}

TEST(CudaProducts, ThreadsHaveTheirOwnHandles) {
  const Tensor want = Tensor::empty({20, 30}, DType::f64), a = normal({20, 100}, 1), b = normal({100, 30}, 2);
  gemm(kCpu, {}, a, b, want);
  std::vector<std::thread> threads;
  std::vector<Tensor> got(3);
  for (Tensor& c : got) {
    threads.emplace_back([&c, &a, &b] {
      c = Tensor::empty({20, 30}, DType::f64, kCuda);
      for (int i = 0; i < 20; i++) gemm(kCuda, {}, a.to(kCuda), b.to(kCuda), c);
      c = c.to(kCpu);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& c : got) EXPECT_TRUE(close(c, want, {1e-12, 1e-12}));
}

TEST(CudaProducts, WhatTheLibraryRefusesIsAnErrorThatNamesTheProduct) {
  const auto message_of = [](const char* function, int status) {
    standin::fail_next_call(function, status);
    return error_of([] { OneProduct(31, 29, 37).run(); });
  };
  std::string message = message_of("cublasLtMatmulAlgoGetHeuristic", kNotSupported);
  EXPECT_NE(message.find(
                "cublasLtMatmulAlgoGetHeuristic failed with CUBLAS_STATUS_NOT_SUPPORTED for f32 [31, 37] x "
                "f32 [37, 29] -> f32 [31, 29]; this card or version of cuBLAS has no such product"),
            std::string::npos)
      << message;
  message = message_of("cublasLtMatmul", kInvalidValue);
  EXPECT_NE(message.find("cublasLtMatmul failed with CUBLAS_STATUS_INVALID_VALUE"), std::string::npos)
      << message;
  EXPECT_NE(message.find("CUBLASLT_LOG_LEVEL"), std::string::npos) << message;
  std::thread([&] { message = message_of("cublasLtCreate", 1); }).join();
  EXPECT_NE(
      message.find("cublasLtCreate failed on cuda:0 with CUBLAS_STATUS_NOT_INITIALIZED; is there a card"),
      std::string::npos)
      << message;
  // And the next call succeeds.
  OneProduct(31, 29, 37).run();
}

TEST(CudaProducts, OperandsThatDoNotFitAreRefused) {
  const auto at = [](const Shape& shape, DType dtype) { return Tensor::zeros(shape, dtype, kCuda); };
  const Tensor a = at({4, 6}, DType::f32), b = at({6, 3}, DType::f32), c = at({4, 3}, DType::f32);
  EXPECT_NE(error_of([&] {
              gemm(kCuda, {.transpose_a = true}, a, b, c);
            }).find("gemm: shapes do not fit: [4, 6]^T x [6, 3] -> [4, 3]"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              gemm(kCuda, {}, as(a, DType::bf16), b, c);
            }).find("expected operands and result of f32"),
            std::string::npos);
  const Tensor low = at({4, 6}, DType::bf16), packed = at({3 * 6}, DType::bf16);
  const Rows four = {4}, five = {5};
  EXPECT_EQ(error_of([&] { packed_gemm_rows(kCuda, PackedUse::forward, low, packed, c, four); }), "");
  EXPECT_NE(
      error_of([&] { packed_gemm_rows(kCuda, PackedUse::forward, low, packed, c, five); }).find("sum to 5"),
      std::string::npos);
  EXPECT_NE(error_of([&] { packed_gemm_rows(kCuda, PackedUse::both, low, packed, c, four); }).find("the use"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              packed_gemm_rows(kCuda, PackedUse::forward, low, at({5}, DType::bf16), c, four);
            }).find("5 packed elements"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              bf16_gemm_reduce(kCuda, false, low, low, at({6, 5}, DType::f32), four);
            }).find("[1, N, K]"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              grouped_gemm_rows(kCuda, {.transpose_a = true}, a, b.view({1, 6, 3}), c, four);
            }).find("transpose_a is not possible here"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              grouped_gemm_reduce(kCuda, {}, a, c, at({2, 6, 3}, DType::f32), four);
            }).find("[1, N, K]"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
