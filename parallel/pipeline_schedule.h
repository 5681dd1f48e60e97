// Pipeline schedules as data: which rank runs which part of which micro-batch, in which order. A model is cut
// into num_ranks * virtual_stages stages; rank r has the stages r, r + num_ranks, ... Schedules: gpipe
// (arXiv:1811.06965), 1f1b (arXiv:2006.09503), interleaved (arXiv:2104.04473) and zero_bubble, the
// memory-neutral ZB-H1 of arXiv:2401.10241. Knows nothing of tensors; launch/pipeline.h carries schedules
// out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

struct PipelineAction {
  enum class Kind : uint8_t {
    forward,
    backward,         // both of the following
    backward_input,   // the gradient of the stage's input
    backward_weight,  // the gradients of its parameters
  };
  Kind kind = Kind::forward;
  int stage = 0, micro_batch = 0;
  bool operator==(const PipelineAction&) const = default;
  std::string text() const;  // "forward of micro-batch 2 by stage 1"
};

enum class PipelineKind : uint8_t { gpipe, one_f_one_b, interleaved, zero_bubble };
/// By its name in a config: "gpipe", "1f1b", "interleaved", "zero_bubble". Throws Error for others.
PipelineKind pipeline_kind(const std::string& name);

struct PipelineShape {
  int num_ranks = 1;       // p
  int virtual_stages = 1;  // v: stages of each rank; above 1 for interleaved alone
  int num_micro_batches = 1;
  int num_stages() const { return num_ranks * virtual_stages; }
  int rank_of(int stage) const { return stage % num_ranks; }
};

struct PipelineSchedule {
  PipelineShape shape;
  std::vector<std::vector<PipelineAction>> ranks;  // in the order in which each rank runs them
};

/// Throws Error when the kind cannot run that shape: interleaved wants whole groups of p micro-batches, the
/// others one stage per rank.
PipelineSchedule make_pipeline_schedule(PipelineKind kind, const PipelineShape& shape);
/// Forward passes alone, for evaluation.
PipelineSchedule make_forward_schedule(const PipelineShape& shape);

/// Time of each action in units that a user gives, all stages alike and messages free.
struct PipelineCosts {
  int64_t forward = 1, backward_input = 1, backward_weight = 1;
  int64_t of(PipelineAction::Kind kind) const;
};
/// When the actions of each rank begin and end if each begins as soon as its rank is free and its inputs are
/// there.
struct PipelineTimes {
  struct Span {
    int64_t begin = 0, end = 0;
  };
  std::vector<std::vector<Span>> ranks;
  int64_t total = 0;  // from the first begin to the last end
};
/// Throws Error naming the actions that wait when the ranks would wait for each other for ever, or when an
/// action needs something that no rank makes.
PipelineTimes time_schedule(const PipelineSchedule& schedule, const PipelineCosts& costs = {});

/// A tensor that one rank sends to another: the result of a stage's forward, or the gradient of a stage's
/// input.
struct PipelineTransfer {
  int from = 0, to = 0;
  PipelineAction made_by;  // forward, backward or backward_input
};
/// One action of a rank and the calls around it.
struct PipelineStep {
  PipelineAction action;
  std::vector<PipelineTransfer> receives;  // started before the action
  std::vector<PipelineTransfer> sends;     // started behind it; at most one
};
/// The steps of a rank. The transfers of all ranks have one total order, that of their ends in
/// time_schedule(), and each rank starts its own in that order: even if every start waited for the other
/// rank's start, no ranks would wait for each other in a circle. Receives start as early as that permits.
std::vector<PipelineStep> pipeline_steps(const PipelineSchedule& schedule, int rank);

}  // namespace shoal
