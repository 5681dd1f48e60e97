// Every GEMM engine against the plain triple loop, and the gemm kernels on top of them.
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include "core/backend/cpu/gemm/engine.h"
#include "core/base/random.h"
#include "core/base/threads.h"
#include "core/ops/linear.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using cpu::GemmCall;
using cpu::GemmEngine;
using testing::close;
using testing::random_tensor;

/// A random product with padded leading dimensions.
template <class T>
struct Problem {
  std::vector<T> a, b, c;
  GemmCall<T> call;

  Problem(int64_t m, int64_t n, int64_t k, bool transpose_a, bool transpose_b, bool accumulate,
          uint64_t seed) {
    const RandomStream random(seed, "gemm");
    const int64_t pad = static_cast<int64_t>(random.below(0, 4));
    call = {.m = m, .n = n, .k = k};
    call.transpose_a = transpose_a;
    call.transpose_b = transpose_b;
    call.accumulate = accumulate;
    call.lda = (transpose_a ? m : k) + pad;
    call.ldb = (transpose_b ? k : n) + pad;
    call.ldc = n + pad;
    const auto fill = [&](std::vector<T>& v, int64_t size, uint64_t offset) {
      v.resize(static_cast<size_t>(size));
      for (size_t i = 0; i < v.size(); i++) v[i] = static_cast<T>(random.uniform(offset + i) - 0.5);
    };
    fill(a, (transpose_a ? k : m) * call.lda, 10);
    fill(b, (transpose_b ? n : k) * call.ldb, 100000);
    fill(c, m * call.ldc, 200000);
    if (!accumulate) {
      for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) c[static_cast<size_t>(i * call.ldc + j)] = std::nan("");
      }
    }
  }

  std::vector<double> expected() const {
    std::vector<double> out(c.begin(), c.end());
    for (int64_t i = 0; i < call.m; i++) {
      for (int64_t j = 0; j < call.n; j++) {
        double sum = 0;
        for (int64_t p = 0; p < call.k; p++) {
          sum += static_cast<double>(
                     a[static_cast<size_t>(call.transpose_a ? p * call.lda + i : i * call.lda + p)]) *
                 static_cast<double>(
                     b[static_cast<size_t>(call.transpose_b ? j * call.ldb + p : p * call.ldb + j)]);
        }
        double& to = out[static_cast<size_t>(i * call.ldc + j)];
        to = call.accumulate ? to + sum : sum;
      }
    }
    return out;
  }

  std::vector<double> run(const GemmEngine& engine) const {
    std::vector<T> out = c;
    GemmCall<T> at = call;
    at.a = a.data();
    at.b = b.data();
    at.c = out.data();
    engine.run(at);
    return {out.begin(), out.end()};
  }
};

template <class T>
void check_engines(int64_t m, int64_t n, int64_t k, uint64_t seed) {
  const double epsilon = sizeof(T) == 4 ? 1.2e-7 : 2.3e-16;
  const testing::Tolerance tolerance{4 * epsilon, 4 * epsilon * (1 + std::sqrt(static_cast<double>(k)))};
  for (int flags = 0; flags < 8; flags++) {
    const Problem<T> problem(m, n, k, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0, seed);
    const std::vector<double> expected = problem.expected();
    for (const GemmEngine* engine : cpu::gemm_engines()) {
      EXPECT_TRUE(close(problem.run(*engine), expected, tolerance))
          << engine->name() << " m " << m << " n " << n << " k " << k << " flags " << flags;
    }
  }
}

TEST(GemmEngines, AgreeWithTheTripleLoopOnRandomOddShapesAndAllFlags) {
  const RandomStream random(1, "shapes");
  for (uint64_t i = 0; i < 40; i++) {
    const auto size = [&](uint64_t which) {
      return static_cast<int64_t>(1 + random.below(3 * i + which, i % 4 == 0 ? 9 : 75));
    };
    check_engines<float>(size(0), size(1), size(2), i);
    check_engines<double>(size(0), size(1), size(2), i);
  }
}

TEST(GemmEngines, AgreeWithTheTripleLoopAcrossBlockBorders) {
  check_engines<float>(395, 50, 1030, 1);  // more rows and a longer sum than two blocks
  check_engines<double>(249, 97, 513, 2);
  check_engines<float>(3, 2021, 5, 3);
  check_engines<double>(193, 1017, 2, 4);
}

TEST(GemmEngines, HandleEmptyDimensions) {
  check_engines<float>(0, 5, 3, 1);
  check_engines<float>(5, 0, 3, 2);
  check_engines<float>(5, 3, 0, 3);
  check_engines<double>(4, 7, 0, 4);
}

TEST(GemmEngines, PropagateNanAndInfinityOfTheOperands) {
  Problem<float> problem(9, 33, 20, false, false, false, 5);
  problem.a[3] = std::nanf("");                   // row 0
  problem.b[static_cast<size_t>(7)] = HUGE_VALF;  // column 7
  for (const GemmEngine* engine : cpu::gemm_engines()) {
    const std::vector<double> c = problem.run(*engine);
    for (int64_t j = 0; j < 33; j++) EXPECT_TRUE(std::isnan(c[static_cast<size_t>(j)])) << engine->name();
    for (int64_t i = 1; i < 9; i++) {
      EXPECT_TRUE(std::isinf(c[static_cast<size_t>(i * problem.call.ldc + 7)])) << engine->name();
      EXPECT_TRUE(std::isfinite(c[static_cast<size_t>(i * problem.call.ldc + 8)])) << engine->name();
    }
  }
}

void expect_same_bits_in_parts(const GemmEngine& engine, bool transpose_a, bool transpose_b) {
  Problem<float> problem(61, 130, 530, transpose_a, transpose_b, false, 6);
  const std::vector<double> whole = problem.run(engine);
  std::vector<float> out = problem.c;
  GemmCall<float> call = problem.call;
  call.a = problem.a.data();
  call.b = problem.b.data();
  call.c = out.data();
  for (const auto& [row, rows] : {std::pair{0, 1}, {1, 17}, {18, 43}}) {
    for (const auto& [column, columns] : {std::pair{0, 100}, {100, 30}}) {
      engine.run(call.part(row, rows, column, columns));
    }
  }
  for (int64_t i = 0; i < 61; i++) {
    for (int64_t j = 0; j < 130; j++) {
      const auto at = static_cast<size_t>(i * call.ldc + j);
      ASSERT_EQ(static_cast<double>(out[at]), whole[at])
          << engine.name() << " " << i << " " << j << (transpose_a ? ", A^T" : "")
          << (transpose_b ? ", B^T" : "");
    }
  }
}

TEST(GemmEngines, TiledAndReferenceElementsDoNotDependOnHowTheProductIsCut) {
  for (const GemmEngine* engine : {&cpu::tiled_engine(), &cpu::reference_engine()}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true})
        expect_same_bits_in_parts(*engine, transpose_a, transpose_b);
    }
  }
}

TEST(GemmEngines, MayRunOnSeveralThreadsAtOnce) {
  const Problem<float> problem(70, 90, 110, true, true, true, 7);
  for (const GemmEngine* engine : cpu::gemm_engines()) {
    const std::vector<double> alone = problem.run(*engine);
    std::vector<std::vector<double>> results(4);
    std::vector<std::thread> threads;
    for (auto& result : results) {
      threads.emplace_back([&] {
        for (int i = 0; i < 5; i++) result = problem.run(*engine);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& result : results) EXPECT_TRUE(close(result, alone, {0, 1e-30})) << engine->name();
  }
}

TEST(GemmEngines, AnUnknownNameIsAnErrorThatListsTheChoices) {
  try {
    cpu::gemm_engine_named("openblass");
    FAIL() << "expected UsageError";
  } catch (const UsageError& error) {
    EXPECT_EQ(std::string(error.what()),
              "SHOAL_GEMM: unknown engine 'openblass', did you mean 'openblas'?; choose one of reference | "
              "openblas | tiled, or unset it for the fastest");
  }
}

TEST(GemmKernel, TwoThreadsGiveTheResultOfOne) {
  for (const auto& [m, n, k] : {std::tuple{700, 100, 130}, {60, 900, 200}, {1, 4000, 1100}}) {
    const Tensor a = random_tensor({m, k}, DType::f32, 3), b = random_tensor({n, k}, DType::f32, 4);
    const Tensor one = Tensor::empty({m, n}, DType::f32), two = Tensor::empty({m, n}, DType::f32);
    gemm(Device{}, {.transpose_b = true}, a, b, one);
    set_num_threads(2);
    gemm(Device{}, {.transpose_b = true}, a, b, two);
    set_num_threads(1);
    EXPECT_TRUE(close(two, one, {1e-5, 1e-4}));
    if (&cpu::gemm_engine() == &cpu::tiled_engine()) {
      EXPECT_EQ(two.to_vector<float>(), one.to_vector<float>());
    }
  }
}

TEST(GemmKernel, AllocatesNothingInTheSteadyState) {
  const Tensor a = random_tensor({100, 64}, DType::f32, 3), b = random_tensor({64, 80}, DType::f32, 4);
  const Tensor c = Tensor::empty({100, 80}, DType::f32);
  gemm(Device{}, {}, a, b, c);
  const MemoryStats before = device_runtime(DeviceType::cpu).stats();
  device_runtime(DeviceType::cpu).reset_peak();
  gemm(Device{}, {}, a, b, c);
  const MemoryStats after = device_runtime(DeviceType::cpu).stats();
  EXPECT_EQ(after.peak_bytes, before.current_bytes);
  EXPECT_EQ(after.num_system_allocations, before.num_system_allocations);
}

TEST(GemmKernel, ShapeAndTypeErrorsNameBothOperands) {
  const Tensor a = random_tensor({2, 3}, DType::f32, 1), b = random_tensor({4, 5}, DType::f32, 2);
  const Tensor c = Tensor::empty({2, 5}, DType::f32);
  try {
    gemm(Device{}, {}, a, b, c);
    FAIL() << "expected Error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("[2, 3] x [4, 5] -> [2, 5]"), std::string::npos) << error.what();
  }
  EXPECT_THROW(gemm(Device{}, {}, a, random_tensor({3, 5}, DType::f64, 1), c), Error);
}

}  // namespace
}  // namespace shoal
