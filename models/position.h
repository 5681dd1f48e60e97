// Position encodings: rope, learned, sinusoidal, alibi, none. Each acts at one of three places; the defaults
// do nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/base/registry.h"
#include "core/nn/module.h"
#include "core/ops/attention.h"

namespace shoal {

struct PositionContext {
  BuildContext build;
  int64_t hidden_size = 0, heads = 0, head_size = 0, seq_len = 0;
  double init_std = 0.02;
  /// Positions that a table has at first.
  int64_t table_rows() const { return build.shapes_only ? 0 : seq_len; }
};

/// Base of the options of encodings that have any.
struct PositionOptions : Options {
  /// What does not fit the size of a head, for the config check; "" when all is well.
  virtual std::string problem(int64_t head_size) const { return (void)head_size, ""; }
};

class PositionEncoding : public Module {
 public:
  /// Called before a forward pass: positions will be below `num_positions`.
  virtual void prepare(int64_t num_positions) { (void)num_positions; }
  /// Added to the token embeddings. positions_T: i32.
  virtual Tensor embed(const Tensor& x_TD, const Tensor& positions_T) { return (void)positions_T, x_TD; }
  /// Applied to packed queries and keys.
  virtual Tensor rotate(const Tensor& qkv, const AttentionSpec& spec, const Tensor& positions_T) {
    return (void)spec, (void)positions_T, qkv;
  }
  /// Changes how scores are computed.
  virtual void adjust(AttentionSpec& spec) const { (void)spec; }
  /// Positions must be below this; 0: no limit.
  virtual int64_t max_positions() const { return 0; }
  virtual int64_t num_params() const { return 0; }
};
using PositionRegistry = Registry<PositionEncoding, const PositionContext&>;

}  // namespace shoal
