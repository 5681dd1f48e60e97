#include "core/backend/cuda/grouped_gemm.h"

#include "core/backend/cuda/groups.h"
#include "core/ops/linear.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

using Rows = std::vector<int64_t>;

int64_t sum_of(const Rows& rows) {
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  return total;
}

/// rows of each group, and the sizes of its matrix.
struct Grouped {
  Rows rows;
  int64_t outputs, inputs;
};
// Tiles are 64 x 128, slices 64 long, 3 of them at once; 16 bytes at a time where sizes are multiples of 8.
const Grouped kGrouped[] = {
    {{66, 0, 3}, 136, 72},  // two tiles in each direction, an empty group, a part of a slice
    {{3}, 24, 264},         // more slices than are on their way at once
    {{2, 0, 65}, 131, 67},  // odd sizes
    {{1, 1}, 2, 1},         // one element
    {{0, 0}, 8, 8},         // no rows
    {{2, 1}, 6, 0}};        // empty sums

Tolerance product_tolerance(DType result) {
  return result == DType::bf16 ? Tolerance{1e-2, 1e-2} : Tolerance{1e-5, 5e-5};
}

/// Operands for a case: bf16 x_RI, matrices and dy_RO.
Tensors operands_of(const Grouped& c) {
  const auto groups = static_cast<int64_t>(c.rows.size());
  return all_as({normal({sum_of(c.rows), c.inputs}, 1), normal({groups, c.outputs, c.inputs}, 2),
                 normal({sum_of(c.rows), c.outputs}, 3), normal({groups, c.inputs, c.outputs}, 4)},
                DType::bf16);
}

/// Runs body on the device under every schedule and with usual launches; the results must be those in
/// `exact`.
template <class Body>
void expect_products(const Tensors& operands, const Tensors& exact, DType result, const std::string& what,
                     const Body& body) {
  {
    const NarrowLaunches narrow;
    expect_close(device_results(operands, body), exact, product_tolerance(result), what);
  }
#ifndef SHOAL_EMULATOR_TSAN  // which follows 255 threads
  expect_close(all_to(body(all_to(operands, kCuda)), kCpu), exact, product_tolerance(result), what);
#endif
}

TEST(CudaGroupedProduct, RowsAreThoseOfF64) {
  for (const Grouped& c : kGrouped) {
    const Tensors operands = operands_of(c), wide = all_as(operands, DType::f64);
    for (const bool transposed : {true, false}) {
      const size_t matrices = transposed ? 1 : 3;
      const Tensor want = Tensor::empty({sum_of(c.rows), c.outputs}, DType::f64);
      grouped_gemm_rows(kCpu, {.transpose_b = transposed}, wide[0], wide[matrices], want, c.rows);
      for (const DType result : {DType::f32, DType::bf16}) {
        const auto body = [&](const Tensors& in) {
          const Tensor y = Tensor::empty({sum_of(c.rows), c.outputs}, result, kCuda);
          cuda::grouped_rows_product(in[0], in[matrices], transposed, y, c.rows);
          return Tensors{y};
        };
        expect_products(operands, {want}, result, str(want.shape(), " x ", c.inputs, transposed ? "^T" : ""),
                        body);
      }
    }
  }
}

TEST(CudaGroupedProduct, WeightGradientsAreThoseOfF64) {
  for (const Grouped& c : kGrouped) {
    const Tensors operands = operands_of(c), wide = all_as(operands, DType::f64);
    const auto groups = static_cast<int64_t>(c.rows.size());
    const Tensor before = as(normal({groups, c.outputs, c.inputs}, 5), DType::f32);
    for (const bool accumulate : {false, true}) {
      const Tensor want = as(before, DType::f64).clone();
      grouped_gemm_reduce(kCpu, {.accumulate = accumulate}, wide[2], wide[0], want, c.rows);
      const auto body = [&](const Tensors& in) {
        const Tensor dweight =
            accumulate ? before.to(kCuda).clone() : Tensor::empty(before.shape(), DType::f32, kCuda);
        cuda::grouped_reduce_product(accumulate, in[2], in[0], dweight, c.rows);
        return Tensors{dweight};
      };
      expect_products(operands, {want}, DType::f32, str(want.shape(), accumulate ? " added" : ""), body);
    }
  }
}

TEST(CudaGroupedProduct, MoreGroupsThanFitIntoOneLaunchAreSeveral) {
  const NarrowLaunches narrow;
  const Grouped c{Rows(cuda::RowGroups::kMost + 2, 1), 8, 8};
  const Tensors operands = operands_of(c), wide = all_as(operands, DType::f64),
                there = all_to(operands, kCuda);
  const Tensor want = Tensor::empty({130, 8}, DType::f64), y = Tensor::empty({130, 8}, DType::f32, kCuda);
  grouped_gemm_rows(kCpu, {.transpose_b = true}, wide[0], wide[1], want, c.rows);
  cuda::grouped_rows_product(there[0], there[1], true, y, c.rows);
  const Tensor dwant = Tensor::empty({130, 8, 8}, DType::f64),
               dweight = Tensor::empty({130, 8, 8}, DType::f32, kCuda);
  grouped_gemm_reduce(kCpu, {}, wide[2], wide[0], dwant, c.rows);
  cuda::grouped_reduce_product(false, there[2], there[0], dweight, c.rows);
  expect_close(all_to({y, dweight}, kCpu), {want, dwant}, product_tolerance(DType::f32), "130 groups");
}

TEST(CudaGroupedProduct, NanStaysInItsRowAndItsGroup) {
  const Grouped c{{3, 2}, 24, 16};
  Tensors operands = operands_of(c);
  const auto results = [&] {
    const Tensors in = all_to(operands, kCuda);
    const Tensor y = Tensor::empty({5, 24}, DType::f32, kCuda),
                 dweight = Tensor::empty({2, 24, 16}, DType::f32, kCuda);
    cuda::grouped_rows_product(in[0], in[1], true, y, c.rows);
    cuda::grouped_reduce_product(false, in[2], in[0], dweight, c.rows);
    return all_to({y, dweight}, kCpu);
  };
  const Tensors clean = results();
  operands[0].data<BFloat16>()[2 * 16 + 5] = NAN;  // the last row of group 0
  const Tensors got = results();
  for (int64_t row = 0; row < 5; row++) {
    if (row == 2) {
      for (const double value : to_doubles(got[0].rows(2, 3))) EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_TRUE(same_bits(got[0].rows(row, row + 1), clean[0].rows(row, row + 1))) << row;
    }
  }
  EXPECT_TRUE(same_bits(got[1].rows(1, 2), clean[1].rows(1, 2)));
  EXPECT_TRUE(std::isnan(to_doubles(got[1])[5]) && !std::isnan(to_doubles(got[1])[4]));
}

}  // namespace
}  // namespace shoal::testing
