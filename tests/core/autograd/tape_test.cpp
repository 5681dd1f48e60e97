#include "core/autograd/tape.h"

#include <string>
#include <thread>

#include "core/ops/elementwise.h"
#include "tests/support/error_of.h"
#include "tests/support/same_bits.h"

namespace shoal {
namespace {

using testing::error_of;

struct Weight {
  explicit Weight(float value) : tensor(Tensor::from(std::vector<float>{value}, {1})) {
    tensor.grad_ref.leaf = &leaf;
    leaf.on_grad_ready = [this] { num_ready++; };
  }
  Weight(const Weight&) = delete;
  Weight& operator=(const Weight&) = delete;
  float grad() const { return leaf.grad.to_vector<float>()[0]; }
  Leaf leaf;
  Tensor tensor;
  int num_ready = 0;
};

/// Writes its label when forward and backward run; y = x.
struct Traced final : Function {
  Traced(std::string l, std::vector<std::string>* log) : label(std::move(l)), events(log) {}
  std::string label;
  std::vector<std::string>* events;
  const char* name() const override { return "traced"; }
  Tensor forward(const Tensor& x) {
    events->push_back("+" + label);
    return x.clone();
  }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    events->push_back("-" + label);
    return {dy[0]};
  }
};

/// Notes the shape its gradient arrives with.
struct ShapeProbe final : Function {
  explicit ShapeProbe(Shape* s) : seen(s) {}
  Shape* seen;
  const char* name() const override { return "shape_probe"; }
  Tensor forward(const Tensor& x) { return x.clone(); }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    *seen = dy[0].shape();
    return {dy[0]};
  }
};

struct Throws final : Function {
  const char* name() const override { return "throws"; }
  Tensor forward(const Tensor&) { throw Error("forward failed"); }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {{}}; }
};

/// Returns a wrong number of gradients.
struct Miscounts final : Function {
  const char* name() const override { return "miscounts"; }
  Tensor forward(const Tensor& x) { return x.clone(); }
  std::vector<Tensor> backward(const std::vector<Tensor>&) override { return {{}, {}}; }
};

TEST(Tape, ParkedTapesRunBackwardInAnyOrder) {
  Weight w(1);
  std::vector<std::string> events;
  Tape first;
  const Tensor a = apply(Traced("a", &events), w.tensor);
  first.park();
  EXPECT_EQ(Tape::active(), nullptr);
  Tape second;
  const Tensor b = apply(Traced("b", &events), w.tensor);
  second.park();
  EXPECT_EQ(w.leaf.uses_left, 2);
  first.backward({a}, {a.detach()});
  EXPECT_EQ(w.num_ready, 0);  // the other pass is open
  EXPECT_EQ(Tape::active(), nullptr);
  second.backward({b}, {b.detach()});
  EXPECT_EQ(w.num_ready, 1);
  EXPECT_EQ(events, (std::vector<std::string>{"+a", "+b", "-a", "-b"}));
  EXPECT_EQ(w.grad(), 2);
  Tape third;
  EXPECT_THROW(first.park(), Error);  // not the active one
}

TEST(Tape, BackwardRunsInExactReverseProgramOrder) {
  Weight w(1);
  std::vector<std::string> events;
  Tape tape;
  const Tensor a = apply(Traced("a", &events), w.tensor);
  const Tensor b = apply(Traced("b", &events), w.tensor);  // independent of a
  const Tensor c = apply(Traced("c", &events), a);
  EXPECT_EQ(tape.num_records(), 3U);
  tape.backward({b, c}, {b.detach(), c.detach()});
  EXPECT_EQ(events, (std::vector<std::string>{"+a", "+b", "+c", "-c", "-b", "-a"}));
  EXPECT_EQ(tape.num_records(), 0U);
  EXPECT_EQ(w.grad(), 2);
}

TEST(Tape, GradientsAddUpInLeavesOverUsesAndPasses) {
  Weight w(3);
  for (int pass = 1; pass <= 2; pass++) {
    Tape tape;
    tape.backward(sum(mul(w.tensor, w.tensor)));
    EXPECT_EQ(w.grad(), 6.0F * static_cast<float>(pass));
    EXPECT_EQ(w.num_ready, pass);  // once per pass, after the last use
  }
}

TEST(Tape, ReadyHookSeesTheCompleteGradient) {
  Weight w(3);
  float seen = 0;
  w.leaf.on_grad_ready = [&] { seen = w.grad(); };
  Tape tape;
  const Tensor late = scale(w.tensor, 5);
  tape.backward(sum(add(late, scale(w.tensor, 2))));
  EXPECT_EQ(seen, 7);
}

TEST(Tape, ReadyHookFiresForAUseThatNoGradientReached) {
  Weight w(3), v(1);
  Tape tape;
  const Tensor unused = scale(w.tensor, 5);
  tape.backward(sum(v.tensor));
  EXPECT_EQ(w.num_ready, 1);
  EXPECT_FALSE(w.leaf.grad.defined());
}

TEST(Tape, GradientSharedByTwoInputsIsNotOverwritten) {
  Weight w(2);
  Tape tape;
  const Tensor x = scale(w.tensor, 1);
  // add's backward hands one tensor to both inputs; both consumers may work in place.
  const Tensor y = add(scale(x, 3), scale(x, 5));
  tape.backward(sum(add(y, x)));
  EXPECT_EQ(w.grad(), 9);

  Weight v(2);
  Tape second;
  const Tensor z = scale(v.tensor, 1);
  second.backward(sum(scale(add(z, z), 3)));
  EXPECT_EQ(v.grad(), 6);
}

TEST(Tape, SeedGradientsOfTheCallerStayUntouched) {
  Weight w(2);
  Tape tape;
  const Tensor y = scale(scale(w.tensor, 3), 5);
  const Tensor seed = Tensor::from(std::vector<float>{1}, {1});
  tape.backward({y}, {seed});
  EXPECT_EQ(w.grad(), 15);
  EXPECT_EQ(seed.item(), 1);
}

TEST(Tape, GradientArrivesInTheShapeOfTheOutput) {
  Weight w(2);
  Shape seen;
  Tape tape;
  const Tensor y = apply(ShapeProbe(&seen), w.tensor);
  tape.backward(sum(scale(y.view({1, 1, 1}), 2)));
  EXPECT_EQ(seen, (Shape{1}));
}

TEST(Tape, NothingIsRecordedWithoutATapeUnderNoGradOrForConstants) {
  Weight w(2);
  EXPECT_FALSE(scale(w.tensor, 2).requires_grad());
  Tape tape;
  {
    const NoGrad no_grad;
    EXPECT_FALSE(scale(w.tensor, 2).requires_grad());
  }
  EXPECT_FALSE(scale(w.tensor.detach(), 2).requires_grad());
  EXPECT_EQ(tape.num_records(), 0U);
  EXPECT_EQ(w.leaf.uses_left, 0);
  EXPECT_TRUE(scale(w.tensor, 2).requires_grad());
}

TEST(Tape, ForwardThatThrowsOrIsNeverRunBackLeavesNoUseCounted) {
  Weight w(2);
  {
    Tape tape;
    EXPECT_THROW(apply(Throws{}, w.tensor), Error);
    scale(w.tensor, 2);
    EXPECT_EQ(w.leaf.uses_left, 1);
  }
  EXPECT_EQ(w.leaf.uses_left, 0);
}

TEST(Tape, EachThreadHasItsOwnTape) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Weight>> weights;
  for (int i = 0; i < 4; i++) weights.push_back(std::make_unique<Weight>(static_cast<float>(i)));
  for (int i = 0; i < 4; i++) {
    threads.emplace_back([&weights, i] {
      Weight& w = *weights[static_cast<size_t>(i)];
      for (int pass = 0; pass < 50; pass++) {
        Tape tape;
        tape.backward(sum(mul(w.tensor, w.tensor)));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Tape::active(), nullptr);
  for (int i = 0; i < 4; i++) {
    EXPECT_EQ(weights[static_cast<size_t>(i)]->grad(), 100.0F * static_cast<float>(i));
  }
}

TEST(Tape, TellsWhenBackwardPassesAPlace) {
  Weight w(2);
  std::string passed;
  const auto place = [&](const char* name) { Tape::on_backward([&passed, name] { passed += name; }); };
  place("none ");
  {
    const NoGrad no_grad;
    place("off ");
    EXPECT_FALSE(Tape::recording());
  }
  Tape tape;
  EXPECT_TRUE(Tape::recording());
  place("first ");
  const Tensor y = scale(w.tensor, 2);
  place("second ");
  EXPECT_EQ(passed, "");
  tape.backward(y);
  EXPECT_EQ(passed, "second first ");
}

TEST(Tape, ErrorsSayWhatIsWrong) {
  Weight w(2);
  Tape tape;
  const Tensor y = scale(w.tensor, 2);
  EXPECT_NE(error_of([&] {
              tape.backward(Tensor::zeros({2}, DType::f32));
            }).find("expected a scalar loss, got shape [2]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { tape.backward({y}, {}); }).find("1 outputs but 0 gradients"), std::string::npos);
  {
    Tape other;
    EXPECT_NE(error_of([&] { other.backward(y); }).find("a gradient belongs to another tape"),
              std::string::npos);
  }
  const Tensor bad = apply(Miscounts{}, y);
  EXPECT_NE(
      error_of([&] { tape.backward(bad); }).find("miscounts: backward returned 2 gradients for 1 inputs"),
      std::string::npos);
}

}  // namespace
}  // namespace shoal
