// Parameter: a named tensor with a gradient, stored as this rank's shard of a global tensor.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "core/autograd/function.h"
#include "core/nn/placement.h"
#include "core/tensor/tensor.h"

namespace shoal {

/// How a parameter is initialised. A value depends only on (seed, name, global index), never on the layout.
struct Init {
  enum class Kind { zeros, ones, normal };
  Kind kind = Kind::zeros;
  double stddev = 0;  // normal
  static Init zeros() { return {Kind::zeros, 0}; }
  static Init ones() { return {Kind::ones, 0}; }
  static Init normal(double stddev) { return {Kind::normal, stddev}; }
};

/// What a parameter is; decides weight decay (matrices, routers and the head, by default), the update rule of
/// some optimizers, and how it is counted.
enum class ParamKind { matrix, norm, bias, embedding, router, head };

struct Parameter {
  std::string name;  // dotted, unique in the model: "layers.3.attention.qkv.weight"
  Shape global_shape;
  Placement placement;
  ParamKind kind = ParamKind::matrix;
  /// Of a matrix, for optimizers that see it as one: so many first dimensions are a stack of matrices, so
  /// many last ones their columns.
  int stacked_dims = 0, column_dims = 1;
  Tensor value;  // this rank's shard; value.grad_ref.leaf == &leaf
  Leaf leaf;
  /// Where set: `value` has no memory yet; this gives it some, with the initial values (BuildContext).
  std::function<void()> fill;
  Box box;  // where value lies in the global tensor
  /// false: it belongs to other pipeline stages; value and box are empty. Every rank knows all parameters.
  bool held = true;
  /// The first and the last pipeline stage both hold it, and their gradients are summed (a tied embedding).
  bool on_both_ends = false;
  /// Where replicas share the work of the optimizer (parallel.zero): which elements of `value`, as flat
  /// memory, this rank updates, those elements, flat, and their gradient. Empty: all of them, by every
  /// replica.
  std::optional<ShardRange> piece;
  Tensor piece_value, piece_grad;
  /// Replicas share the memory of the values too: `value` has none outside of the use of a unit of the
  /// parameter (core/nn/weight_unit.h).
  bool value_divided = false;

  /// What this rank updates, flat.
  Tensor own_value() const;
  /// The gradient of own_value(), of the same size, once it is reduced; undefined while there is none.
  Tensor own_grad() const;

  Parameter() = default;
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;
};

/// A tensor that is state but has no gradient (router bias). Replicated on every rank.
struct Buffer {
  std::string name;
  Tensor value;
};

/// Fills the shard of a global tensor: element g of the global tensor gets f(seed, stream of name, g).
void fill_init(const Parameter& parameter, const Init& init, uint64_t seed);

}  // namespace shoal
