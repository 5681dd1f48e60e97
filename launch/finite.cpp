#include "launch/finite.h"

#include <algorithm>
#include <limits>

#include "core/base/text.h"
#include "core/ops/elementwise.h"

namespace shoal {

namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

bool is_finite(const Tensor& x) {
  const bool fractional = x.dtype() == DType::f32 || x.dtype() == DType::f64 || x.dtype() == DType::bf16;
  return !fractional || all_finite(x.device(), x);
}

/// The smallest value of all ranks and who has it.
struct Lowest {
  int64_t value = kNone;
  std::vector<int> ranks;
};
Lowest lowest_of(int64_t mine, Communicator& world) {
  const Tensor all = Tensor::empty({world.size()}, DType::i64);
  world.all_gather(Tensor::from(std::vector<int64_t>{mine}, Shape{1}), all).wait();
  const std::vector<int64_t> values = all.to_vector<int64_t>();
  Lowest lowest{*std::ranges::min_element(values), {}};
  for (int r = 0; r < world.size(); r++) {
    if (values[static_cast<size_t>(r)] == lowest.value) lowest.ranks.push_back(r);
  }
  return lowest;
}

}  // namespace

std::string first_not_finite(const std::vector<StateTensor>& state, Communicator& world) {
  const auto found = std::ranges::find_if_not(state, [](const StateTensor& t) { return is_finite(t.value); });
  const Lowest first = lowest_of(found == state.end() ? kNone : found - state.begin(), world);
  return first.value == kNone
             ? ""
             : str(state[static_cast<size_t>(first.value)].name, " on ", rank_list(first.ranks));
}

std::string where_not_finite(TrainEngine& engine, bool own_loss_finite) {
  const std::vector<Parameter*>& parameters = engine.parameters();
  int64_t weight = kNone, gradient = kNone;  // positions in the orders of forward and backward
  for (int64_t i = 0; i < std::ssize(parameters); i++) {
    const Parameter& forward = *parameters[static_cast<size_t>(i)];
    const Parameter& backward = *parameters[static_cast<size_t>(std::ssize(parameters) - 1 - i)];
    if (weight == kNone && !is_finite(forward.value)) weight = i;
    if (gradient == kNone && backward.leaf.grad.defined() && !is_finite(backward.leaf.grad)) gradient = i;
  }
  Communicator& world = engine.mesh().world();
  const Lowest loss = lowest_of(own_loss_finite ? kNone : 0, world), bad_weight = lowest_of(weight, world),
               bad_gradient = lowest_of(gradient, world);
  std::vector<std::string> parts;
  if (bad_weight.value != kNone) {
    parts.push_back(str("weight ", parameters[static_cast<size_t>(bad_weight.value)]->name, " on ",
                        rank_list(bad_weight.ranks)));
  }
  if (loss.value != kNone) parts.push_back("the loss of " + rank_list(loss.ranks));
  if (bad_gradient.value != kNone) {
    parts.push_back(
        str("the gradient of ",
            parameters[static_cast<size_t>(std::ssize(parameters) - 1 - bad_gradient.value)]->name, " on ",
            rank_list(bad_gradient.ranks), " (first in backward)"));
  }
  return parts.empty() ? "the gradient norm overflows" : "not finite: " + join(parts, ", ");
}

}  // namespace shoal
