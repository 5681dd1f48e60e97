#include "optim/optimizer.h"

#include <algorithm>
#include <optional>

#include "core/base/threads.h"
#include "core/ops/bf16_linear.h"

namespace shoal {

void Optimizer::step(double learning_rate, double grad_scale) {
  constexpr int64_t kBlockElements = 1 << 15;
  num_steps_++;
  blocks_.clear();
  Cost cost;
  for (size_t i = 0; i < parameters_.size(); i++) {
    const Parameter& p = *parameters_[i];
    const PackedWeight packed = packs(i) ? p.leaf.packed : PackedWeight{};
    const Tensor value = p.own_value();
    const int64_t n = value.numel();
    // Value and state are read and written, the gradient is read, bf16 copies are written.
    const double state = static_cast<double>(state_bytes_per_element(p.kind)) / 4;
    cost.bytes += (3 + 2 * state) * bytes_of(value) + bytes_of(packed.forward, packed.backward);
    if (updates_whole(i)) continue;
    if (value.device().type != DeviceType::cpu) {
      if (n > 0) blocks_.push_back({i, 0, n});
    } else if (packed.forward) {
      const int64_t width = packed.shape[-1];
      for_each_pack_block(packed.shape, [&](int64_t first, int64_t last) {
        blocks_.push_back({i, first * width, last * width});
      });
    } else {
      for (int64_t begin = 0; begin < n; begin += kBlockElements)
        blocks_.push_back({i, begin, std::min(n, begin + kBlockElements)});
    }
  }
  std::optional<ProfileCall> call;
  if (Profiler* profiler = Profiler::active(); profiler != nullptr)
    call.emplace(*profiler, "optimizer update", cost);
  for (size_t i = 0; i < parameters_.size(); i++) {
    if (updates_whole(i)) update_whole(i, learning_rate, grad_scale);
  }
  update_blocks(learning_rate, grad_scale);
}

/// Whether the bf16 copies of a parameter are made while its new values are in the cache.
bool Optimizer::packs(size_t index) const {
  const Parameter& p = *parameters_[index];
  return p.leaf.packed.forward && !p.piece && !updates_whole(index);
}

void Optimizer::update_blocks(double learning_rate, double grad_scale) {
  const auto one = [&](int64_t task) {
    const Block& block = blocks_[static_cast<size_t>(task)];
    update(block, learning_rate, grad_scale);
    const Parameter& p = *parameters_[block.index];
    if (!packs(block.index)) return;
    const int64_t width = p.leaf.packed.shape[-1];
    pack_rows(p.value.device(), p.value, p.leaf.packed, block.begin / width, block.end / width);
  };
  if (!parameters_.empty() && parameters_[0]->value.device().type != DeviceType::cpu) {
    // Into the stream of this thread; the device is busy with a parameter at a time.
    for (int64_t i = 0; i < std::ssize(blocks_); i++) one(i);
  } else {
    parallel_tasks(std::ssize(blocks_), one);
  }
  for (size_t i = 0; i < parameters_.size(); i++) parameters_[i]->leaf.packed_fresh = packs(i);
}

void DecayRule::fields(FieldVisitor& v) {
  v("weight_decay", weight_decay,
    "decoupled weight decay of matrices and routers (never of norms and biases)", in_range(0, 1e3));
  v("decay_embeddings", decay_embeddings, "decay token and position embeddings too");
}

double DecayRule::of(const Parameter& parameter) const {
  switch (parameter.kind) {
    case ParamKind::matrix:
    case ParamKind::router:
    case ParamKind::head:
      return weight_decay;
    case ParamKind::embedding:
      return decay_embeddings ? weight_decay : 0;
    case ParamKind::norm:
    case ParamKind::bias:
      return 0;
  }
  return 0;
}

Tensor make_state(const Parameter& parameter) {
  const Shape shape = parameter.piece ? parameter.own_value().shape() : parameter.value.shape();
  return Tensor::zeros(shape, parameter.leaf.grad_dtype, parameter.value.device());
}

}  // namespace shoal
