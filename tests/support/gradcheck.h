// Central-difference gradient check in f64.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "core/autograd/tape.h"
#include "core/base/random.h"
#include "core/tensor/tensor.h"

namespace shoal::testing {

/// Standard normal values, reproducible; scaled by `scale`.
inline Tensor random_tensor(const Shape& shape, DType dtype, uint64_t seed, double scale = 1) {
  const RandomStream random(seed, "test");
  return dispatch_float(dtype, "random_tensor", [&]<class T>() {
    std::vector<T> values(static_cast<size_t>(shape.numel()));
    for (size_t i = 0; i < values.size(); i++) values[i] = static_cast<T>(scale * random.normal(i));
    return Tensor::from(values, shape);
  });
}

using GradcheckBody = std::function<std::vector<Tensor>(const std::vector<Tensor>&)>;

/// Compares the gradient of sum_o <outputs[o], R_o> (R fixed random) with central differences for every
/// element of every f64 input. `body` gets fresh copies, so ops that work in place are fine; non-f64 inputs
/// are constants. Pass `inputs` with undefined tensors for absent optional arguments.
inline ::testing::AssertionResult gradcheck(const GradcheckBody& body, const std::vector<Tensor>& inputs,
                                            double tolerance = 1e-6, double step = 1e-5) {
  auto copies = [&](const std::vector<Tensor>& from) {
    std::vector<Tensor> out;
    for (const Tensor& t : from) out.push_back(t.defined() ? t.clone() : Tensor{});
    return out;
  };
  auto seeds_for = [](const std::vector<Tensor>& outputs) {
    std::vector<Tensor> seeds;
    for (size_t o = 0; o < outputs.size(); o++) {
      const bool differentiable = outputs[o].defined() && outputs[o].dtype() == DType::f64;
      seeds.push_back(differentiable ? random_tensor(outputs[o].shape(), DType::f64, 1000 + o) : Tensor{});
    }
    return seeds;
  };
  auto value = [&](const std::vector<Tensor>& at) {
    const NoGrad no_grad;
    const std::vector<Tensor> outputs = body(copies(at));
    const std::vector<Tensor> seeds = seeds_for(outputs);
    double total = 0;
    for (size_t o = 0; o < outputs.size(); o++) {
      if (!seeds[o].defined()) continue;
      const auto y = outputs[o].to_vector<double>(), r = seeds[o].to_vector<double>();
      for (size_t i = 0; i < y.size(); i++) total += y[i] * r[i];
    }
    return total;
  };

  std::vector<Leaf> leaves(inputs.size());
  {
    Tape tape;
    std::vector<Tensor> at = copies(inputs);
    for (size_t i = 0; i < at.size(); i++) {
      if (!at[i].defined() || at[i].dtype() != DType::f64) continue;
      leaves[i].grad_dtype = DType::f64;
      at[i].grad_ref.leaf = &leaves[i];
    }
    const std::vector<Tensor> outputs = body(at);
    tape.backward(outputs, seeds_for(outputs));
  }
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!inputs[i].defined() || inputs[i].dtype() != DType::f64) continue;
    const std::vector<double> base = inputs[i].to_vector<double>();
    const std::vector<double> grad =
        leaves[i].grad.defined() ? leaves[i].grad.to_vector<double>() : std::vector<double>(base.size(), 0.0);
    if (leaves[i].uses_left != 0)
      return ::testing::AssertionFailure() << "input " << i << " still has uses left";
    for (size_t e = 0; e < base.size(); e++) {
      auto shifted = [&](double delta) {
        std::vector<double> values = base;
        values[e] += delta;
        std::vector<Tensor> at = inputs;
        at[i] = Tensor::from(values, inputs[i].shape());
        return value(at);
      };
      const double numeric = (shifted(step) - shifted(-step)) / (2 * step);
      const double scale = std::max({1.0, std::abs(numeric), std::abs(grad[e])});
      if (!(std::abs(numeric - grad[e]) <= tolerance * scale)) {
        return ::testing::AssertionFailure()
               << "input " << i << " element " << e << ": analytic " << grad[e] << ", numeric " << numeric;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace shoal::testing
