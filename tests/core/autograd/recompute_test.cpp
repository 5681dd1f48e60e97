#include "core/autograd/recompute.h"

#include "core/autograd/tape.h"
#include "core/ops/activation.h"
#include "core/ops/elementwise.h"
#include "core/ops/norm.h"
#include "tests/support/gradcheck.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::random_tensor;
using testing::same_bits;

constexpr int64_t kHidden = 6;

/// norm, activation and product with two weights; `tied` is used twice inside the body and once outside.
struct Model {
  Model() : tied(random_tensor({kHidden}, DType::f32, 1)), own(random_tensor({3, kHidden}, DType::f32, 2)) {
    tied.grad_ref.leaf = &tied_leaf;
    own.grad_ref.leaf = &own_leaf;
    tied_leaf.on_grad_ready = [this] { num_tied_ready++; };
    own_leaf.on_grad_ready = [this] { num_own_ready++; };
  }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  std::vector<Tensor> body(const std::vector<Tensor>& in) {
    num_calls++;
    if (!Tape::replaying()) num_counted++;
    const Tensor a = rms_norm(in[0], tied, 1e-5);
    const Tensor b = activate(mul(a, own), Activation::silu);
    return {rms_norm(b, tied, 1e-5), add(b, in[0])};
  }
  RecomputeBody as_body() {
    return [this](const std::vector<Tensor>& in) { return body(in); };
  }

  enum class How { plain, recompute, nested };
  /// Returns loss and gradients.
  std::vector<Tensor> run(How how, const Tensor& x_value) {
    Leaf x_leaf;
    Tensor x = x_value.clone();
    x.grad_ref.leaf = &x_leaf;
    tied_leaf.grad = own_leaf.grad = {};
    Tape tape;
    const Tensor start = rms_norm(x, tied, 1e-5);
    std::vector<Tensor> out;
    if (how == How::plain) out = body({start});
    if (how == How::recompute) out = recompute(as_body(), {start});
    if (how == How::nested) {
      out = recompute([this](const std::vector<Tensor>& in) { return recompute(as_body(), in); }, {start});
    }
    const Tensor loss = add(sum(mul(out[0], out[0])), sum(out[1]));
    tape.backward(loss);
    return {loss.detach(), x_leaf.grad, tied_leaf.grad, own_leaf.grad};
  }

  Leaf tied_leaf, own_leaf;
  Tensor tied, own;
  int num_calls = 0, num_counted = 0, num_tied_ready = 0, num_own_ready = 0;
};

TEST(Recompute, GivesTheSameBitsAsAPlainCall) {
  const Tensor x = random_tensor({3, kHidden}, DType::f32, 5);
  Model plain;
  const std::vector<Tensor> want = plain.run(Model::How::plain, x);
  for (const Model::How how : {Model::How::recompute, Model::How::nested}) {
    Model model;
    const std::vector<Tensor> got = model.run(how, x);
    for (size_t i = 0; i < want.size(); i++) EXPECT_TRUE(same_bits(got[i], want[i])) << i;
  }
}

TEST(Recompute, HooksFireOnceAndCountersCountOnce) {
  const Tensor x = random_tensor({3, kHidden}, DType::f32, 5);
  for (const Model::How how : {Model::How::plain, Model::How::recompute, Model::How::nested}) {
    Model model;
    for (int pass = 1; pass <= 2; pass++) {
      model.run(how, x);
      EXPECT_EQ(model.num_tied_ready, pass) << "tied weight: after its last use, which is outside";
      EXPECT_EQ(model.num_own_ready, pass);
      EXPECT_EQ(model.num_counted, pass);
      EXPECT_EQ(model.tied_leaf.uses_left, 0);
      EXPECT_EQ(model.own_leaf.uses_left, 0);
    }
    EXPECT_EQ(model.num_calls > 2, how != Model::How::plain);
  }
}

TEST(Recompute, ParametersInsideGetGradientsWhenNoInputWantsOne) {
  Model model;
  Tape tape;
  const auto out = recompute(model.as_body(), {random_tensor({3, kHidden}, DType::f32, 5)});
  tape.backward(sum(out[0]));
  EXPECT_TRUE(model.own_leaf.grad.defined());
  EXPECT_EQ(model.num_own_ready, 1);
}

TEST(Recompute, UsesAreClosedWhenNoGradientArrives) {
  Model model;
  Leaf other;
  Tensor w = Tensor::zeros({1}, DType::f32);
  w.grad_ref.leaf = &other;
  Tape tape;
  recompute(model.as_body(), {random_tensor({3, kHidden}, DType::f32, 5)});
  tape.backward(sum(w));
  EXPECT_EQ(model.own_leaf.uses_left, 0);
  EXPECT_EQ(model.num_own_ready, 1);
}

TEST(Recompute, ForwardWithoutBackwardLeavesNoUseCounted) {
  Model model;
  {
    Tape tape;
    recompute(model.as_body(), {random_tensor({3, kHidden}, DType::f32, 5)});
    EXPECT_EQ(model.own_leaf.uses_left, 1);
    const RecomputeBody failing = [&model](const std::vector<Tensor>& in) -> std::vector<Tensor> {
      model.body(in);
      throw Error("body failed");
    };
    EXPECT_THROW(recompute(failing, {random_tensor({3, kHidden}, DType::f32, 5)}), Error);
    EXPECT_EQ(model.own_leaf.uses_left, 1);
  }
  EXPECT_EQ(model.own_leaf.uses_left, 0);
}

TEST(Recompute, RunsOnceUnderNoGrad) {
  Model model;
  const NoGrad no_grad;
  recompute(model.as_body(), {random_tensor({3, kHidden}, DType::f32, 5)});
  EXPECT_EQ(model.num_calls, 1);
}

TEST(Recompute, GradientMatchesNumericForTwoInputs) {
  EXPECT_TRUE(testing::gradcheck(
      [](auto& in) {
        return recompute(
            [](const std::vector<Tensor>& at) {
              return std::vector{mul(at[0], sigmoid(at[1])), add(at[0], at[0])};
            },
            {in[0], in[1]});
      },
      {random_tensor({2, 3}, DType::f64, 1), random_tensor({2, 3}, DType::f64, 2)}));
}

}  // namespace
}  // namespace shoal
