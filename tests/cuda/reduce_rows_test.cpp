// CUDA kernels of core/ops/reduce_rows.h.
#include "core/ops/reduce_rows.h"

#include <limits>

#include "tests/cuda/support.h"

namespace shoal::testing {
namespace {

constexpr RowReduction kReductions[] = {RowReduction::sum, RowReduction::max, RowReduction::min};

template <class T>
T from_number(int64_t i) {
  const int64_t whole = i * 37 % 101;
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(whole);
  } else {
    return T(static_cast<float>(whole - 50) / 7.0F);
  }
}

/// The bits of the CPU, and those of one addition after the other.
template <class T, class C>
void check(int64_t rows, int64_t width) {
  std::vector<T> parts;
  for (int64_t i = 0; i < rows * width; i++) parts.push_back(from_number<T>(i));
  const Tensor x = Tensor::from(parts, {rows, width});
  for (const RowReduction op : kReductions) {
    std::vector<T> want;
    for (int64_t i = 0; i < width; i++) {
      C acc = static_cast<C>(parts[static_cast<size_t>(i)]);
      for (int64_t r = 1; r < rows; r++) {
        const C v = static_cast<C>(parts[static_cast<size_t>(r * width + i)]);
        if (op == RowReduction::sum) acc = static_cast<C>(acc + v);
        if (op == RowReduction::max) acc = std::max(acc, v);
        if (op == RowReduction::min) acc = std::min(acc, v);
      }
      want.push_back(T(acc));
    }
    const auto run = [&](const Tensors& in) {
      const Tensor out = Tensor::empty({width}, in[0].dtype(), in[0].device());
      reduce_rows(out.device(), in[0], op, out);
      return Tensors{out};
    };
    const Tensor expected = Tensor::from(want, {width});
    EXPECT_TRUE(same_bits(run({x})[0], expected)) << dtype_of<T> << " on the cpu";
    const NarrowLaunches narrow;
    EXPECT_TRUE(same_bits(device_results({x}, run)[0], expected))
        << dtype_of<T> << ' ' << rows << " x " << width;
  }
}

template <class T, class C>
void check_sizes() {
  for (const int64_t rows : {1, 2, 5}) {
    for (const int64_t width : {0, 1, 37, 64, 1031}) check<T, C>(rows, width);
  }
}

TEST(CudaReduceRows, FloatsGoInOrderOfRows) {
  check_sizes<float, float>();
  check_sizes<BFloat16, float>();
  check_sizes<double, double>();
}

TEST(CudaReduceRows, IntegersAreExact) {
  check_sizes<int32_t, int32_t>();
  check_sizes<int64_t, int64_t>();
  check_sizes<uint8_t, uint8_t>();
}

TEST(CudaReduceRows, NanOfAnyRowStays) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor x = Tensor::from(std::vector<float>{nan, 1, 1, 2, nan, 2, 3, 3, nan}, {3, 3}, kCuda);
  for (const RowReduction op : kReductions) {
    const Tensor out = Tensor::empty({3}, DType::f32, kCuda);
    reduce_rows(kCuda, x, op, out);
    for (const float v : out.to_vector<float>()) EXPECT_TRUE(std::isnan(v));
  }
}

TEST(CudaReduceRows, TheResultMayBeARow) {
  const Tensor x = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {3, 2}, kCuda);
  reduce_rows(kCuda, x, RowReduction::sum, x.rows(1, 2));
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{1, 2, 9, 12, 5, 6}));
}

TEST(CudaReduceRows, RefusesOtherShapes) {
  for (const Device device : {kCpu, kCuda}) {
    const Tensor x = Tensor::zeros({2, 3}, DType::f32, device), y = Tensor::zeros({2}, DType::f32, device);
    EXPECT_NE(
        error_of([&] { reduce_rows(device, x, RowReduction::sum, y); }).find("expected parts f32 [R, 2]"),
        std::string::npos);
  }
}

}  // namespace
}  // namespace shoal::testing
