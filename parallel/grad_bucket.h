// GradReducer: owns the flat gradient buffers and sums them over the replicas of each parameter, bucket by
// bucket, while backward is still running. Sums only: nothing is averaged, so an expert's gradient needs no
// special scale. Sums run in rank order whether replicas get all of them or a piece each (ZeroStage), so that
// every stage gives the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "parallel/flat_bucket.h"

namespace shoal {

class GradReducer {
 public:
  /// Gives every parameter a zeroed gradient that is a view of a flat bucket (FlatBucket::make_all), and
  /// installs grad-ready hooks. With a stage replicas share the optimizer's work: Parameter::piece is set, so
  /// make the optimizer afterwards, and Parameter::value moves. `units`: of the model; they matter to stages
  /// above none. `exact`: gradients of uses are summed exactly, so that their bits do not depend on how they
  /// lie on ranks and backward passes. Collective.
  GradReducer(const std::vector<Parameter*>& parameters, const Mesh& mesh, int64_t bucket_bytes,
              ZeroStage stage = ZeroStage::none, const std::vector<WeightUnit*>& units = {},
              bool exact = false);
  ~GradReducer();

  /// All gradients are zero from here on (Leaf::grad_is_zero; memory is not touched, finish() leaves no stale
  /// value); call at the start of an optimizer step.
  void zero();
  /// Call before the backward of the step's last micro-batch: from then on a bucket is reduced as soon as all
  /// its gradients are ready. Buckets go out in the same order on every rank. Not where
  /// reduces_each_backward().
  void begin_last_backward();
  /// Gradients are not kept in full from one backward to the next (ZeroStage::gradients and above), so the
  /// gradient of each micro-batch is reduced, and sums over micro-batches are sums of those.
  bool reduces_each_backward() const { return stage_ >= ZeroStage::gradients; }
  /// Around a backward of a pipeline stage, or the part of it that ends the uses of parameters: its buckets
  /// are reduced as they become ready, and what has not become ready behind it. Leaf::uses_left counts uses
  /// of this micro-batch alone. end_backward() waits. Collective over the ranks of the pipeline stage.
  void begin_backward(int pipeline_stage);
  void end_backward();
  /// Starts what has not become ready (unused parameters count with zeros) and waits for everything.
  /// Collective.
  void finish();

  int64_t num_buckets() const;
  int64_t reduced_bytes() const;  // summed per step
  /// In the order of backward.
  std::vector<FlatBucket*> buckets() const;

 private:
  struct Entry {
    std::unique_ptr<FlatBucket> bucket;
    std::vector<bool> ready;
    size_t num_waiting = 0;  // parameters not ready yet
  };
  /// Buckets that are to be reduced now: those for which `is_in` holds.
  void await(const std::function<bool(const FlatBucket&)>& is_in);
  void on_ready(size_t bucket);
  void start_ready_buckets(bool all);
  void complete_first();
  void complete_all();
  std::vector<Entry> buckets_;
  std::vector<Parameter*> parameters_;
  ZeroStage stage_;
  std::vector<size_t> awaited_;  // of buckets_
  size_t next_bucket_ = 0;       // of awaited_: to be started
  size_t first_in_flight_ = 0;   // those before it are reduced
  bool reducing_ = false;
};

/// Sums the squares of the whole model's gradient into `sum` (f64, zero before, on the device of the
/// parameters). Each logical parameter is counted once, by one of its replicas or piece by piece; the same
/// bits on every rank.
/// Collective over the world. Call after GradReducer::finish().
void add_grad_squares(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Tensor& sum);
/// The same as an exact sum (core/autograd/exact_sum.h) of the same gradient on every layout, rounded once.
void add_exact_grad_squares(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Tensor& sum);
/// add_grad_squares as a number; waits for the device.
double global_grad_square_sum(const std::vector<Parameter*>& parameters, const Mesh& mesh);

}  // namespace shoal
