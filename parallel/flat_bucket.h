// FlatBucket: parameters with the same replicas, whose gradients lie in one flat buffer and are reduced
// together. Where replicas share the work of the optimizer (ZeRO, arXiv:1910.02054), the buffer is cut into
// as many equal pieces as there are replicas, whatever parameters they hold: a replica gets the sum of its
// piece, updates those values, and all gather them. GradReducer (parallel/grad_bucket.h) owns all buckets;
// WeightGather (parallel/weight_gather.h) says when values are gathered.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/nn/parameter.h"
#include "core/nn/weight_unit.h"
#include "parallel/mesh.h"

namespace shoal {

/// What replicas do not hold in full, as in the paper: each stage adds to the one before.
enum class ZeroStage : uint8_t { none, optimizer_state, gradients, parameters };

class FlatBucket {
 public:
  /// Buckets are filled in reverse parameter order (the order of backward), at most `bucket_bytes` unless one
  /// parameter is larger, and ordered by their last parameters. They hold the same parameters on all ranks.
  /// Where gradients are divided, each has parameters of one pipeline stage, and norms and biases have their
  /// own (they are ready late, and small); where values are divided too, each has parameters of one unit.
  /// With a stage every held parameter must be in a held unit. Memory comes with allocate().
  static std::vector<std::unique_ptr<FlatBucket>> make_all(const std::vector<Parameter*>& parameters,
                                                           const std::vector<WeightUnit*>& units,
                                                           const Mesh& mesh, int64_t bucket_bytes,
                                                           ZeroStage stage);
  /// `ends`: null, or pipeline stages that both hold the parameters: a second group to sum over.
  FlatBucket(Communicator& group, Communicator* ends, DType dtype, Device device)
      : group_(group), ends_(ends), dtype_(dtype), device_(device) {}
  /// Gives the parameters gradients, and with a stage pieces and values in one flat buffer. Collective over
  /// the replicas: buffers are allocated where they can reach them. To be called once. `exact`: gradients are
  /// exact sums (core/autograd/exact_sum.h) until finish().
  void allocate(ZeroStage stage, bool exact = false);

  /// The sizes that allocate() gives it, for a look at what is never allocated.
  void set_stage(ZeroStage stage, bool exact = false);
  /// Of gradients that are kept from one backward to the next.
  int64_t gradient_bytes() const;
  /// Elements of parameters that this rank keeps, and that it updates.
  int64_t num_held() const;
  int64_t num_updated() const;
  int64_t num_updated(size_t i) const;  // of parameters()[i]
  /// What start_reduction() and start_gather() send, counted without a call.
  void count_reduction() const;
  void count_gather() const;
  /// The same of finish() and, of values that are not divided, of the gather after an update.
  void count_end() const;

  const std::vector<Parameter*>& parameters() const { return parameters_; }
  /// The pipeline stage that uses them; 0 unless gradients are divided.
  int pipeline_stage() const { return pipeline_stage_; }
  /// Bytes of gradients that replicas sum; 0 without replicas.
  int64_t reduced_bytes() const;
  /// Gradients exist in full only until they are reduced.
  bool is_transient() const { return is_transient_; }
  /// Values exist in full only between start_gather() and drop_values().
  bool divides_values() const { return divides_values_; }
  bool is_cut() const { return piece_elements_ > 0; }
  /// The sum of some backward of this step is there.
  bool has_sum() const { return has_sum_; }

  /// The sums of a step begin: all gradients are zero.
  void zero();
  /// Gradients of unused parameters are zeros. Collective over the replicas, like complete().
  void start_reduction();
  /// Moves a reduction forward; true when complete() would not block.
  bool test() { return work_.test() && low_work_.test(); }
  void complete();
  /// After complete() of all buckets: sums over `ends`, and gives exact sums their values. Collective over
  /// `ends`.
  void finish();
  /// Every replica gets the values that others have updated; nothing reads them before complete_gather().
  /// Collective over the replicas; nothing where there are no pieces.
  void start_gather();
  bool test_gather() { return gather_.test(); }
  void complete_gather() { gather_.wait(); }
  /// Of divided values: only the pieces stay.
  void drop_values();

 private:
  /// What parameters of one bucket have in common besides their replicas.
  struct Place {
    int pipeline_stage = 0;
    int unit = -1;  // whose values are divided; -1: values are not
    bool is_small = false;
    bool operator==(const Place&) const = default;
  };
  static Place place_of(const Parameter& p, const std::vector<WeightUnit*>& units, ZeroStage stage);
  void add(Parameter* p, int64_t largest_bytes);
  ShardRange own_part(size_t i) const;
  void cut_into_pieces();
  void make_exact_sums();
  std::vector<int64_t> summed_bytes(int64_t elements) const;
  void set_gradients() const;
  void open();
  void close();
  void reduce_exact_sums();

  Communicator& group_;
  Communicator* ends_;
  DType dtype_;
  Device device_;
  std::vector<Parameter*> parameters_;
  std::vector<int64_t> offsets_;                  // of each parameter, in elements
  int64_t num_elements_ = 0, largest_bytes_ = 0;  // of this rank's, of any rank's
  int64_t piece_elements_ = 0;                    // 0: not cut
  int pipeline_stage_ = 0;
  bool is_cut_ = false, is_transient_ = false, divides_values_ = false;
  bool is_exact_ = false;
  bool has_sum_ = false;       // piece_ holds the sum of earlier micro-batches
  Tensor gradients_, values_;  // flat; values_: of a cut bucket
  Tensor value_piece_;         // of values_: a part of them, or all that stays
  Tensor piece_, addend_;      // of the gradient; what is added to it
  ExactSum sums_, own_sums_;   // of gradients_, and of what this rank updates
  Work work_, low_work_, gather_;
};

}  // namespace shoal
