// Function: one differentiable operation, written as a forward/backward pair. What backward needs is kept in
// named members of the subclass (activations as Saved); needs_grad(i) says what may be skipped. Ops in
// core/ops are Functions.
//
//   struct Scale final : Function {
//     double factor;
//     const char* name() const override { return "scale"; }
//     Tensor forward(const Tensor& x) { return ...; }
//     std::vector<Tensor> backward(const std::vector<Tensor>& dy) override { return {...}; }
//   };
//   Tensor y = apply(Scale{.factor = 2}, x);
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/autograd/exact_sum.h"
#include "core/autograd/saved.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// bf16 copies of a weight for matrix products, in layouts of the backend (core/ops/bf16_linear.h).
struct PackedWeight {
  Tensor forward, backward;  // of y = x W^T and of dx = dy W
  Shape shape;               // the weight's: [N, K] or [G, N, K]
};

/// Where the gradients of a parameter end. Permanent: outlives every tape.
struct Leaf {
  Tensor grad;  // accumulates (+=); f32, or f64 for f64 parameters; allocated at first use when undefined
  bool grad_is_zero =
      false;  // the values of `grad` are stale and mean zeros: the first gradient may overwrite
  std::function<void()> make_grad;  // where set: defines `grad`, with stale values, when one is needed
  ExactSum exact_sum;  // where set: the gradient of each use is added to it, and `grad` has that of one use
  int uses_left = 0;   // forward uses whose backward has not run yet
  std::function<void()> on_grad_ready;  // called when uses_left returns to 0 in a backward pass
  DType grad_dtype = DType::f32;
  PackedWeight packed;        // of the parameter's value; undefined until a bf16 product needs it
  bool packed_fresh = false;  // cleared by whatever changes the value; the next product packs again
  bool keep_packed = true;    // false: each product makes the copy it needs, and drops it

  /// The gradient buffer, with its values: zero-filled when it did not exist or was stale.
  Tensor& grad_buffer(const Shape& shape, Device device);
  /// After the backward of a use: `grad` goes into the exact sum, where there is one.
  void end_use();
};

class Function {
 public:
  Function() = default;
  Function(Function&&) = default;
  Function& operator=(Function&&) = default;
  virtual ~Function() = default;
  virtual const char* name() const = 0;

  /// grad_outputs: one per forward output, of the output's shape; undefined when nothing flowed into that
  /// output. A gradient may be overwritten in place when is_sole_owner().
  /// Returns one gradient per forward input: a new value that the tape may keep, or an undefined Tensor for
  /// "none" or "already accumulated into leaf_grad(i)".
  virtual std::vector<Tensor> backward(const std::vector<Tensor>& grad_outputs) = 0;
  /// Whether backward must run even when no gradient reached any output (recompute: uses of parameters inside
  /// are open until then).
  virtual bool runs_without_gradient() const { return false; }

  /// Where backward writes a gradient, or adds to it: a leaf's buffer, or a new tensor.
  struct GradTarget {
    Tensor grad;
    bool accumulate = false, is_leaf = false;
    /// What backward returns for this input.
    Tensor delivered() const { return is_leaf ? Tensor{} : grad; }
  };

 protected:
  /// Whether input i wants a gradient; valid in forward and backward.
  bool needs_grad(int input) const { return (needs_ >> input & 1U) != 0; }
  /// Where the gradient of input i goes, once: every element of `grad` must be written, or added to when
  /// `accumulate`. `shape` is the input's; `dtype` counts when it is no leaf.
  GradTarget grad_target(int input, const Shape& shape, DType dtype, Device device) const;
  /// In backward: the f32/f64 gradient buffer of input i when it is a leaf, for += in place (a weight
  /// gradient is never a temporary); nullptr otherwise. `shape` is the input's.
  Tensor* leaf_grad(int input, const Shape& shape, Device device) const;
  /// Where input i is a leaf with an exact sum: that, for gradients of several sequences, each of which is to
  /// be added by itself. Else an empty one.
  ExactSum exact_sum(int input) const;
  /// In forward: ends the use of a leaf whose gradient forward has written (Leaf::end_use).
  void end_use(int input) const;

 private:
  friend class Tape;
  uint32_t needs_ = 0;
  std::vector<GradRef> inputs_;
  mutable std::vector<Tensor> grad_views_;  // what leaf_grad pointed at
};

}  // namespace shoal
