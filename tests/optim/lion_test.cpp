#include <gtest/gtest.h>

#include <cmath>

#include "core/base/threads.h"
#include "core/nn/module.h"
#include "optim/optimizer.h"
#include "tests/support/expect_close.h"

namespace shoal::testing {
namespace {

class Two : public Module {
 public:
  explicit Two(DType dtype) {
    BuildContext context;
    context.dtype = dtype;
    add_parameter(context, "w", Shape{3, 4}, Init::normal(1));
    add_parameter(context, "norm", Shape{3}, Init::ones(), ParamKind::norm);
  }
};

TEST(Lion, MatchesTheTextbookUpdateAndDecaysOnlyMatrices) {
  Two two(DType::f64);
  Choice choice{"lion", OptimizerRegistry::instance().make_options("lion")};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text("{beta1: 0.8, beta2: 0.9, weight_decay: 0.3}", "test", errors), "",
      [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  errors.throw_if_any();
  auto lion = OptimizerRegistry::make(choice, two.parameters());
  std::vector<std::vector<double>> w, m;
  for (Parameter* p : two.parameters()) {
    w.push_back(to_doubles(p->value));
    m.emplace_back(w.back().size());
  }
  for (int t = 1; t <= 3; t++) {
    for (Parameter* p : two.parameters()) {
      std::vector<double> g(static_cast<size_t>(p->value.numel()));
      for (size_t i = 0; i < g.size(); i++) g[i] = i == 0 ? 0 : std::sin(t + 3.0 * static_cast<double>(i));
      p->leaf.grad = Tensor::from(g, p->value.shape());
    }
    lion->step(0.1, 0.5);
    for (size_t q = 0; q < w.size(); q++) {
      const Parameter& p = *two.parameters()[q];
      const std::vector<double> g = to_doubles(p.leaf.grad);
      for (size_t i = 0; i < g.size(); i++) {
        const double gi = 0.5 * g[i], c = 0.8 * m[q][i] + 0.2 * gi;
        w[q][i] -= 0.1 * ((c > 0 ? 1 : c < 0 ? -1 : 0) + (q == 0 ? 0.3 : 0) * w[q][i]);
        m[q][i] = 0.9 * m[q][i] + 0.1 * gi;
      }
      EXPECT_TRUE(close(to_doubles(p.value), w[q], {1e-13, 1e-14})) << p.name << " step " << t;
    }
  }
  size_t seen = 0;
  lion->visit_state([&](const std::string& name, Parameter& p, const Tensor& state) {
    EXPECT_EQ(name, "m");
    EXPECT_TRUE(close(to_doubles(state), m[p.name == "w" ? 0 : 1], {1e-13, 1e-15}));
    seen++;
  });
  EXPECT_EQ(seen, 2U);
}

TEST(Lion, ThreadsDoNotChangeABit) {
  class Large : public Module {
   public:
    Large() { add_parameter(BuildContext{}, "w", Shape{50001}, Init::normal(1)); }
  };
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    Large large;
    auto lion = OptimizerRegistry::make({"lion", nullptr}, large.parameters());
    Parameter& p = *large.parameters()[0];
    p.leaf.grad = p.value.detach().clone();
    for (int t = 0; t < 3; t++) lion->step(0.01, 1);
    results.push_back(p.value.to_vector<float>());
  }
  set_num_threads(1);
  EXPECT_EQ(results[0], results[1]);
}

}  // namespace
}  // namespace shoal::testing
