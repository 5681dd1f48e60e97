#include <gtest/gtest.h>

#include <cmath>

#include "core/base/threads.h"
#include "core/nn/module.h"
#include "optim/optimizer.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"

namespace shoal::testing {
namespace {

using Values = std::vector<double>;

Choice muon(const std::string& settings) {
  Choice choice{"muon", OptimizerRegistry::instance().make_options("muon")};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text(settings, "test", errors), "", [&](FieldVisitor& v) { choice.options->fields(v); },
      errors);
  errors.throw_if_any();
  return choice;
}

class Matrices : public Module {
 public:
  explicit Matrices(DType dtype, int64_t scale = 1) {
    BuildContext context;
    context.dtype = dtype;
    add_parameter(context, "wide", Shape{3 * scale, 7 * scale}, Init::normal(1));
    add_parameter(context, "tall", Shape{7 * scale, 3}, Init::normal(1));
    add_parameter(context, "experts", Shape{2, 2, 4 * scale, 5}, Init::normal(1)).stacked_dims = 2;
    add_parameter(context, "out", Shape{4, 2, 3 * scale}, Init::normal(1)).column_dims = 2;
    add_parameter(context, "router", Shape{4, 3}, Init::normal(1), ParamKind::router);
    add_parameter(context, "head.weight", Shape{4, 3}, Init::normal(1), ParamKind::head);
    add_parameter(context, "norm", Shape{3}, Init::ones(), ParamKind::norm);
  }
};

struct Sizes {
  size_t count, rows, columns;
};
constexpr Sizes kSizes[] = {{1, 3, 7}, {1, 7, 3}, {4, 4, 5}, {1, 4, 6}};

/// a [n, k] times b [k, m].
Values times(const Values& a, const Values& b, size_t n, size_t k, size_t m) {
  Values c(n * m);
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < m; j++)
      for (size_t l = 0; l < k; l++) c[i * m + j] += a[i * k + l] * b[l * m + j];
  return c;
}
Values transposed(const Values& a, size_t n, size_t k) {
  Values t(a.size());
  for (size_t i = 0; i < n; i++)
    for (size_t j = 0; j < k; j++) t[j * n + i] = a[i * k + j];
  return t;
}

/// The published algorithm: always X X^T.
Values newton_schulz(Values x, size_t n, size_t k, int iterations) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  for (double& v : x) v /= std::sqrt(squares) + 1e-7;
  for (int i = 0; i < iterations; i++) {
    const Values a = times(x, transposed(x, n, k), n, k, n), aa = times(a, a, n, n, n);
    Values b(a.size());
    for (size_t j = 0; j < a.size(); j++) b[j] = -4.7750 * a[j] + 2.0315 * aa[j];
    const Values bx = times(b, x, n, n, k);
    for (size_t j = 0; j < x.size(); j++) x[j] = 3.4445 * x[j] + bx[j];
  }
  return x;
}

Values gradient(const Parameter& p, int step) {
  Values g(static_cast<size_t>(p.value.numel()));
  for (size_t i = 0; i < g.size(); i++) g[i] = std::sin(step + 3.7 * static_cast<double>(i * i));
  return g;
}

void set_gradients(Matrices& model, int step) {
  for (Parameter* p : model.parameters()) p->leaf.grad = Tensor::from(gradient(*p, step), p->value.shape());
}

TEST(Muon, MatchesTheTextbookUpdateForEachMatrixOfAStack) {
  for (const bool nesterov : {true, false}) {
    for (const char* scale : {"adamw", "spectral"}) {
      Matrices model(DType::f64);
      const auto optimizer = OptimizerRegistry::make(
          muon(str("{momentum: 0.8, weight_decay: 0.3, nesterov: ", nesterov ? "true" : "false",
                   ", scale: ", scale, "}")),
          model.parameters());
      const std::vector<Parameter*> parameters = model.parameters();
      std::vector<Values> w, m;
      for (size_t q = 0; q < std::size(kSizes); q++) {
        w.push_back(to_doubles(parameters[q]->value));
        m.emplace_back(w.back().size());
      }
      for (int t = 1; t <= 3; t++) {
        set_gradients(model, t);
        optimizer->step(0.1, 0.5);
        for (size_t q = 0; q < std::size(kSizes); q++) {
          const auto [count, rows, columns] = kSizes[q];
          const Values g = gradient(*parameters[q], t);
          const auto n = static_cast<double>(rows), k = static_cast<double>(columns);
          const double size = scale == std::string("adamw") ? 0.2 * std::sqrt(std::max(n, k))
                                                            : std::sqrt(std::max(1.0, n / k));
          for (size_t c = 0; c < count; c++) {
            Values x(rows * columns);
            for (size_t i = 0; i < x.size(); i++) {
              double& momentum = m[q][c * x.size() + i];
              const double gi = 0.5 * g[c * x.size() + i];
              momentum = 0.8 * momentum + gi;
              x[i] = nesterov ? gi + 0.8 * momentum : momentum;
            }
            const Values o = newton_schulz(x, rows, columns, 5);
            for (size_t i = 0; i < x.size(); i++) {
              double& value = w[q][c * x.size() + i];
              value -= 0.1 * (0.3 * value + size * o[i]);
            }
          }
          EXPECT_TRUE(close(to_doubles(parameters[q]->value), w[q], {1e-11, 1e-11}))
              << parameters[q]->name << ", step " << t << ", scale " << scale;
        }
      }
    }
  }
}

TEST(Muon, UpdatesAreNearlyOrthogonal) {
  Matrices model(DType::f32, 9);
  const auto optimizer =
      OptimizerRegistry::make(muon("{weight_decay: 0, scale: spectral}"), model.parameters());
  Parameter& p = *model.parameters()[0];
  const Values before = to_doubles(p.value);
  const size_t rows = 27, columns = 63;
  for (Parameter* q : model.parameters()) q->leaf.grad = q->value.detach().clone();  // of full rank
  optimizer->step(1, 1);
  Values update = to_doubles(p.value);
  for (size_t i = 0; i < update.size(); i++) update[i] = before[i] - update[i];
  const Values gram = times(update, transposed(update, rows, columns), rows, columns, rows);
  for (size_t i = 0; i < rows; i++) {
    for (size_t j = 0; j < rows; j++) {
      EXPECT_NEAR(gram[i * rows + j], i == j ? 1 : 0, 0.5) << i << ' ' << j;  // singular values in 0.7 .. 1.2
    }
  }
}

TEST(Muon, WhatIsNoMatrixIsUpdatedByAdamw) {
  Matrices model(DType::f64), other(DType::f64);
  const auto optimizer = OptimizerRegistry::make(muon("{beta2: 0.9, weight_decay: 0.2}"), model.parameters());
  Choice choice{"adamw", OptimizerRegistry::instance().make_options("adamw")};
  ConfigErrors errors;
  parse_fields(
      load_yaml_text("{beta2: 0.9, weight_decay: 0.2}", "test", errors), "",
      [&](FieldVisitor& v) { choice.options->fields(v); }, errors);
  const auto adamw = OptimizerRegistry::make(choice, other.parameters());
  for (int t = 1; t <= 3; t++) {
    set_gradients(model, t);
    set_gradients(other, t);
    optimizer->step(0.01, 0.7);
    adamw->step(0.01, 0.7);
  }
  for (size_t q = std::size(kSizes); q < model.parameters().size(); q++)
    EXPECT_EQ(to_doubles(model.parameters()[q]->value), to_doubles(other.parameters()[q]->value));
  std::map<std::string, std::string> states;
  optimizer->visit_state([&](const std::string& name, Parameter& p, const Tensor& state) {
    states[p.name] += name;
    EXPECT_EQ(state.shape(), p.value.shape());
  });
  EXPECT_EQ(states.at("wide"), "m");
  EXPECT_EQ(states.at("experts"), "m");
  EXPECT_EQ(states.at("router"), "mv");
  EXPECT_EQ(states.at("head.weight"), "mv");
}

TEST(Muon, AGradientOfZerosMovesNothingAndOneThatIsNoNumberIsSeen) {
  Matrices model(DType::f32);
  const auto optimizer = OptimizerRegistry::make(muon("{weight_decay: 0}"), model.parameters());
  const Parameter& p = *model.parameters()[2];
  const std::vector<float> before = p.value.to_vector<float>();
  for (Parameter* q : model.parameters()) q->leaf.grad = Tensor::zeros(q->value.shape(), DType::f32);
  optimizer->step(0.1, 1);
  EXPECT_EQ(p.value.to_vector<float>(), before);
  p.leaf.grad.data<float>()[0] = NAN;
  optimizer->step(0.1, 1);
  const std::vector<float> after = p.value.to_vector<float>();
  EXPECT_TRUE(std::isnan(after[0]));
  for (size_t i = 20; i < after.size(); i++) EXPECT_EQ(after[i], before[i]) << "another matrix of the stack";
}

TEST(Muon, ThreadsDoNotChangeABit) {
  std::vector<std::vector<std::vector<float>>> results;
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    Matrices model(DType::f32, 33);
    const auto optimizer = OptimizerRegistry::make(muon("{}"), model.parameters());
    for (Parameter* p : model.parameters()) p->leaf.grad = p->value.detach().clone();
    for (int t = 0; t < 3; t++) optimizer->step(0.01, 1);
    results.emplace_back();
    for (const Parameter* p : model.parameters()) results.back().push_back(p->value.to_vector<float>());
  }
  set_num_threads(1);
  EXPECT_EQ(results[0], results[1]);
}

TEST(Muon, RefusesPartsOfMatrices) {
  const auto refusal = [](const std::function<void(Parameter&)>& cut) {
    Matrices model(DType::f32);
    cut(*model.parameters()[0]);
    return error_of([&] { OptimizerRegistry::make(muon("{}"), model.parameters()); });
  };
  EXPECT_EQ(refusal([](Parameter&) {}), "");
  EXPECT_NE(refusal([](Parameter& p) {
              p.box.extent.set(1, 3);
            }).find("muon: expected whole matrices, but this rank has a part of wide"),
            std::string::npos);
  EXPECT_NE(refusal([](Parameter& p) {
              p.piece = ShardRange{0, 5};
            }).find("updates a piece of wide"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::testing
