#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "core/base/threads.h"
#include "core/nn/module.h"
#include "core/ops/bf16_linear.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal::testing {
namespace {

/// A few parameters of each kind with given gradients.
class Toy : public Module {
 public:
  explicit Toy(DType dtype = DType::f64) {
    BuildContext context;
    context.dtype = dtype;
    context.seed = 9;
    add_parameter(context, "matrix", Shape{3, 5}, Init::normal(1));
    add_parameter(context, "norm", Shape{5}, Init::ones(), ParamKind::norm);
    add_parameter(context, "bias", Shape{1}, Init::normal(1), ParamKind::bias);
    add_parameter(context, "embedding", Shape{2, 2}, Init::normal(1), ParamKind::embedding);
  }
  void set_gradients(int64_t step) {
    for (Parameter* p : parameters()) {
      std::vector<double> values(static_cast<size_t>(p->value.numel()));
      for (size_t i = 0; i < values.size(); i++)
        values[i] = std::sin(static_cast<double>(step * 7 + static_cast<int64_t>(i) + 1));
      if (p->value.dtype() == DType::f64) {
        p->leaf.grad = Tensor::from(values, p->value.shape());
      } else {
        p->leaf.grad = Tensor::from(std::vector<float>(values.begin(), values.end()), p->value.shape());
      }
    }
  }
};

Choice options(const OptimizerRegistry& registry, const std::string& kind, const std::string& settings) {
  Choice choice{kind, registry.make_options(kind)};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text("{" + settings + "}", "test", errors), "",
      [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  errors.throw_if_any();
  return choice;
}

std::unique_ptr<Optimizer> make(Module& module, const std::string& kind, const std::string& settings) {
  return OptimizerRegistry::make(options(OptimizerRegistry::instance(), kind, settings), module.parameters());
}

double decay_of(const std::string& name, double decay, double embedding_decay) {
  return name == "matrix" ? decay : name == "embedding" ? embedding_decay : 0;
}

TEST(Adamw, MatchesTheTextbookUpdateAndDecaysOnlyMatrices) {
  for (const bool embeddings : {false, true}) {
    Toy toy;
    auto adamw = make(toy, "adamw",
                      str("beta1: 0.8, beta2: 0.9, eps: 1e-4, weight_decay: 0.3, decay_embeddings: ",
                          embeddings ? "true" : "false"));
    std::map<std::string, std::vector<double>> p, m, v;
    for (Parameter* q : toy.parameters()) {
      p[q->name] = to_doubles(q->value);
      m[q->name] = v[q->name] = std::vector<double>(p[q->name].size());
    }
    for (int64_t t = 1; t <= 4; t++) {
      toy.set_gradients(t);
      const double lr = 0.1 / static_cast<double>(t), scale = t == 2 ? 0.5 : 1;
      adamw->step(lr, scale);
      for (Parameter* q : toy.parameters()) {
        const std::vector<double> g = to_doubles(q->leaf.grad);
        auto &pq = p[q->name], &mq = m[q->name], &vq = v[q->name];
        for (size_t i = 0; i < g.size(); i++) {
          const double gi = scale * g[i];
          mq[i] = 0.8 * mq[i] + 0.2 * gi;
          vq[i] = 0.9 * vq[i] + 0.1 * gi * gi;
          const double mhat = mq[i] / (1 - std::pow(0.8, t)), vhat = vq[i] / (1 - std::pow(0.9, t));
          pq[i] -= lr * decay_of(q->name, 0.3, embeddings ? 0.3 : 0) * pq[i] +
                   lr * mhat / (std::sqrt(vhat) + 1e-4);
        }
        EXPECT_TRUE(close(to_doubles(q->value), pq, {1e-12, 1e-13})) << q->name << " step " << t;
      }
    }
    adamw->visit_state([&](const std::string& name, Parameter& q, const Tensor& state) {
      EXPECT_TRUE(close(to_doubles(state), name == "m" ? m[q.name] : v[q.name], {1e-12, 1e-14}));
      EXPECT_EQ(state.shape(), q.value.shape());
    });
    EXPECT_EQ(adamw->num_steps(), 4);
  }
}

TEST(Adamw, F32StaysCloseToF64) {
  Toy narrow(DType::f32), wide;
  auto a = make(narrow, "adamw", ""), b = make(wide, "adamw", "");
  for (int64_t t = 1; t <= 20; t++) {
    narrow.set_gradients(t);
    wide.set_gradients(t);
    a->step(0.01, 1);
    b->step(0.01, 1);
  }
  for (size_t i = 0; i < wide.parameters().size(); i++) {
    EXPECT_TRUE(close(narrow.parameters()[i]->value, wide.parameters()[i]->value, {1e-5, 1e-6}));
  }
}

// beta 0.9 / 0.95 at step 101: with the step count lost the first update would be 2.24 times too large.
TEST(Adamw, RS_01_BiasCorrectionNeedsTheRestoredStepCount) {
  auto update_after = [](int64_t restored_steps) {
    Toy toy;
    auto adamw = make(toy, "adamw", "beta1: 0.9, beta2: 0.95, weight_decay: 0, eps: 1e-12");
    for (int64_t t = 1; t <= 100; t++) {
      toy.set_gradients(0);
      adamw->step(0, 1);
    }
    adamw->set_num_steps(restored_steps);
    const double before = to_doubles(toy.parameters()[0]->value)[0];
    toy.set_gradients(0);
    adamw->step(1, 1);
    return std::abs(to_doubles(toy.parameters()[0]->value)[0] - before);
  };
  EXPECT_NEAR(update_after(0) / update_after(100), 2.24, 0.01);
}

TEST(Adamw, AZeroGradientStillDecaysMomentsAndWeights) {
  Toy toy;
  auto adamw = make(toy, "adamw", "weight_decay: 0.5");
  toy.set_gradients(1);
  adamw->step(0.1, 1);
  const double before = to_doubles(toy.parameters()[0]->value)[3];
  std::vector<double> m;
  adamw->visit_state([&](const std::string& name, Parameter& q, const Tensor& s) {
    if (name == "m" && q.name == "matrix") m = to_doubles(s);
  });
  for (Parameter* p : toy.parameters()) p->leaf.grad.set_zero();
  adamw->step(0.1, 1);
  adamw->visit_state([&](const std::string& name, Parameter& q, const Tensor& s) {
    if (name == "m" && q.name == "matrix") {
      EXPECT_NEAR(to_doubles(s)[3], 0.9 * m[3], 1e-15);
    }
  });
  EXPECT_NE(to_doubles(toy.parameters()[0]->value)[3], before);
}

TEST(Sgd, MatchesTheTextbookUpdateWithAndWithoutMomentum) {
  for (const std::string settings :
       {"momentum: 0", "momentum: 0.9", "momentum: 0.9, nesterov: true, weight_decay: 0.1"}) {
    Toy toy;
    auto sgd = make(toy, "sgd", settings);
    const double mu = settings == "momentum: 0" ? 0 : 0.9,
                 decay = settings.find("weight_decay") != std::string::npos ? 0.1 : 0;
    const bool nesterov = settings.find("nesterov") != std::string::npos;
    std::map<std::string, std::vector<double>> p, b;
    for (Parameter* q : toy.parameters()) b[q->name].resize((p[q->name] = to_doubles(q->value)).size());
    for (int64_t t = 1; t <= 3; t++) {
      toy.set_gradients(t);
      sgd->step(0.1, 0.5);
      for (Parameter* q : toy.parameters()) {
        const std::vector<double> g = to_doubles(q->leaf.grad);
        for (size_t i = 0; i < g.size(); i++) {
          const double gi = 0.5 * g[i] + decay_of(q->name, decay, 0) * p[q->name][i];
          b[q->name][i] = mu * b[q->name][i] + gi;
          p[q->name][i] -= 0.1 * (nesterov ? gi + mu * b[q->name][i] : b[q->name][i]);
        }
        EXPECT_TRUE(close(to_doubles(q->value), p[q->name], {1e-12, 1e-14})) << settings << " " << q->name;
      }
    }
  }
}

TEST(Optimizers, ThreadsDoNotChangeABit) {
  class Large : public Module {
   public:
    Large() { add_parameter(BuildContext{}, "w", Shape{50001}, Init::normal(1)); }
  };
  for (const char* kind : {"adamw", "sgd"}) {
    std::vector<std::vector<float>> results;
    for (const int threads : {1, 3}) {
      set_num_threads(threads);
      Large large;
      auto optimizer = make(large, kind, "");
      Parameter& p = *large.parameters()[0];
      p.leaf.grad = p.value.detach().clone();
      for (int t = 0; t < 3; t++) optimizer->step(0.01, 0.7);
      results.push_back(p.value.to_vector<float>());
    }
    set_num_threads(1);
    EXPECT_EQ(results[0], results[1]) << kind;
  }
}

struct TwoWeights final : Module {
  TwoWeights() {
    add_parameter(BuildContext{}, "experts", {3, 2, 67, 33}, Init::normal(1));
    add_parameter(BuildContext{}, "unused", {5, 7}, Init::normal(1));
  }
};

// bf16 copies are made block by block, while the new values are in cache.
TEST(Optimizer, CopiesForBf16ProductsFollowTheirWeights) {
  for (const char* kind : {"adamw", "sgd", "lion"}) {
    for (const int threads : {1, 3}) {
      TwoWeights module;
      Parameter &weight = *module.parameters()[0], &unused = *module.parameters()[1];
      const auto optimizer = make(module, kind, "");
      for (Parameter* p : module.parameters()) p->leaf.grad = random_tensor(p->value.shape(), DType::f32, 4);
      const Tensor view = weight.value.view({3, 134, 33});
      const PackedWeight copies = packed_weight(view);
      const std::vector<double> before = to_doubles(copies.forward);
      set_num_threads(threads);
      optimizer->step(0.1, 1);
      set_num_threads(1);
      EXPECT_TRUE(weight.leaf.packed_fresh);
      EXPECT_FALSE(unused.leaf.packed_fresh);
      const PackedWeight want = packed_weight(weight.value.detach().view({3, 134, 33}));
      EXPECT_EQ(to_doubles(copies.forward), to_doubles(want.forward)) << kind << ' ' << threads;
      EXPECT_EQ(to_doubles(copies.backward), to_doubles(want.backward)) << kind << ' ' << threads;
      EXPECT_NE(to_doubles(copies.forward), before);
    }
  }
}

}  // namespace
}  // namespace shoal::testing
