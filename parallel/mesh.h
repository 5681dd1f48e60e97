// ParallelLayout: the degrees of every axis, and the one place where their legality is decided. Mesh: the
// ranks of the world arranged in two grids, dense {tp, cp, dp, pp} and expert {etp, ep, edp, pp}, with a
// communicator per axis.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/config.h"
#include "core/nn/placement.h"
#include "parallel/communicator.h"
#include "parallel/context_split.h"
#include "parallel/pipeline_schedule.h"

namespace shoal {

/// The `parallel.pipeline:` section of a config.
struct PipelineOptions {
  std::string schedule = "1f1b";
  int64_t virtual_stages = 1;
  std::vector<int64_t> layout;  // layers of each stage; empty: balanced
  void fields(FieldVisitor& v);
};

/// The `parallel:` section of a config.
struct ParallelOptions {
  AutoInt dp;  // auto: world / (tp * cp * pp)
  int64_t tp = 1, cp = 1, pp = 1, etp = 1;
  AutoInt ep{1};  // auto: the largest divisor of the world and of num_experts; 1 for dispatcher local
  PipelineOptions pipeline;
  std::string context = "all_gather";  // ContextKind
  Choice dispatcher;                   // DispatcherRegistry; default all_to_all
  int64_t zero = 0;        // ZeroStage (parallel/flat_bucket.h): what replicas share of the optimizer's work
  AutoInt ranks_per_node;  // auto: found at start
  double bucket_mb = 25;   // gradients are reduced in buckets of this size
  ParallelOptions();
  void fields(FieldVisitor& v);
};

/// How pipeline stages work.
struct PipelineLayout {
  PipelineKind schedule = PipelineKind::one_f_one_b;
  int virtual_stages = 1;       // of each rank
  std::vector<int64_t> layers;  // of each stage, in the order of the model; empty: balanced
};

struct ParallelLayout {
  int tp = 1, cp = 1, dp = 1, pp = 1;  // dense grid
  int etp = 1, ep = 1, edp = 1;        // expert grid; pp is shared
  ContextKind context = ContextKind::all_gather;
  PipelineLayout pipeline = {};
  int num_stages() const { return pp * pipeline.virtual_stages; }
  int ranks_per_node = 0;  // consecutive ones of the world; 0: nodes are found
};

/// Sizes of a model that a layout must fit. 0: the model has no such thing.
struct ModelSizes {
  int64_t num_experts = 0;          // per MoE layer
  int64_t heads = 0, kv_heads = 0;  // of attention; heads / kv_heads queries share a key/value head
  int64_t narrowest_ffn = 0;        // the smallest width of dense FFNs and shared experts
  int64_t expert_width = 0;         // of a routed expert
  int64_t width_multiple = 1;       // of a rank's part of that: what products of fp8 need
  int64_t layers = 0;               // that pipeline stages can have
  bool pads_experts = false;        // they get as many rows as they have room for
};

/// What the layout must fit.
struct LayoutFacts {
  int world_size = 1;
  ModelSizes model{};
  int64_t global_batch = 1;         // sequences per optimizer step
  int64_t micro_batch = 1;          // sequences per rank and forward pass; 0: auto
  std::string whole_matrices = {};  // the optimizer that must not be given parts of them; empty: it may
};

/// Fills in what is `auto`. Every violated rule is added to `errors` with its numbers and what to change;
/// nothing throws.
ParallelLayout resolve_layout(const ParallelOptions& options, const LayoutFacts& facts,
                              const ConfigNode& origins, ConfigErrors& errors);

/// Micro-batches of a replica's `sequences` where data.micro_batch is auto: one without pipeline stages, else
/// as few equal ones as keep all stages busy (at least pp, for interleaved a multiple of it), or one per
/// sequence.
int64_t auto_micro_batches(int64_t sequences, const ParallelLayout& layout);

/// The coordinates of a rank of the world in both grids.
AxisCoords coords_of(const ParallelLayout& layout, int rank);
/// The rank of the world that differs from `rank` in one coordinate alone, which is `index`.
int rank_along(const ParallelLayout& layout, int rank, Axis axis, int index);

class Mesh {
 public:
  /// Collective over the world (splits it), whose nodes it sets, numbered in the order of their first rank.
  /// Ranks are numbered tp fastest, then cp, dp, pp; in the expert grid etp fastest, then ep, edp, pp. An
  /// imagined world needs ranks_per_node.
  Mesh(std::shared_ptr<Communicator> world, const ParallelLayout& layout);

  const ParallelLayout& layout() const { return layout_; }
  const AxisCoords& coords() const { return coords_; }
  Communicator& world() const { return *world_; }
  /// This rank's group along an axis; a group of one for axes of size 1.
  Communicator& comm(Axis axis) const { return *comms_[static_cast<size_t>(axis)]; }
  /// Ranks that hold different tokens: dp x cp. Losses, labels and dense gradients are summed over it.
  Communicator& tokens() const { return *tokens_; }
  /// Ranks that hold different sequences: dp. What routers count is summed over it, because the ranks that
  /// share a sequence all route all of it.
  Communicator& sequences() const { return comm(Axis::dp); }
  /// Whether this rank speaks for those that share its sequences: what they all have is summed over tokens()
  /// once.
  bool speaks_for_sequences() const { return coords_[Axis::cp].index == 0; }
  /// This rank and its like in the other of the first and the last pipeline stage, in this order; a group of
  /// one for ranks of other stages, and without stages.
  Communicator& ends() const { return *ends_; }
  /// The ranks that hold the same part of a parameter as this one: its gradient is summed over them.
  /// Collective over the stage the first time that it is asked for this way of cutting.
  Communicator& replicas(const Placement& placement) const;

 private:
  std::shared_ptr<Communicator> world_;
  ParallelLayout layout_;
  AxisCoords coords_;
  std::array<std::shared_ptr<Communicator>, kNumAxes> comms_;
  std::shared_ptr<Communicator> tokens_;
  std::shared_ptr<Communicator> stage_;  // all ranks with this pp coordinate
  std::shared_ptr<Communicator> ends_;
  /// How a parameter is cut on these ranks: its grid, and of each dimension the axis, parts and `within`.
  using Cut = std::array<int, 1 + 3 * Placement::kMaxSharded>;
  mutable std::map<Cut, std::shared_ptr<Communicator>> replicas_;
};

}  // namespace shoal
