#include "core/ops/permute.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

/// Tokens times choices sorted by expert; a quarter of the slots is dropped, and expert 1 gets nothing.
struct Plan {
  Tensor row_N, choice_N, slots_TK;
};
Plan plan_of(int64_t tokens, int64_t top_k) {
  const RandomStream random(5, "plan");
  std::vector<int64_t> row, choice, slots(static_cast<size_t>(tokens * top_k), -1);
  for (const uint32_t expert : {0U, 1U, 2U, 3U}) {
    for (int64_t n = 0; n < tokens * top_k; n++) {
      const uint32_t drawn = random.bits(static_cast<uint64_t>(n)) % 4;
      if ((drawn == 1 ? 3 : drawn) != expert || random.bits(static_cast<uint64_t>(1000 + n)) % 4 == 0)
        continue;
      slots[static_cast<size_t>(n)] = static_cast<int64_t>(row.size());
      row.push_back(n / top_k);
      choice.push_back(n % top_k);
    }
  }
  const auto count = static_cast<int64_t>(row.size());
  return {Tensor::from(row, {count}), Tensor::from(choice, {count}), Tensor::from(slots, {tokens, top_k})};
}

/// x, weights, gradient of the combined rows, plan.
Tensors inputs_for(int64_t tokens, int64_t top_k, int64_t width) {
  const Plan plan = plan_of(tokens, top_k);
  return {normal({tokens, width}, 1),
          normal({tokens, top_k}, 2),
          normal({tokens, width}, 3),
          plan.row_N,
          plan.choice_N,
          plan.slots_TK};
}

Tensors there_and_back(const Tensors& in) {
  const Device device = in[0].device();
  const DType dtype = in[0].dtype();
  const Tensor &x = in[0], weights = as(in[1], stats_dtype(dtype)), &dy = in[2], &rows = in[3],
               &slots = in[5];
  const auto routed = [&] { return Tensor::empty({rows.numel(), x.size(1)}, dtype, device); };
  const Tensor gathered = routed(), combined = Tensor::empty_like(x), plain = Tensor::empty_like(x);
  gather_rows_fwd(device, x, rows, gathered);
  combine_rows_fwd(device, gathered, weights, slots, combined);
  combine_rows_fwd(device, gathered, {}, slots, plain);
  CombineBackward b{dy, gathered, weights, slots, rows, in[4], routed(), Tensor::empty_like(weights)};
  combine_rows_bwd(device, b);
  CombineBackward over_x{dy, gathered.clone(), {}, slots, rows, in[4], {}, {}};
  over_x.dx_ND = over_x.x_ND;
  combine_rows_bwd(device, over_x);
  CombineBackward only_weights{dy, gathered, weights, slots, rows, in[4], {}, Tensor::empty_like(weights)};
  combine_rows_bwd(device, only_weights);
  return {gathered, combined, plain, b.dx_ND, b.dweights_TK, over_x.dx_ND, only_weights.dweights_TK};
}

TEST(CudaPermute, RowsMoveThereAndBackAsOnTheCpu) {
  for (const DType dtype : kFloats) {
    const Tolerance tolerance = dtype == DType::bf16  ? Tolerance{2e-2, 5e-2}
                                : dtype == DType::f32 ? Tolerance{1e-4, 5e-5}
                                                      : Tolerance{1e-11, 1e-11};
    expect_like_cpu(inputs_for(0, 2, 3), dtype, there_and_back, tolerance);
    expect_like_cpu(inputs_for(1, 1, 1), dtype, there_and_back, tolerance);
    expect_like_cpu(inputs_for(5, 2, 7), dtype, there_and_back, tolerance);
    expect_like_cpu(inputs_for(9, 3, 520), dtype, there_and_back, tolerance);
    expect_like_cpu(inputs_for(6, 2, 523), dtype, there_and_back, tolerance);
  }
}

TEST(CudaPermute, CopiedRowsHaveTheSameBits) {
  Tensors in = all_as(inputs_for(9, 3, 24), DType::bf16);
  in[0].data<BFloat16>()[5].bits = 0x7F81;  // a signalling NaN
  const Tensors got = there_and_back(all_to(in, kCuda)), want = there_and_back(in);
  EXPECT_TRUE(same_bits(got[0].to(kCpu), want[0]));
}

TEST(CudaPermute, ATokenWithoutSlotsGetsZeros) {
  const Tensor x = as(normal({2, 40}, 1), DType::f32).to(kCuda),
               y = Tensor::empty({2, 40}, DType::f32, kCuda);
  const Tensor slots = Tensor::from(std::vector<int64_t>{-1, -1, 1, -1}, {2, 2}, kCuda);
  combine_rows_fwd(kCuda, x, {}, slots, y);
  const auto got = to_doubles(y), from = to_doubles(x);
  for (size_t d = 0; d < 40; d++) {
    EXPECT_EQ(got[d], 0);
    EXPECT_EQ(got[40 + d], from[40 + d]);
  }
}

TEST(CudaPermute, RowsOfNoTokenAreZerosThereAndBack) {
  for (const int64_t width : {24, 37}) {  // 16 bytes at a time, and single elements
    Tensors in = inputs_for(9, 3, width);
    for (const int64_t n : {int64_t{0}, int64_t{4}, in[3].numel() - 1})
      in[3].data<int64_t>()[n] = in[4].data<int64_t>()[n] = -1;
    for (const DType dtype : kFloats) {
      expect_like_cpu(in, dtype, there_and_back,
                      dtype == DType::bf16 ? Tolerance{2e-2, 5e-2} : Tolerance{1e-4, 5e-5});
      const Tensors got = all_to(there_and_back(all_to(all_as(in, dtype), kCuda)), kCpu);
      for (const size_t i : {size_t{0}, size_t{3}, size_t{5}}) {
        for (const double value : to_doubles(got[i].rows(4, 5))) EXPECT_EQ(value, 0) << "result " << i;
      }
    }
  }
}

TEST(CudaPermute, WrongIndicesAreReportedAndGiveNan) {
  const NarrowLaunches narrow;
  const Tensor x = as(normal({2, 40}, 1), DType::f32).to(kCuda),
               y = Tensor::empty({3, 40}, DType::f32, kCuda);
  const auto message_of = [&](const Tensor& t) { return error_of([&] { sum_squares(t); }); };
  gather_rows_fwd(kCuda, x, Tensor::from(std::vector<int64_t>{0, 2, -2}, {3}, kCuda), y);
  EXPECT_NE(message_of(y).find("gather_rows: the index of a row that x does not have (position 1)"),
            std::string::npos);
  EXPECT_TRUE(std::isnan(to_doubles(y)[40]) && std::isnan(to_doubles(y)[119]) &&
              !std::isnan(to_doubles(y)[0]));

  const Tensor slots = Tensor::from(std::vector<int64_t>{0, 2, -2}, {3, 1}, kCuda);
  combine_rows_fwd(kCuda, x, {}, slots, y);
  EXPECT_NE(message_of(y).find("combine_rows: a slot that is no row of x (position 1)"), std::string::npos);
  EXPECT_TRUE(std::isnan(to_doubles(y)[40]) && std::isnan(to_doubles(y)[119]) &&
              !std::isnan(to_doubles(y)[0]));

  const Tensor zeros = Tensor::zeros({2}, DType::i64, kCuda);
  const CombineBackward b{
      y, x, {}, slots, Tensor::from(std::vector<int64_t>{0, 3}, {2}, kCuda), zeros, Tensor::empty_like(x),
      {}};
  combine_rows_bwd(kCuda, b);
  EXPECT_NE(message_of(x).find("combine_rows: a token or choice that the slots do not have (position 1)"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
