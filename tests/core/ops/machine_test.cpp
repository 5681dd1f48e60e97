// The kernels that measure a machine do the work that they say.
#include "core/ops/machine.h"

#include <gtest/gtest.h>

#include "core/base/threads.h"

namespace shoal::testing {
namespace {

TEST(Machine, RoundsAreWholeAndScaleWithThreads) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
    const double one = multiply_add_rounds(Device{}, dtype, 100);
    EXPECT_GT(one, 0);
    EXPECT_EQ(multiply_add_rounds(Device{}, dtype, 300), 3 * one);
    set_num_threads(3);
    EXPECT_EQ(multiply_add_rounds(Device{}, dtype, 100), 3 * one);
    set_num_threads(1);
  }
  EXPECT_EQ(multiply_add_rounds(Device{}, DType::f32, 10), 2 * multiply_add_rounds(Device{}, DType::f64, 10));
}

TEST(Machine, PassesOverMemoryDoWhatTheyAreCalled) {
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    const int64_t n = 200'003;  // over all threads, and no multiple of a vector
    std::vector<float> values(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; i++) values[static_cast<size_t>(i)] = static_cast<float>(i % 1000);
    const Tensor a = Tensor::from(values, {n}), b = Tensor::from(values, {n}),
                 c = Tensor::zeros({n}, DType::f32);
    EXPECT_EQ(memory_pass(Device{}, MemoryPattern::read, a, {}, {}), 4.0 * n);
    EXPECT_EQ(a.to_vector<float>(), values);
    EXPECT_EQ(memory_pass(Device{}, MemoryPattern::update, a, {}, {}), 8.0 * n);
    EXPECT_EQ(memory_pass(Device{}, MemoryPattern::copy, c, b, {}), 8.0 * n);
    EXPECT_EQ(c.to_vector<float>(), values);
    EXPECT_EQ(memory_pass(Device{}, MemoryPattern::triad, c, b, a), 12.0 * n);
    for (const int64_t i : {int64_t{0}, int64_t{7}, n / 2, n - 1}) {
      const float value = values[static_cast<size_t>(i)];
      EXPECT_EQ(a.data<float>()[i], value / 2) << i;
      EXPECT_EQ(c.data<float>()[i], value * 1.25F) << i;
    }
  }
  set_num_threads(1);
  EXPECT_ANY_THROW(memory_pass(Device{}, MemoryPattern::copy, Tensor::zeros({4}, DType::f32), {}, {}));
}

}  // namespace
}  // namespace shoal::testing
