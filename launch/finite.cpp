#include "launch/finite.h"

#include <algorithm>
#include <limits>

#include "core/base/text.h"
#include "core/ops/elementwise.h"

namespace shoal {

namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

/// The first tensor with an element that is not finite, kNone if there is none; undefined ones count as
/// finite. The host waits for the device once.
int64_t first_bad(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) return kNone;
  const auto device_of_first = std::ranges::find_if(tensors, [](const Tensor& t) { return t.defined(); });
  const Device device = device_of_first == tensors.end() ? Device{} : device_of_first->device();
  const Tensor counts = Tensor::zeros({std::ssize(tensors)}, DType::i64, device);
  for (int64_t i = 0; i < std::ssize(tensors); i++) {
    const Tensor& t = tensors[static_cast<size_t>(i)];
    if (t.defined() && is_float(t.dtype())) count_not_finite(device, t, counts.flat(i, 1));
  }
  const std::vector<int64_t> found = counts.to_vector<int64_t>();
  const auto bad = std::ranges::find_if(found, [](int64_t count) { return count > 0; });
  return bad == found.end() ? kNone : bad - found.begin();
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
  std::vector<Tensor> values;
  for (const StateTensor& t : state) values.push_back(t.value);
  const Lowest first = lowest_of(first_bad(values), world);
  return first.value == kNone
             ? ""
             : str(state[static_cast<size_t>(first.value)].name, " on ", rank_list(first.ranks));
}

std::string where_not_finite(TrainEngine& engine, bool own_loss_finite) {
  const std::vector<Parameter*>& parameters = engine.parameters();
  std::vector<Tensor> weights, gradients;  // in the orders of forward and backward
  for (const Parameter* p : parameters) {
    weights.push_back(p->own_value());
    gradients.push_back(p->own_grad());
  }
  std::ranges::reverse(gradients);
  Communicator& world = engine.mesh().world();
  const Lowest loss = lowest_of(own_loss_finite ? kNone : 0, world),
               bad_weight = lowest_of(first_bad(weights), world),
               bad_gradient = lowest_of(first_bad(gradients), world);
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
