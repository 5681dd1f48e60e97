// fp8 products by the stand-in of cublasLt, which knows what cards have which: against the CPU's.
#include <cuda_fp8.h>
#include <library_types.h>

#include <set>

#include "core/autograd/tape.h"
#include "core/backend/cuda/cublas.h"
#include "core/base/log.h"
#include "core/ops/fp8_linear.h"
#include "tests/cuda/standin/cublaslt.h"
#include "tests/cuda/standin/streams.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

using Rows = std::vector<int64_t>;

int64_t sum_of(const Rows& rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  return total;
}

/// A card of another compute capability. Each has a thread of its own, as the answers of the library are
/// remembered per thread.
template <class F>
void on_card(int capability, const F& body) {
  standin::set_compute_capability(capability);
  std::thread(body).join();
  standin::set_compute_capability(90);
}

struct Case {
  Rows rows;
  int64_t n, k;
};
// Around multiples of 4 and of 128 rows, with spare rows that end behind the last ones.
const Case kCases[] = {{{130, 0, 3, 1}, 48, 144}, {{5, 6, 7, 4}, 16, 32}, {{1}, 16, 16},
                       {{8, 4}, 144, 272},        {{0, 0}, 16, 16},       {{}, 16, 16}};

#ifdef SHOAL_EMULATOR_TSAN  // which is slow, and about order alone
constexpr bool kRacesOnly = true;
#else
constexpr bool kRacesOnly = false;
#endif

/// y, dx, dweight, dbias of a layer on a device.
Tensors train(const Case& c, Device device, DType dtype, Fp8Scaling scaling) {
  const NarrowLaunches narrow;
  const auto groups = static_cast<int64_t>(c.rows.size());
  const auto there = [&](const Shape& shape, uint64_t seed, DType type) {
    return as(normal(shape, seed), type).to(device);
  };
  Leaf x_leaf, weight_leaf, bias_leaf;
  Tensor x = there({sum_of(c.rows), c.k}, 1, dtype), weight = there({groups, c.n, c.k}, 2, DType::f32),
         bias = there({groups, c.n}, 3, DType::f32);
  x.grad_ref.leaf = &x_leaf;
  weight.grad_ref.leaf = &weight_leaf;
  bias.grad_ref.leaf = &bias_leaf;
  Tensor y;
  for (int i = 0; i < 2; i++) {  // the second gradient of the weight is added to the first
    Tape tape;
    y = fp8_grouped_linear(x, weight, c.rows, bias, scaling);
    tape.backward({y}, {there({sum_of(c.rows), c.n}, 4, dtype)});
  }
  return all_to({y.detach(), x_leaf.grad, weight_leaf.grad, bias_leaf.grad}, kCpu);
}

std::set<std::pair<int, int>> types_of_calls() {
  std::set<std::pair<int, int>> types;
  for (const standin::ProductCall& call : standin::take_product_calls())
    types.emplace(call.type_a, call.type_b);
  return types;
}

Tolerance tolerance(DType dtype) {
  return dtype == DType::f32 ? Tolerance{2e-5, 2e-5} : Tolerance{1e-2, 1e-2};
}

using Types = std::set<std::pair<int, int>>;
const Types kForward = {{CUDA_R_8F_E4M3, CUDA_R_8F_E4M3}};
const Types kTensorTypes = {{CUDA_R_8F_E4M3, CUDA_R_8F_E4M3}, {CUDA_R_8F_E4M3, CUDA_R_8F_E5M2}};
const Types kBf16 = {{CUDA_R_16BF, CUDA_R_16BF}};

TEST(CudaFp8Products, OfLayersAreThoseOfTheCpu) {
  for (const Case& c : kCases) {
    if (kRacesOnly && sum_of(c.rows) > 100) continue;
    for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::block}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Tensors want = train(c, kCpu, dtype, scaling);
        standin::take_product_calls();
        expect_close(train(c, kCuda, dtype, scaling), want, tolerance(dtype),
                     str(sum_of(c.rows), " rows, ", dtype));
        const Types types = types_of_calls();
        if (sum_of(c.rows) > 0) {
          EXPECT_EQ(types, scaling == Fp8Scaling::tensor ? kTensorTypes : kForward);
        }
      }
    }
  }
}

TEST(CudaFp8Products, RunInEveryOrderOfTheStreams) {
  const Case c{{5, 6, 0, 7, 4, 1}, 16, 160};
  for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::block}) {
    const Tensors want = train(c, kCuda, DType::bf16, scaling);
    std::vector<standin::Options> policies = {{standin::Policy::lazy}};
    for (const int stream : {0, 1, 2, 3}) {
      if (!kRacesOnly) policies.push_back({standin::Policy::favour, stream});
    }
    for (const uint64_t seed : {1, 2, 3}) {
      if (!kRacesOnly) policies.push_back({standin::Policy::random, 0, seed});
    }
    for (const standin::Options& policy : policies) {
      std::thread([&] {
        standin::set_options(policy);
        const Tensors got = train(c, kCuda, DType::bf16, scaling);
        for (size_t i = 0; i < 3; i++) EXPECT_TRUE(same_bits(got[i], want[i])) << i;
      }).join();
    }
    standin::set_options({});
  }
}

TEST(CudaFp8Products, WhereTheCardHasNoneTheSameNumbersAreMultipliedInBf16) {
  const Case c{{kRacesOnly ? 6 : 130, 0, 3, 1}, 48, 144}, odd{{5, 6}, 24, 40};
  struct Card {
    int capability;
    const Case& c;
    bool tensor, block;  // whether it has such products
  };
  static bool said = false;
  log::set_quiet(false);
  ::testing::internal::CaptureStderr();
  for (const Card& card : {Card{80, c, false, false},
                           {89, c, true, false},
                           {90, c, true, true},
                           {100, c, true, false},
                           {90, odd, false, false}}) {
    for (const Fp8Scaling scaling : {Fp8Scaling::tensor, Fp8Scaling::block}) {
      const Tensors want = train(card.c, kCpu, DType::f32, scaling);
      standin::take_product_calls();
      on_card(card.capability, [&] {
        expect_close(train(card.c, kCuda, DType::f32, scaling), want, tolerance(DType::f32),
                     str(card.capability));
      });
      const bool has = scaling == Fp8Scaling::tensor ? card.tensor : card.block;
      const Types types = types_of_calls();
      if (&card.c ==
          &odd) {  // sums of 24 have no fp8 product, and neither have vectors of 5 rows: sums of 16 do
        EXPECT_TRUE(types.contains(*kBf16.begin()));
      } else {
        EXPECT_EQ(types, !has                            ? kBf16
                         : scaling == Fp8Scaling::tensor ? kTensorTypes
                                                         : kForward)
            << card.capability;
      }
    }
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t at = log.find("no fp8 product for these experts");
  EXPECT_EQ(at != std::string::npos, !said) << log;
  if (at != std::string::npos) {
    EXPECT_EQ(log.find("no fp8 product", at + 10), std::string::npos) << log;
  }
  said = true;
}

TEST(CudaFp8Products, ARefusalIsRememberedAndAProductThatFailsIsNamed) {
  on_card(90, [] {
    const Rows rows = {8};
    const Tensor x = Tensor::zeros({8, 16}, DType::f32, kCuda),
                 w = Tensor::zeros({1, 16, 16}, DType::f32, kCuda);
    const auto run = [&] { fp8_grouped_linear(x, w, rows, {}, Fp8Scaling::block); };
    constexpr int kInvalidValue = 7;
    const int64_t before = cuda::product_counts().choices;
    run();
    run();
    EXPECT_EQ(cuda::product_counts().choices, before + 1);
    standin::fail_next_call("cublasLtMatmul", kInvalidValue);
    const std::string message = error_of(run);
    EXPECT_NE(
        message.find("cublasLtMatmul failed with CUBLAS_STATUS_INVALID_VALUE for e4m3 (scales of vectors) "
                     "[8, 16] x e4m3 (scales of blocks) [16, 16]^T -> f32 [8, 16]"),
        std::string::npos)
        << message;
  });
  on_card(80, [] {
    const Rows rows = {8};
    const Tensor x = Tensor::zeros({8, 16}, DType::f32, kCuda),
                 w = Tensor::zeros({1, 16, 16}, DType::f32, kCuda);
    const auto run = [&] { fp8_grouped_linear(x, w, rows, {}, Fp8Scaling::block); };
    ::testing::internal::CaptureStderr();
    run();
    const int64_t before = cuda::product_counts().choices;
    run();
    ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(cuda::product_counts().choices, before);
  });
}

TEST(CudaFp8Products, ConversionsAreThoseOfTheCudaHeader) {
  for (const auto& [format, theirs] :
       {std::pair{Fp8Format::e4m3, __NV_E4M3}, std::pair{Fp8Format::e5m2, __NV_E5M2}}) {
    const auto expect_same = [&, f = format, t = theirs](float value) {
      ASSERT_EQ(to_fp8(value, f, true), __nv_cvt_float_to_fp8(value, __NV_SATFINITE, t)) << value;
      ASSERT_EQ(to_fp8(value, f, false), __nv_cvt_float_to_fp8(value, __NV_NOSAT, t)) << value;
    };
    // Every sign, exponent and upper fraction bits, with lower bits that make ties and what is beside them.
    for (uint32_t high = 0; high < 1U << 16; high += kRacesOnly ? 97 : 1) {
      for (const uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0xFFFFU})
        expect_same(std::bit_cast<float>(high << 16 | low));
    }
    for (int code = 0; code < 256; code++) {
      const auto storage = static_cast<__nv_fp8_storage_t>(code);
      const __half_raw half = __nv_cvt_fp8_to_halfraw(storage, theirs);
      const auto want = static_cast<float>(__half(half)), got = from_fp8(storage, format);
      ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want))) << code;
    }
  }
}

}  // namespace
}  // namespace shoal::testing
