// CUDA kernel of core/ops/rows.h.
#include "core/ops/rows.h"

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

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
    for (const DType dtype : kFloats) {
      const auto body = [&](const Tensors& in) {
        const Tensor to = in[1].clone();
        copy_columns(to.device(), CopyColumns{in[0], to, c.first_from, c.first_to, c.width});
        return Tensors{to};
      };
      const Tensors inputs = {as(normal({c.rows, c.from}, 1), dtype), as(normal({c.rows, c.to}, 2), dtype)};
      EXPECT_TRUE(same_bits(device_results(inputs, body)[0], body(inputs)[0])) << dtype << ' ' << c.width;
    }
  }
}

}  // namespace
}  // namespace shoal::testing
