// PipelineLinks: messages between neighbouring pipeline ranks. Each pair has two groups of two ranks, one per
// direction, in which a broadcast by the sender is a message.
#pragma once

#include <map>
#include <memory>

#include "parallel/communicator.h"

namespace shoal {

class PipelineLinks {
 public:
  /// `ranks`: of one pipeline. ring: the last rank and the first are neighbours too. Collective over it.
  PipelineLinks(Communicator& ranks, bool ring);

  // Both return at once; the tensor belongs to the call until its Work has been waited for. Messages of one
  // direction arrive in the order in which they were sent, with the shape and dtype that the receiver
  // expects.
  Work send(const Tensor& message, int to) const;
  Work receive(const Tensor& message, int from) const;
  /// What such calls send.
  void count_send(int64_t bytes, int to) const { to_.at(to)->traffic().broadcast(bytes, 0); }
  void count_receive(int64_t bytes, int from) const { from_.at(from)->traffic().broadcast(bytes, 0); }

 private:
  std::map<int, std::shared_ptr<Communicator>> to_, from_;  // by the neighbour's rank
};

}  // namespace shoal
