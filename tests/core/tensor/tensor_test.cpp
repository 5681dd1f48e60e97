#include "core/tensor/tensor.h"

#include <cmath>
#include <limits>

#include "tests/support/error_of.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::error_of;

TEST(Shape, CountsElementsAndIndexesFromBothEnds) {
  const Shape s{2, 3, 4};
  EXPECT_EQ(s.numel(), 24);
  EXPECT_EQ(s[-1], 4);
  EXPECT_EQ(s[0], 2);
  EXPECT_EQ(Shape{}.numel(), 1);
  EXPECT_EQ((Shape{3, 0}).numel(), 0);
  EXPECT_FALSE((Shape{2, 3} == Shape{3, 2}));
  EXPECT_FALSE((Shape{2} == Shape{2, 1}));
  EXPECT_EQ(str(s), "[2, 3, 4]");
}

TEST(Shape, RefusesWhatItCannotHold) {
  EXPECT_NE(error_of([] {
              Shape({1, 2, 3, 4, 5, 6, 7});
            }).find("at most 6 dimensions, got 7"),
            std::string::npos);
  EXPECT_NE(error_of([] { Shape({2, -1}); }).find("sizes >= 0, got -1 in dimension 1"), std::string::npos);
  EXPECT_NE(error_of([] { Shape({2})[1]; }).find("no dimension 1"), std::string::npos);
  const Shape huge{int64_t{1} << 40, int64_t{1} << 40};
  EXPECT_NE(error_of([&] { huge.numel(); }).find("more elements than 2^63"), std::string::npos);
}

TEST(Tensor, ViewsRowsAndFlatPartsShareStorage) {
  const Tensor t = Tensor::from(std::vector<float>{0, 1, 2, 3, 4, 5}, {3, 2});
  const Tensor last = t.rows(1, 3), flat = t.flat(1, 3), view = t.view({2, 3});
  EXPECT_EQ(last.to_vector<float>(), (std::vector<float>{2, 3, 4, 5}));
  EXPECT_EQ(flat.to_vector<float>(), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(last.rows(1, 2).to_vector<float>(), (std::vector<float>{4, 5}));
  view.data<float>()[3] = 30;
  EXPECT_EQ(last.data<float>()[1], 30);
  EXPECT_EQ(flat.data<float>()[2], 30);
  EXPECT_EQ(t.rows(3, 3).numel(), 0);
  EXPECT_EQ(Tensor::empty({0, 2}, DType::f32).rows(0, 0).shape(), (Shape{0, 2}));
}

TEST(Tensor, CloneCopiesAndOwnershipIsSeenThroughViews) {
  Tensor t = Tensor::zeros({4}, DType::i64);
  EXPECT_TRUE(t.is_sole_owner());
  const Tensor copy = t.clone();
  EXPECT_TRUE(t.is_sole_owner());
  const Tensor part = t.flat(0, 1);
  EXPECT_FALSE(t.is_sole_owner());
  part.data<int64_t>()[0] = 9;
  EXPECT_EQ(t.to_vector<int64_t>()[0], 9);
  EXPECT_EQ(copy.to_vector<int64_t>()[0], 0);
  EXPECT_FALSE(Tensor{}.is_sole_owner());
}

TEST(Tensor, RowCountsTreatTheLastDimensionAsTheRow) {
  EXPECT_EQ(Tensor::empty({2, 3, 4}, DType::f32).num_rows(), 6);
  EXPECT_EQ(Tensor::empty({2, 3, 4}, DType::f32).row_size(), 4);
  EXPECT_EQ(Tensor::empty({}, DType::f32).num_rows(), 1);
  EXPECT_EQ(Tensor::empty({}, DType::f32).row_size(), 1);
  EXPECT_EQ(Tensor::empty({0, 4}, DType::f32).num_rows(), 0);
}

TEST(Tensor, ItemReadsEveryType) {
  EXPECT_EQ(Tensor::from(std::vector<float>{1.5F}, {}).item(), 1.5);
  EXPECT_EQ(Tensor::from(std::vector<double>{2.5}, {1}).item(), 2.5);
  EXPECT_EQ(Tensor::from(std::vector<BFloat16>{BFloat16(-3.0F)}, {1, 1}).item(), -3);
  EXPECT_EQ(Tensor::from(std::vector<int32_t>{-4}, {}).item(), -4);
  EXPECT_EQ(Tensor::from(std::vector<int64_t>{5}, {}).item(), 5);
  EXPECT_EQ(Tensor::from(std::vector<uint8_t>{6}, {}).item(), 6);
}

TEST(Tensor, GradientReferencesFollowViewsButNotParts) {
  Tensor t = Tensor::zeros({4}, DType::f32);
  t.grad_ref.slot = 1;
  EXPECT_TRUE(t.view({2, 2}).requires_grad());
  EXPECT_FALSE(t.flat(0, 2).requires_grad());
  EXPECT_FALSE(t.rows(0, 2).requires_grad());
  EXPECT_FALSE(t.detach().requires_grad());
}

TEST(Tensor, ErrorsNameShapesAndTypes) {
  const Tensor t = Tensor::zeros({2, 3}, DType::f32);
  EXPECT_NE(error_of([&] { t.data<double>(); }).find("tensor [2, 3] holds f32, asked for f64"),
            std::string::npos);
  EXPECT_NE(error_of([&] { t.view({4}); }).find("[2, 3] has 6 elements, cannot be viewed as [4]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { t.rows(1, 3); }).find("has no rows [1, 3)"), std::string::npos);
  EXPECT_NE(error_of([&] { t.flat(5, 2); }).find("has no elements [5, 7)"), std::string::npos);
  EXPECT_NE(error_of([&] { t.item(); }).find("expected one element"), std::string::npos);
  EXPECT_NE(
      error_of([&] { t.copy_from(Tensor::zeros({6}, DType::f64)); }).find("expected f32 [2, 3], got f64 [6]"),
      std::string::npos);
  EXPECT_NE(error_of([&] { Tensor{}.bytes(); }).find("the tensor is undefined"), std::string::npos);
  EXPECT_NE(error_of([&] { Tensor::from(std::vector<float>{1}, {2}); }).find("has 2 elements, got 1"),
            std::string::npos);
}

TEST(Tensor, MemoryThatIsReleasedIsMissedUntilThereIsOther) {
  const DeviceRuntime& cpu = device_runtime(DeviceType::cpu);
  const int64_t before = cpu.stats().current_bytes;
  {
    const Tensor t = Tensor::zeros({4, 16}, DType::f32), part = t.rows(1, 2);
    EXPECT_EQ(cpu.stats().current_bytes - before, 256);
    t.release_memory();
    EXPECT_EQ(cpu.stats().current_bytes, before);
    EXPECT_FALSE(part.has_memory());
    EXPECT_EQ(part.view({2, 8}).shape(), Shape({2, 8}));
    EXPECT_NE(error_of([&] { part.set_zero(); }).find("the memory of tensor [1, 16] is released"),
              std::string::npos);
    EXPECT_THROW(t.release_memory(), Error);
    t.allocate_memory();
    EXPECT_THROW(t.allocate_memory(), Error);
    t.set_zero();
    EXPECT_EQ(part.to_vector<float>(), std::vector<float>(16, 0));
    t.release_memory();
  }
  EXPECT_EQ(cpu.stats().current_bytes, before);
  float owned = 1;
  EXPECT_THROW(Tensor::over(std::make_shared<int>(0), &owned, {1}, DType::f32).release_memory(), Error);
}

TEST(BFloat16, RoundsToNearestEvenAndKeepsSpecialValues) {
  const auto rounded = [](float v) { return static_cast<float>(BFloat16(v)); };
  EXPECT_EQ(rounded(1.0F), 1.0F);
  EXPECT_EQ(rounded(1.00390625F), 1.0F);       // 1 + 2^-8: tie, down to even
  EXPECT_EQ(rounded(1.01171875F), 1.015625F);  // 1 + 3 * 2^-8: tie, up to even
  EXPECT_EQ(rounded(1.0039064F), 1.0078125F);  // just above the tie
  EXPECT_EQ(rounded(-1.01171875F), -1.015625F);
  EXPECT_EQ(rounded(0.0F), 0.0F);
  EXPECT_TRUE(std::signbit(rounded(-0.0F)));
  EXPECT_EQ(rounded(std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
  EXPECT_EQ(rounded(std::numeric_limits<float>::max()), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(rounded(std::nanf(""))));
  EXPECT_TRUE(std::isnan(rounded(std::bit_cast<float>(0x7F800001U))));  // payload only in the lost bits
}

}  // namespace
}  // namespace shoal
