// CUDA kernel of core/ops/rows.h.
#include "core/ops/rows.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

template <class T>
Tensor integers(const Tensor& x) {
  std::vector<T> values;
  for (const double v : to_doubles(x)) values.push_back(static_cast<T>(std::abs(v) * 50));
  return Tensor::from(values, x.shape());
}

TEST(CudaRows, ColumnsHaveTheBitsOfTheCpuAndOthersAreLeftAlone) {
  const NarrowLaunches narrow;
  struct Case {
    int64_t rows, from, to, first_from, first_to, width;
  };
  for (const Case& c : {Case{0, 8, 8, 0, 0, 8},
                        {5, 7, 9, 2, 3, 4},
                        {4, 272, 520, 8, 256, 257},
                        {3, 16, 24, 8, 16, 8},
                        {3, 16, 24, 4, 1, 0}}) {
    const auto expect_same = [&](const Tensors& inputs) {
      const auto body = [&](const Tensors& in) {
        const Tensor to = in[1].clone();
        copy_columns(to.device(), CopyColumns{in[0], to, c.first_from, c.first_to, c.width});
        return Tensors{to};
      };
      EXPECT_TRUE(same_bits(device_results(inputs, body)[0], body(inputs)[0]))
          << inputs[0].dtype() << ' ' << c.width;
    };
    const Tensor from = normal({c.rows, c.from}, 1), to = normal({c.rows, c.to}, 2);
    for (const DType dtype : kFloats) expect_same({as(from, dtype), as(to, dtype)});
    expect_same({integers<int32_t>(from), integers<int32_t>(to)});
    expect_same({integers<int64_t>(from), integers<int64_t>(to)});
    expect_same({integers<uint8_t>(from), integers<uint8_t>(to)});
  }
}

}  // namespace
}  // namespace shoal::testing
