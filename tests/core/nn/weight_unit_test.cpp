#include "core/nn/weight_unit.h"

#include <gtest/gtest.h>

#include "core/autograd/recompute.h"
#include "core/autograd/tape.h"
#include "core/ops/elementwise.h"

namespace shoal {
namespace {

/// Units that write down when their use begins and ends.
struct Diary {
  std::string text;
  WeightUnit layer, experts;

  void watch(WeightUnit& unit, const std::string& name) {
    unit.on_begin = [this, name](WeightUnit::Direction d) {
      text += name + (d == WeightUnit::Direction::forward ? "> " : "< ");
    };
    unit.on_end = [this, name] { text += name + ". "; };
  }
  Diary() {
    watch(layer, "layer");
    watch(experts, "experts");
  }
  /// x + x, with the experts' use inside of the layer's.
  Tensor forward(const Tensor& x) {
    layer.begin();
    const Tensor y = experts.during([&] { return add(x, x); });
    layer.end();
    return y;
  }
  std::string since() { return std::exchange(text, ""); }
};

struct UnitInput {
  Leaf leaf;
  Tensor x = Tensor::zeros({1}, DType::f32);
  UnitInput() { x.grad_ref.leaf = &leaf; }
};

TEST(WeightUnit, IsUsedInForwardAndAgainFromItsEndToItsBeginInBackward) {
  Diary diary;
  UnitInput in;
  Tape tape;
  const Tensor y = diary.forward(in.x);
  EXPECT_EQ(diary.since(), "layer> experts> experts. layer. ");
  tape.backward(y);
  EXPECT_EQ(diary.since(), "layer< experts< experts. layer. ");
}

TEST(WeightUnit, IsUsedInForwardAloneWithoutATapeAndWhereBackwardReadsNoValues) {
  Diary diary;
  UnitInput in;
  {
    const NoGrad no_grad;
    diary.forward(in.x);
  }
  diary.forward(in.x);
  EXPECT_EQ(diary.since(), "layer> experts> experts. layer. layer> experts> experts. layer. ");
  diary.layer.forward_only = true;
  Tape tape;
  const Tensor y = diary.forward(in.x);
  diary.since();
  tape.backward(y);
  EXPECT_EQ(diary.since(), "experts< experts. ");
}

TEST(WeightUnit, IsUsedOnceFromTheSecondForwardOfRecomputeToTheEndOfItsBackward) {
  Diary diary;
  UnitInput in;
  Tape tape;
  const std::vector<Tensor> y = recompute(
      [&](const std::vector<Tensor>& x) { return std::vector<Tensor>{diary.forward(x[0])}; }, {in.x});
  EXPECT_EQ(diary.since(), "layer> experts> experts. layer. ");
  tape.backward(y[0]);
  EXPECT_EQ(diary.since(), "layer< experts< experts. layer. ");
}

// A layer whose results no gradient reaches is left as it was entered.
TEST(WeightUnit, EndsItsUseWhereNoGradientFlows) {
  Diary diary;
  UnitInput in;
  Tape tape;
  diary.forward(in.x);
  const Tensor y = add(in.x, in.x);
  diary.since();
  tape.backward(y);
  EXPECT_EQ(diary.since(), "layer< experts< experts. layer. ");
}

}  // namespace
}  // namespace shoal
