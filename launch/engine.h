// TrainEngine: the heart of training without any input or output: model, optimizer, gradient reduction, one
// step. The trainer feeds it batches; the parity tests compare its state between layouts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/tensor/stream.h"
#include "launch/checkpoint.h"
#include "launch/pipeline.h"
#include "models/model.h"
#include "optim/optimizer.h"
#include "parallel/grad_bucket.h"
#include "parallel/mesh.h"
#include "parallel/weight_gather.h"

namespace shoal {

struct EngineOptions {
  Choice model, optimizer, dispatcher;
  int64_t vocab_size = 0, seq_len = 0;
  uint64_t seed = 1;
  double clip_norm = 1;  // 0: off
  double bucket_mb = 25;
  ZeroStage zero = ZeroStage::none;
  DType dtype = DType::f32;     // of parameters
  bool bf16 = false;            // mixed precision (BuildContext::bf16)
  bool rank_invariant = false;  // bits do not depend on how sequences lie on ranks and micro-batches
  Device device;
};

class LossSums;

/// Sums over the whole step and all ranks.
struct StepResult {
  double loss = 0, aux_loss = 0, z_loss = 0;  // nats per label; each with its coefficient where it has one
  double grad_norm = 0;                       // before clipping
  int64_t labels = 0, tokens = 0;
  bool updated = false;         // false: loss or gradients were not finite, or the step had no labels
  bool own_loss_finite = true;  // of this rank's micro-batches
  bool stop_requested = false;  // some rank passed request_stop
  std::vector<MoeStepStats> moe;
};

class TrainEngine {
 public:
  /// Collective. `mesh` must outlive the engine. On a device with streams the engine makes one, which is
  /// current for this thread until the engine is gone; batches are made after it, and everything is called on
  /// this thread.
  TrainEngine(const EngineOptions& options, const Mesh& mesh);

  /// One optimizer step on this rank's micro-batches (every rank passes the same number; one may be empty).
  /// Collective. request_stop is or-ed over the ranks and returned to all of them.
  StepResult step(std::span<const ModelBatch> micro_batches, double learning_rate, bool request_stop = false);
  /// Forward and backward only: gradients are left in the parameters (Parameter::own_grad), reduced. Used by
  /// step(); moe statistics are kept.
  /// With rank_invariant each sequence has a forward and a backward pass of its own.
  StepResult accumulate_gradients(std::span<const ModelBatch> micro_batches, bool request_stop = false);

  /// Sum of losses and number of labels over all ranks. Every rank passes the same number of batches; empty
  /// ones are fine. Leaves no trace in the model. Collective.
  struct LossSum {
    double loss = 0;
    int64_t labels = 0;
  };
  LossSum evaluate(std::span<const ModelBatch> batches);

  /// Everything a checkpoint must hold besides numbers: weights, buffers, optimizer state.
  std::vector<StateTensor> state();
  Model& model() { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  /// With the values of the last update, where replicas hold them in full.
  const std::vector<Parameter*>& parameters();
  const Mesh& mesh() const { return mesh_; }
  Device device() const { return options_.device; }

 private:
  std::vector<int64_t> count_totals(std::span<const ModelBatch> micro_batches, bool request_stop);
  void read_sums(const LossSums& losses, StepResult& result);
  std::vector<ModelBatch> as_passes(std::span<const ModelBatch> micro_batches) const;

  EngineOptions options_;
  const StreamScope stream_;  // one of its own
  const Mesh& mesh_;
  std::unique_ptr<Model> model_;
  std::vector<Parameter*> parameters_;
  std::unique_ptr<GradReducer> reducer_;
  std::unique_ptr<WeightGather> weights_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<Optimizer> optimizer_;
};

/// The host batch as device tensors: the rows of one context parallel rank. Documents are passed on only when
/// `mask_documents`.
struct Batch;
ModelBatch to_model_batch(const Batch& batch, bool mask_documents, AxisCoord cp, Device device);

}  // namespace shoal
