// GradReducer: owns the flat gradient buffers and sums them over the replicas of each parameter, bucket by
// bucket, while backward is still running. Sums only: nothing is averaged, so an expert's gradient needs no
// special scale.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/nn/parameter.h"
#include "parallel/mesh.h"

namespace shoal {

class GradReducer {
 public:
  /// Gives every parameter a zeroed gradient that is a view of a flat bucket, and installs grad-ready hooks.
  /// Buckets are filled in reverse parameter order (the order of backward), at most `bucket_bytes` unless one
  /// parameter is larger. Collective: buckets are allocated where the ranks of their group can reach them.
  GradReducer(const std::vector<Parameter*>& parameters, const Mesh& mesh, int64_t bucket_bytes);
  ~GradReducer();

  /// All gradients are zero from here on (Leaf::grad_is_zero; memory is not touched, finish() leaves no stale
  /// value); call at the start of an optimizer step.
  void zero();
  /// Call before the backward of the step's last micro-batch: from then on a bucket is reduced as soon as all
  /// its gradients are ready. Buckets go out in the same order on every rank.
  void begin_last_backward();
  /// Starts what has not become ready (unused parameters count with zeros) and waits for everything.
  /// Collective.
  void finish();

  int64_t num_buckets() const;
  int64_t reduced_bytes() const;  // sent per step

 private:
  struct Bucket;
  void on_ready(size_t bucket);
  void start_ready_buckets(bool all);
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Parameter*> parameters_;
  size_t next_bucket_ = 0;
  bool reducing_ = false;
};

/// Sums the squares of the whole model's gradient into `sum` (f64, zero before, on the device of the
/// parameters). Each logical parameter is counted once, by one of its replicas; the same bits on every rank.
/// Collective over the world. Call after GradReducer::finish().
void add_grad_squares(const std::vector<Parameter*>& parameters, const Mesh& mesh, const Tensor& sum);
/// The same as a number; waits for the device.
double global_grad_square_sum(const std::vector<Parameter*>& parameters, const Mesh& mesh);

}  // namespace shoal
