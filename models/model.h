// Model: what the trainer drives. A model turns a micro-batch into a scalar loss on the tape, and keeps the
// statistics of its MoE layers over the micro-batches of one optimizer step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/registry.h"
#include "core/nn/module.h"
#include "core/nn/weight_unit.h"
#include "core/tensor/tensor.h"
#include "models/stage_layout.h"
#include "parallel/mesh.h"

namespace shoal {

/// B sequences of S tokens of this rank and those that share them; rows are tokens, T = B * S, or with
/// context parallelism those of cut_sequences(). B may be 0 (a rank without data still takes part).
struct ModelBatch {
  int64_t batch = 0, seq = 0;
  Tensor tokens_T;          // i32
  Tensor labels_T;          // i32; -1 = no loss here
  Tensor positions_T;       // i32
  Tensor document_BS;       // i32, ascending per row; undefined: rows are not split into documents
  Tensor valid_BS;          // u8, 0 = padding; undefined: no padding
  int64_t num_labels = -1;  // labels >= 0, where it is known without reading them

  int64_t num_tokens() const { return tokens_T.numel(); }  // T
  /// Labels >= 0; waits for the device when num_labels is not known.
  int64_t count_labels() const;
  /// Tokens of whole sequences that are no padding; waits for the device where there may be some.
  int64_t num_valid() const;
};

/// The same sequences with the rows of one context parallel rank. Documents and padding stay those of whole
/// sequences: masks and routers look at other ranks' tokens too.
ModelBatch cut_sequences(const ModelBatch& whole, AxisCoord cp);

/// The sequences of micro-batches that are not cut, one batch each.
std::vector<ModelBatch> single_sequences(std::span<const ModelBatch> micro_batches);
/// A batch without sequences, for a rank that has none left while others still have.
ModelBatch empty_batch(int64_t seq, Device device);

/// What a forward pass is for. Only `train` leaves traces (counts of MoE layers).
enum class Pass : uint8_t {
  train,     // gradients will follow
  evaluate,  // no gradients, no traces, no capacity drops
  measure,   // counts assignments for an auxiliary loss over the whole global batch, nothing else
};

/// Sums over the whole optimizer step (all ranks, all micro-batches): the denominators of every loss.
struct StepTotals {
  int64_t labels = 1;             // labels >= 0
  int64_t tokens = 1;             // valid tokens
  int64_t num_micro_batches = 1;  // per rank
};

struct ForwardContext {
  Pass pass = Pass::train;
  StepTotals totals;
};

/// Scalars of one micro-batch on this rank, already divided by the step's totals: summing them over
/// micro-batches and ranks gives the step's losses.
struct LossTerms {
  Tensor total;  // lm + aux + z: what backward starts from
  Tensor lm;
  std::vector<Tensor> aux, z;  // of each MoE layer; empty when off
};

/// One MoE layer over one optimizer step, summed over all ranks.
struct MoeStepStats {
  int64_t layer = 0;
  std::vector<int64_t> counts_E;  // assignments before drops
  int64_t tokens = 0;             // valid tokens routed
  int64_t dropped = 0;            // assignments over capacity
  double entropy = 0;             // mean over tokens, nats
  double bias_min = 0, bias_max = 0;
};

/// Parameter and FLOP counts that follow from the config alone.
struct ModelFacts {
  int64_t params_total = 0, params_active = 0;  // active: used by one token
  int64_t params_embedding = 0;                 // token and position tables; part of both
  int64_t params_head = 0;                      // 0: the token table is the head too
  int64_t params_expert = 0;                    // of routed experts: spread over the ep ranks; part of total
  // The largest layer's, without and of routed experts.
  int64_t params_layer_dense = 0, params_layer_expert = 0;
  double flops_forward = 0, flops_backward = 0;  // per token; causal attention counted at half
  double flops_per_token() const { return flops_forward + flops_backward; }
};

/// A forward and backward pass of one rank, for pass_memory().
struct PassShape {
  int64_t vocab_size = 0;
  double tokens = 0;  // of one micro-batch, that the rank holds
  int ep = 1, etp = 1, cp = 1;
  DType dtype = DType::f32;  // of parameters
  bool bf16 = false;
  DeviceType device = DeviceType::cpu;
  bool drops_copies = false;  // of weights, as model.recompute: packed_weights
};
/// Bytes besides weights, gradients and optimizer state; doubles, because they may not fit an int64.
struct PassMemory {
  double packed_weights = 0;  // bf16 copies kept between passes
  double activations = 0;     // alive when backward begins
  double work =
      0;  // on top of these at the peak: a block of logits, gradients on their way, what is made again
};

/// A micro-batch by its sizes, for the prediction of traffic.
struct PassSizes {
  int64_t batch = 0, seq = 0;     // of whole sequences
  int64_t num_micro_batches = 1;  // of the step
};

/// Keys and values of the tokens seen so far, for generation.
struct DecodeState {
  int64_t length = 0, capacity = 0, batch = 0;
  std::vector<Tensor> keys, values;  // per layer [B, capacity, G, C]
};

/// What a pipeline stage makes of a micro-batch.
struct StageResult {
  Tensor x_TD;      // this rank's rows for the next stage; undefined behind the last one
  LossTerms terms;  // of this stage: undefined where it has none
};

class Model : public Module {
 public:
  /// Records the forward pass of one pipeline stage; x_TD is what the stage before it made, undefined for the
  /// first. Collective over the ranks of the stage.
  virtual StageResult forward_stage(int stage, const Tensor& x_TD, const ModelBatch& batch,
                                    const ForwardContext& context) = 0;
  /// Memory for this rank's rows between two stages; not initialised.
  virtual Tensor make_stage_input(const ModelBatch& batch) const = 0;

  /// The same of a model that is not cut: all of it. Records the forward pass of a micro-batch. Collective
  /// over the ep group when there are MoE layers.
  virtual LossTerms loss(const ModelBatch& batch, const ForwardContext& context) = 0;

  /// Logits [B, V] of the last of `tokens` new tokens per sequence, which are appended to `state`. No
  /// gradients. Collective over the ep group. tokens_T: B * n ids.
  virtual Tensor next_logits(const Tensor& tokens_T, DecodeState& state) = 0;
  virtual DecodeState make_decode_state(int64_t batch, int64_t capacity) const = 0;

  /// Whether the step's micro-batches must run once with Pass::measure first; then call end_measure().
  /// Collective.
  virtual bool needs_measure(int64_t num_micro_batches) const = 0;
  virtual void end_measure() = 0;
  /// Sums the step's MoE statistics over all ranks, clears them, and, when the optimizer took the step, moves
  /// the expert biases once. Collective.
  virtual std::vector<MoeStepStats> end_step(bool update_bias) = 0;

  /// Every parameter is in one or more of them; in the order of their first use in forward.
  virtual std::vector<WeightUnit*> weight_units() = 0;

  // What the above send, counted in the traffic of the groups without a call
  // (models/transformer_traffic.cpp), with balanced routing.
  /// One half of forward_stage and its backward. Pass::train includes what backward makes again. Calls
  /// WeightUnit::on_begin where a unit's use begins.
  virtual void count_stage(int stage, const PassSizes& sizes, Pass pass, PassHalf half) const = 0;
  virtual void count_end_measure() const = 0;
  virtual void count_end_step() const = 0;
  /// Of make_stage_input().
  virtual int64_t stage_input_bytes(const PassSizes& sizes) const = 0;

  /// Layers of each stage.
  virtual const std::vector<StageLayers>& stages() const = 0;
  virtual const ModelFacts& facts() const = 0;
  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_positions() const = 0;  // 0: no limit
};

/// What a model is built from besides its own options.
struct ModelContext {
  BuildContext build;
  const Mesh* mesh = nullptr;
  const Choice* dispatcher = nullptr;  // DispatcherRegistry
  int64_t vocab_size = 0, seq_len = 0;
  bool rank_invariant = false;  // run.deterministic: a pass has one sequence of this rank, and sums are exact
};

/// A setting with which the result depends on how sequences lie on ranks and micro-batches.
struct LayoutDependence {
  std::string key, fix;  // relative to the section; "expected ..., got ...; ..."
};

/// Options of a model also answer questions that are needed before it can be built.
struct ModelOptions : Options {
  AutoInt vocab_size;                       // auto: the tokenizer's
  virtual int64_t num_experts() const = 0;  // largest over the layers; 0: no MoE layer
  /// What a parallel layout must fit.
  virtual ModelSizes sizes() const = 0;
  /// The largest share that a rank's pipeline stages have of the layers, or of the MoE layers if that is
  /// more.
  virtual double largest_share(const ParallelLayout& layout, int64_t vocab_size, int64_t seq_len) const = 0;
  virtual ModelFacts facts(int64_t vocab_size, int64_t seq_len) const = 0;
  /// Predicted, with every expert getting its share of the rows.
  virtual PassMemory pass_memory(const PassShape& shape) const = 0;
  /// For run.deterministic: rank_invariant.
  virtual std::vector<LayoutDependence> layout_dependences() const = 0;
  /// Adds every violated rule between fields. `path` is the section ("model"), `root` gives origins.
  virtual void check(const std::string& path, const ConfigNode& root, ConfigErrors& errors) const = 0;
};
using ModelRegistry = Registry<Model, const ModelContext&>;

}  // namespace shoal
