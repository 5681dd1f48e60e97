#include "core/ops/activation.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

constexpr Activation kActivations[] = {Activation::silu, Activation::gelu, Activation::relu};

TEST(CudaActivation, ValuesAndGradientsAreThoseOfTheCpu) {
  for (const Activation f : kActivations) {
    for (const DType dtype : kFloats) {
      for (const Shape& shape : {Shape{0}, Shape{1}, Shape{3, 129}, Shape{1024}}) {
        expect_like_cpu(
            {normal(shape, 1, 4), normal(shape, 2)}, dtype,
            [&](const Tensors& in) {
              const Tensor y = Tensor::empty_like(in[0]), dx = Tensor::empty_like(in[0]);
              activate_fwd(y.device(), in[0], f, y);
              activate_bwd(y.device(), in[1], in[0], f, dx);
              return Tensors{y, dx};
            },
            dtype == DType::bf16 ? Tolerance{1e-2, 1e-2} : Tolerance{1e-5, 1e-6});
      }
    }
  }
}

TEST(CudaActivation, GatedValuesAndGradientsAreThoseOfTheCpu) {
  for (const Activation f : kActivations) {
    for (const DType dtype : kFloats) {
      for (const Shape& shape : {Shape{0, 8}, Shape{1, 2}, Shape{5, 14}, Shape{4, 258}, Shape{2, 1024}}) {
        expect_like_cpu(
            {normal(shape, 1, 4), normal({shape[0], shape[1] / 2}, 2)}, dtype,
            [&](const Tensors& in) {
              const Tensor y = Tensor::empty_like(in[1]), dx = Tensor::empty_like(in[0]),
                           over_x = in[0].clone();
              gated_activate_fwd(y.device(), in[0], f, y);
              gated_activate_bwd(y.device(), in[1], in[0], f, dx);
              gated_activate_bwd(y.device(), in[1], over_x, f, over_x);
              return Tensors{y, dx, over_x};
            },
            dtype == DType::bf16 ? Tolerance{1e-2, 2e-2} : Tolerance{1e-5, 1e-5});
      }
    }
  }
}

TEST(CudaActivation, HugeInputsAndNanComeOutAsOnTheCpu) {
  const Tensor x = Tensor::from(std::vector<float>{-1e30F, -100, -20, 20, 100, 1e30F, NAN}, {7});
  for (const Activation f : kActivations) {
    const Tensor got = Tensor::empty({7}, DType::f32, kCuda), want = Tensor::empty({7}, DType::f32);
    activate_fwd(kCuda, x.to(kCuda), f, got);
    activate_fwd(kCpu, x, f, want);
    const auto g = to_doubles(got), w = to_doubles(want);
    for (size_t i = 0; i < 7; i++) {
      EXPECT_EQ(std::isnan(g[i]), std::isnan(w[i])) << i;
      if (!std::isnan(w[i])) {
        EXPECT_NEAR(g[i], w[i], 1e-5 * std::abs(w[i]) + 1e-30) << i;
      }
    }
  }
}

}  // namespace
}  // namespace shoal::testing
