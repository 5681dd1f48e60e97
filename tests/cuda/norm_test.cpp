#include "core/ops/norm.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

constexpr double kEps = 1e-5;
const Shape kShapes[] = {{0, 8}, {1, 1}, {1, 7}, {3, 5}, {2, 3, 16}, {11, 131}, {7, 520}, {5, 523}};

struct Case {
  bool layer, residual, bias, mixed;  // mixed: an f32 residual stream and bf16 y
};

/// x, residual, weight, bias, dy, dsum, sums before.
Tensors inputs_for(const Shape& shape) {
  const Shape row{shape[-1]};
  return {normal(shape, 1), normal(shape, 2), normal(row, 3), normal(row, 4),
          normal(shape, 5), normal(shape, 6), normal(row, 7)};
}

/// Forward, then backward of what forward kept; all results.
Tensors forward_and_backward(const Case& c, const Tensors& in) {
  const Device device = in[0].device();
  const DType dtype = in[0].dtype(), stats = stats_dtype(dtype);
  const DType stream = c.mixed ? stats : dtype;
  const auto empty = [&](DType type) { return Tensor::empty(in[0].shape(), type, device); };
  NormForward f{
      in[0], {}, as(in[2], stats), {}, empty(dtype), {}, {}, Tensor::empty({in[0].num_rows()}, stats, device),
      kEps};
  if (c.residual) f.residual = as(in[1], stream);
  if (c.residual) f.sum = empty(stream);
  if (!c.residual) f.x = as(in[0], stream);
  if (c.bias) f.bias = as(in[3], stats);
  if (c.layer) f.mean_T = Tensor::empty_like(f.rstd_T);
  (c.layer ? layer_norm_fwd : rms_norm_fwd)(device, f);

  NormBackward b{in[4],         {}, c.residual ? f.sum : f.x, f.weight, f.mean_T, f.rstd_T,
                 empty(stream), {}, as(in[6], stats).clone(), {}};
  if (c.residual) b.dsum = as(in[5], stream);
  const bool lowers = c.residual && c.mixed;
  if (lowers && dtype == DType::bf16) b.dx_low = empty(dtype);
  if (c.bias) b.dbias = as(in[6], stats).clone();
  (c.layer ? layer_norm_bwd : rms_norm_bwd)(device, b);

  NormBackward only_dx = b;  // in place of dy where the types allow it
  only_dx.dweight = only_dx.dbias = only_dx.dx_low = {};
  only_dx.dy = in[4].clone();
  only_dx.dx = c.mixed ? empty(stream) : only_dx.dy;
  (c.layer ? layer_norm_bwd : rms_norm_bwd)(device, only_dx);
  NormBackward only_sums = b;
  only_sums.dx = only_sums.dx_low = {};
  only_sums.dweight = as(in[6], stats).clone();
  if (c.bias) only_sums.dbias = as(in[6], stats).clone();
  (c.layer ? layer_norm_bwd : rms_norm_bwd)(device, only_sums);
  NormBackward only_bias = only_sums;  // the sums of a frozen weight are not made
  only_bias.dweight = {};
  if (c.bias) only_bias.dbias = as(in[6], stats).clone();
  (c.layer ? layer_norm_bwd : rms_norm_bwd)(device, only_bias);
  return {f.y,
          f.sum,
          f.mean_T,
          f.rstd_T,
          b.dx,
          lowers && !b.dx_low.defined() ? b.dx : b.dx_low,
          b.dweight,
          b.dbias,
          only_dx.dx,
          only_sums.dweight,
          only_sums.dbias,
          only_bias.dbias};
}

constexpr Case kCases[] = {{false, false, false, false}, {false, true, false, false},
                           {true, false, true, false},   {true, true, false, false},
                           {false, true, false, true},   {false, false, false, true},
                           {true, true, true, true}};

TEST(CudaNorm, ForwardAndBackwardAreThoseOfTheCpu) {
  for (const DType dtype : kFloats) {
    for (const Case& c : kCases) {
      if (c.mixed && dtype != DType::bf16) continue;
      const Tolerance tolerance = dtype == DType::bf16  ? Tolerance{2e-2, 4e-2}
                                  : dtype == DType::f32 ? Tolerance{1e-4, 5e-5}
                                                        : Tolerance{1e-11, 1e-11};
      for (const Shape& shape : kShapes) {
        SCOPED_TRACE(str("layer ", c.layer, " residual ", c.residual, " bias ", c.bias, " mixed ", c.mixed));
        expect_like_cpu(
            inputs_for(shape), dtype, [&](const Tensors& in) { return forward_and_backward(c, in); },
            tolerance);
      }
    }
  }
}

// Sums of the weight gradients of such rows do not fit into shared memory.
TEST(CudaNorm, RowsMayBeWiderThanSharedMemory) {
  const Tensors inputs = inputs_for({4, 13000});
  for (const bool layer : {false, true}) {
    expect_like_cpu(
        inputs, DType::f32,
        [&](const Tensors& in) {
          return forward_and_backward({layer, true, layer, false}, in);
        },
        Tolerance{1e-3, 5e-4});
  }
}

TEST(CudaNorm, ANanStaysInItsRow) {
  Tensors in = all_as(inputs_for({3, 70}), DType::f32);
  in[0].data<float>()[70 + 13] = NAN;
  const auto y = to_doubles(forward_and_backward(kCases[0], all_to(in, kCuda))[0]);
  for (size_t i = 0; i < y.size(); i++) EXPECT_EQ(std::isnan(y[i]), i / 70 == 1) << i;
}

TEST(CudaNorm, LayerNormKeepsItsPrecisionFarFromZero) {
  const Tensor x = Tensor::from(std::vector<float>{10000, 10001, 10002, 10003}, {1, 4}, kCuda);
  const Tensor ones = Tensor::from(std::vector<float>(4, 1), {4}, kCuda);
  EXPECT_TRUE(close(to_doubles(layer_norm(x, ones, {}, 0)), {-1.3416408, -0.4472136, 0.4472136, 1.3416408},
                    {1e-6, 1e-6}));
}

}  // namespace
}  // namespace shoal::testing
