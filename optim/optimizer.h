// Optimizer: updates parameters from their (already reduced) gradients. Registered by name, with its options,
// in one .cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/registry.h"
#include "core/nn/parameter.h"

namespace shoal {

class Optimizer {
 public:
  explicit Optimizer(std::vector<Parameter*> parameters) : parameters_(std::move(parameters)) {}
  virtual ~Optimizer() = default;

  /// One step, over the threads of this rank. Gradients are multiplied by grad_scale (clipping) on the way. A
  /// parameter whose gradient is zero (an expert without tokens) is updated like any other: moments decay,
  /// weight decay applies.
  void step(double learning_rate, double grad_scale);
  /// Steps taken; part of the checkpoint (bias corrections depend on it).
  int64_t num_steps() const { return num_steps_; }
  void set_num_steps(int64_t steps) { num_steps_ = steps; }

  /// Every state tensor, under a name like "m": shaped and sharded like its parameter, or flat where this
  /// rank updates a piece of it (Parameter::piece). Same order on every rank.
  using StateVisitor =
      std::function<void(const std::string& name, Parameter& parameter, const Tensor& state)>;
  virtual void visit_state(const StateVisitor& visit) = 0;
  /// Bytes of state per element of an f32 parameter of that kind, for memory estimates.
  virtual int64_t state_bytes_per_element(ParamKind kind) const = 0;
  /// Whether a rank must hold all of a matrix and update all of it: a rule of layouts.
  virtual bool needs_whole_matrices() const { return false; }

 protected:
  /// Elements [begin, end) of what this rank updates of parameter `index`: a block that stays in a core's
  /// cache, so that memory is read and written once per step (bf16 copies of the new values are made from
  /// there, where this rank updates all of the parameter). On other devices than the cpu all elements.
  struct Block {
    size_t index;
    int64_t begin, end;
    Tensor of(const Tensor& t) const { return t.flat(begin, end - begin); }
  };
  /// Updates one block and its state, on the calling thread; blocks of the cpu are updated at the same time.
  virtual void update(const Block& block, double learning_rate, double grad_scale) = 0;
  /// Whether parameter `index` is updated by update_whole instead of block by block.
  virtual bool updates_whole(size_t /*index*/) const { return false; }
  /// Updates all of the parameter and its state, with all threads; one after the other.
  virtual void update_whole(size_t /*index*/, double /*learning_rate*/, double /*grad_scale*/) {}
  const std::vector<Parameter*>& parameters() const { return parameters_; }

 private:
  void update_blocks(double learning_rate, double grad_scale);
  bool packs(size_t index) const;

  std::vector<Parameter*> parameters_;
  std::vector<Block> blocks_;
  int64_t num_steps_ = 0;
};
using OptimizerRegistry = Registry<Optimizer, const std::vector<Parameter*>&>;

/// Which parameters weight decay applies to: matrices and routers; embeddings only when asked; never norms
/// and biases.
struct DecayRule {
  double weight_decay = 0.1;
  bool decay_embeddings = false;
  void fields(FieldVisitor& v);
  double of(const Parameter& parameter) const;
};

/// Zero-filled state like the gradient of what this rank updates of the parameter (f32, or f64 for f64
/// parameters).
Tensor make_state(const Parameter& parameter);

}  // namespace shoal
