#include "core/ops/elementwise.h"

#include <limits>

#include "core/autograd/accumulate.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

const Shape kShapes[] = {{0}, {1}, {7}, {64}, {3, 129}, {1, 1003}, {5, 0}};

TEST(CudaElementwise, MapsAreThoseOfTheCpu) {
  for (const DType dtype : kFloats) {
    for (const Shape& shape : kShapes) {
      expect_like_cpu({normal(shape, 1), normal(shape, 2)}, dtype, [](const Tensors& in) {
        const Tensor &x = in[0], &y = in[1];
        Tensors out(4);
        for (Tensor& t : out) t = Tensor::empty_like(x);
        add_fwd(x.device(), x, y, out[0]);
        mul_fwd(x.device(), x, y, out[1]);
        scale_fwd(x.device(), x, 0.3, out[2]);
        fill(x.device(), out[3], -1.7);
        Tensor sum = x.clone();
        accumulate(x.device(), sum, y);
        out.push_back(sum);
        return out;
      });
    }
  }
}

TEST(CudaElementwise, WeightedSumsAndNormsOfRowsAreThoseOfTheCpu) {
  const NarrowLaunches narrow;
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const Shape& shape : {Shape{4, 0}, {3, 7}, {2, 3001}, {5, 8192}, {0, 4}}) {
      expect_like_cpu({normal(shape, 1), normal(shape, 2)}, dtype, [](const Tensors& in) {
        const Tensor &x = in[0], &y = in[1];
        const Tensor out = Tensor::empty_like(x), own = x.clone();
        axpby(x.device(), 0.7, x, -1.3, y, out);
        axpby(x.device(), -2, own, 0.5, y, own);
        const Tensor norms = Tensor::empty({x.size(0)}, x.dtype(), x.device()),
                     exact = Tensor::empty_like(norms);
        inverse_row_norms(x.device(), x, 0.1, norms);
        inverse_row_norms(x.device(), x, 0, exact);
        return Tensors{out, own, norms, exact};
      });
    }
  }
}

// One rounding each: not only close.
TEST(CudaElementwise, SumsProductsAndCastsHaveTheBitsOfTheCpu) {
  const NarrowLaunches narrow;
  const Tensor x64 = normal({777}, 3, 10), y64 = normal({777}, 4);
  for (const DType dtype : kFloats) {
    const Tensors inputs = {as(x64, dtype), as(y64, dtype)};
    const auto body = [&](const Tensors& in) {
      Tensors out = {Tensor::empty_like(in[0]), Tensor::empty_like(in[0])};
      add_fwd(in[0].device(), in[0], in[1], out[0]);
      mul_fwd(in[0].device(), in[0], in[1], out[1]);
      for (const DType to : kFloats) {
        out.push_back(Tensor::empty(in[0].shape(), to, in[0].device()));
        cast_fwd(in[0].device(), in[0], out.back());
      }
      return out;
    };
    const Tensors got = device_results(inputs, body), want = body(inputs);
    for (size_t i = 0; i < want.size(); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << dtype << ' ' << i;
  }
}

TEST(CudaElementwise, CastsRoundToEvenAndKeepNanAndInfinity) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  // 1 + 2^-8 and 1 + 3 * 2^-8 lie halfway between two bf16 numbers.
  const Tensor x =
      Tensor::from(std::vector<float>{1.00390625F, 1.01171875F, inf, -inf, nan, -0.0F, 3e38F}, {7});
  const Tensor got = Tensor::empty({7}, DType::bf16, kCuda), want = Tensor::empty({7}, DType::bf16);
  cast_fwd(kCuda, x.to(kCuda), got);
  cast_fwd(kCpu, x, want);
  EXPECT_TRUE(same_bits(got.to(kCpu), want));
  EXPECT_EQ(to_doubles(got)[0], 1);
  EXPECT_EQ(to_doubles(got)[1], 1.015625);
  EXPECT_TRUE(std::isnan(to_doubles(got)[4]));
}

TEST(CudaElementwise, PartsOfATensorThatAreNotAlignedAreRightToo) {
  const Tensor x = as(normal({100}, 5), DType::bf16).to(kCuda),
               y = as(normal({100}, 6), DType::bf16).to(kCuda);
  for (const int64_t offset : {0, 1, 3, 8}) {
    const Tensor a = x.flat(offset, 60), b = y.flat(8, 60), out = Tensor::zeros({100}, DType::bf16, kCuda);
    add_fwd(kCuda, a, b, out.flat(offset, 60));
    const Tensor want = Tensor::zeros({100}, DType::bf16);
    add_fwd(kCpu, a.to(kCpu), b.to(kCpu), want.flat(offset, 60));
    EXPECT_TRUE(same_bits(out.to(kCpu), want)) << offset;
  }
}

TEST(CudaElementwise, Bf16GradientsAddToF32Sums) {
  const Tensor from = as(normal({333}, 7), DType::bf16), to = as(normal({333}, 8), DType::f32);
  const Tensor got = to.to(kCuda), want = to.clone();
  accumulate(kCuda, got, from.to(kCuda));
  accumulate(kCpu, want, from);
  EXPECT_TRUE(same_bits(got.to(kCpu), want));
  EXPECT_NE(
      error_of([&] { accumulate(kCuda, got, from.to(kCuda).flat(0, 3)); }).find("expected 333 elements"),
      std::string::npos);
}

TEST(CudaElementwise, SigmoidAndItsGradientAreThoseOfTheCpu) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    expect_like_cpu({normal({5, 77}, 1, 20), normal({5, 77}, 2)}, dtype, [](const Tensors& in) {
      const Tensor y = Tensor::empty_like(in[0]), dx = Tensor::empty_like(in[0]);
      sigmoid_fwd(y.device(), in[0], y);
      sigmoid_bwd(y.device(), in[1], y, dx);
      return Tensors{y, dx};
    });
  }
}

TEST(CudaElementwise, RowsAreScaledAndTheGradientOfTheScaleIsTheirDotProduct) {
  for (const DType dtype : kFloats) {
    for (const Shape& shape :
         {Shape{0, 8}, Shape{1, 1}, Shape{9, 8}, Shape{11, 67}, Shape{4, 1024}, Shape{7, 523}}) {
      const Tensors inputs = {normal(shape, 1), normal(shape, 2), normal({shape[0]}, 3)};
      expect_like_cpu(
          inputs, dtype,
          [&](const Tensors& in) {
            const Tensor scale = as(in[2], stats_dtype(in[0].dtype()));
            const Tensor y = Tensor::empty_like(in[0]), dx = Tensor::empty_like(in[0]);
            const Tensor dscale = Tensor::empty_like(scale), only = Tensor::empty_like(scale);
            scale_rows_fwd(y.device(), in[0], scale, y);
            scale_rows_bwd(y.device(), in[1], in[0], scale, dx, dscale);
            scale_rows_bwd(y.device(), in[1], in[0], scale, {}, only);
            return Tensors{y, dx, dscale, only};
          },
          dtype == DType::bf16 ? Tolerance{1e-2, 2e-2} : Tolerance{1e-4, 1e-4});
    }
  }
}

TEST(CudaElementwise, SumsOverAllElementsAreThoseOfTheCpu) {
  for (const DType dtype : kFloats) {
    for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{31}, int64_t{1000}, int64_t{5003}}) {
      const Tolerance tolerance{dtype == DType::bf16 ? 1e-2 : 1e-6, 1e-6};
      expect_like_cpu(
          {normal({count}, 9)}, dtype,
          [](const Tensors& in) {
            const Device device = in[0].device();
            const Tensor total = Tensor::empty({}, in[0].dtype(), device);
            sum_fwd(device, in[0], total);
            return Tensors{total, Tensor::from(std::vector<double>{sum_squares(in[0])}, {1}),
                           Tensor::from(std::vector<double>{all_finite(in[0]) ? 1.0 : 0.0}, {1})};
          },
          tolerance);
    }
  }
}

TEST(CudaElementwise, OneNanOrInfinityAnywhereIsSeen) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    for (const DType dtype : kFloats) {
      for (const int64_t at : {0, 500, 1000}) {
        std::vector<double> values(1001, 1.0);
        values[static_cast<size_t>(at)] = bad;
        const Tensor x = as(Tensor::from(values, {1001}), dtype).to(kCuda);
        EXPECT_FALSE(all_finite(x)) << dtype << " at " << at;
        EXPECT_FALSE(std::isfinite(sum_squares(x)));
        EXPECT_TRUE(all_finite(x.flat(at == 0 ? 1 : 0, at == 0 ? 1000 : at)));
      }
    }
  }
}

}  // namespace
}  // namespace shoal::testing
