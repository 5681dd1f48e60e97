#include "core/ops/attention.h"
#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

struct Case {
  RopeForm form;
  int64_t heads, kv_heads, head_size, rotary;
};
constexpr Case kCases[] = {{RopeForm::half, 4, 2, 10, 6},
                           {RopeForm::half, 1, 1, 2, 0},
                           {RopeForm::adjacent, 6, 2, 16, 0},
                           {RopeForm::adjacent, 3, 3, 34, 8}};

AttentionSpec spec_of(const Case& c, int64_t rows) {
  AttentionSpec spec;
  spec.seq = rows;
  spec.heads = c.heads;
  spec.kv_heads = c.kv_heads;
  spec.head_size = c.head_size;
  return spec;
}

TEST(CudaRope, TurnsForthAndBackAsTheCpuDoes) {
  for (const DType dtype : kFloats) {
    for (const Case& c : kCases) {
      for (const int64_t rows : {0, 1, 9}) {
        std::vector<int32_t> positions;
        for (int64_t t = 0; t < rows; t++) positions.push_back(static_cast<int32_t>(t * 5 % 11));
        const Tensor where = Tensor::from(positions, {rows});
        const Shape shape{rows, c.kv_heads, c.heads / c.kv_heads + 2, c.head_size};
        expect_like_cpu({normal(shape, 1), where}, dtype, [&](const Tensors& in) {
          const Device device = in[0].device();
          const RopeSpec rope_spec{c.form, c.rotary, 100};
          const Tensor table = rope_table(rope_spec, c.head_size, 11, stats_dtype(in[0].dtype()), device);
          const Tensor turned = in[0].clone(), back = in[0].clone();
          rope_fwd(device, turned, spec_of(c, rows), rope_spec, table, in[1], false);
          rope_fwd(device, back, spec_of(c, rows), rope_spec, table, in[1], true);
          return Tensors{turned, back};
        });
      }
    }
  }
}

TEST(CudaRope, APositionOutsideOfTheTableIsReportedByTheNextResultForTheHost) {
  const Case c = kCases[0];
  const Tensor qkv = as(normal({3, 2, 4, 10}, 1), DType::f32).to(kCuda);
  const RopeSpec rope_spec{c.form, c.rotary, 100};
  const Tensor table = rope_table(rope_spec, c.head_size, 5, DType::f32, kCuda);
  const Tensor positions = Tensor::from(std::vector<int32_t>{4, 5, -1}, {3}, kCuda);
  rope_fwd(kCuda, qkv, spec_of(c, 3), rope_spec, table, positions, false);
  EXPECT_NE(error_of([&] {
              sum_squares(qkv);
            }).find("cuda:0: rope: a position outside of the table; make a longer table (position 1)"),
            std::string::npos);
  EXPECT_GT(sum_squares(qkv), 0) << "an error is reported once";
}

}  // namespace
}  // namespace shoal::testing
