#include "core/ops/optimizer.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

const int64_t kCounts[] = {0, 1, 7, 1000, 4099};

Tensor squares(int64_t count, uint64_t seed) {
  const Tensor x = normal({count}, seed), out = Tensor::empty_like(x);
  mul_fwd(kCpu, x, x, out);
  return out;
}

TEST(CudaOptimizer, AdamwStepsAreThoseOfTheCpu) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const int64_t count : kCounts) {
      expect_like_cpu(
          {normal({count}, 1), normal({count}, 2), normal({count}, 3), squares(count, 4)}, dtype,
          [](const Tensors& in) {
            Tensors t = all_to(in, in[0].device());
            for (int step = 1; step <= 2; step++) {
              adamw_step(in[0].device(), {t[0], t[1], t[2], t[3], 0.01, 0.9, 0.99, 1e-8, 0.1,
                                          1 - std::pow(0.9, step), 1 - std::pow(0.99, step), 0.5});
            }
            return t;
          },
          dtype == DType::f32 ? Tolerance{1e-5, 1e-6} : Tolerance{1e-12, 1e-12});
    }
  }
}

TEST(CudaOptimizer, SgdStepsAreThoseOfTheCpu) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const int64_t count : kCounts) {
      for (const bool nesterov : {false, true}) {
        for (const bool momentum : {false, true}) {
          expect_like_cpu({normal({count}, 1), normal({count}, 2), normal({count}, 3)}, dtype,
                          [&](const Tensors& in) {
                            Tensors t = all_to(in, in[0].device());
                            sgd_step(in[0].device(),
                                     {t[0], t[1], momentum ? t[2] : Tensor{}, 0.1, 0.9, 0.01, 0.5, nesterov});
                            return t;
                          });
        }
      }
    }
  }
}

TEST(CudaOptimizer, LionStepsAreThoseOfTheCpu) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const int64_t count : kCounts) {
      expect_like_cpu({normal({count}, 1), normal({count}, 2), normal({count}, 3)}, dtype,
                      [](const Tensors& in) {
                        Tensors t = all_to(in, in[0].device());
                        for (int step = 0; step < 2; step++)
                          lion_step(in[0].device(), {t[0], t[1], t[2], 0.01, 0.9, 0.99, 0.1, 0.5});
                        return t;
                      });
    }
  }
}

TEST(CudaOptimizer, LionLeavesAParameterWithoutGradientAndMomentumButForItsDecay) {
  const Tensor param = Tensor::from(std::vector<float>(40, 2.0F), {40}, kCuda);
  const Tensor zero = Tensor::zeros({40}, DType::f32, kCuda);
  lion_step(kCuda, {param, zero, zero.clone(), 0.5, 0.9, 0.99, 0.25, 1});
  EXPECT_EQ(to_doubles(param), std::vector<double>(40, 2 - 0.5 * 0.25 * 2));
}

TEST(CudaOptimizer, NanInAGradientStaysInItsElement) {
  const Tensor param = Tensor::zeros({40}, DType::f32, kCuda), m = param.clone(), v = param.clone();
  std::vector<float> grads(40, 1.0F);
  grads[17] = NAN;
  adamw_step(kCuda, {param, Tensor::from(grads, {40}, kCuda), m, v, 0.01, 0.9, 0.99, 1e-8, 0, 0.1, 0.01, 1});
  const auto p = to_doubles(param);
  for (size_t i = 0; i < p.size(); i++) EXPECT_EQ(std::isnan(p[i]), i == 17) << i;
}

}  // namespace
}  // namespace shoal::testing
