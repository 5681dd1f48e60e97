// Pipeline: carries pipeline schedules out: runs the stages of this rank on the micro-batches of a step, and
// moves what goes between stages. The engine is its only user. Without stages it is a plain loop over
// micro-batches.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "core/autograd/tape.h"
#include "models/model.h"
#include "parallel/grad_bucket.h"
#include "parallel/pipeline_links.h"
#include "parallel/pipeline_schedule.h"

namespace shoal {

class Pipeline {
 public:
  /// All must outlive it. Collective.
  Pipeline(Model& model, const Mesh& mesh, GradReducer& reducer);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Called with the losses of each forward pass.
  using OnTerms = std::function<void(const LossTerms& terms)>;
  /// Forward and backward of all micro-batches; gradients add up in the parameters. Tells the reducer what it
  /// must know; its finish() is left to the caller. Every rank of a pipeline passes micro-batches of the same
  /// shapes; those of another replica may be others, as many. Collective.
  void train(std::span<const ModelBatch> micro_batches, const ForwardContext& context,
             const OnTerms& on_terms);
  /// Forward alone, without gradients. Collective.
  void forward(std::span<const ModelBatch> micro_batches, const ForwardContext& context,
               const OnTerms& on_terms);

 private:
  struct Pass;      // what a call has under way
  struct Message;   // one that is on its way to this rank
  struct OpenUses;  // of parameters, by one micro-batch

  PipelineShape shape(size_t num_micro_batches) const;
  void run(const std::vector<PipelineStep>& steps, Pass& pass);
  void start_receives(const PipelineStep& step, Pass& pass);
  Tensor received(PipelineAction::Kind kind, int stage, int micro_batch, Pass& pass);
  void send(const PipelineStep& step, const Tensor& message, Pass& pass);
  Tensor run_forward(const PipelineAction& action, Pass& pass);
  Tensor run_backward(const PipelineAction& action, Pass& pass);
  void run_weights(const PipelineAction& action, Pass& pass);
  Tensor run_action(const PipelineAction& action, Pass& pass);

  Model& model_;
  const Mesh& mesh_;
  GradReducer& reducer_;
  std::vector<Parameter*> parameters_;
  PipelineLinks links_;
  std::map<size_t, std::vector<PipelineStep>> train_steps_, forward_steps_;  // by the number of micro-batches
};

}  // namespace shoal
