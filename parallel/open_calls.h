// The collective calls of this thread that are in flight, whatever moves their bytes. Waiting for one moves
// all of them, because the rank that this one waits for may itself be waiting for another.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/autograd/pending.h"

namespace shoal {

/// Something that moves on when it is looked at: a call over MPI, or all calls of a group in shared memory.
class OpenCalls {
 public:
  virtual ~OpenCalls() = default;
  /// Moves on as far as possible without blocking.
  virtual void progress() = 0;
  /// Calls that are not finished.
  virtual size_t num_open() const = 0;
};

/// One call, as seen by who waits for it.
class AwaitedCall {
 public:
  virtual ~AwaitedCall() = default;
  virtual bool done() const = 0;
  virtual std::string text() const = 0;     // "all_reduce(sum, f32, 4 elements) [world, rank 0 of 2], call 7"
  virtual std::string missing() const = 0;  // ranks that have not answered, as describe_rank() names them
};

/// Keeps `calls` and moves them on until none of them is open. Adding them again does nothing.
void add_open_calls(const std::shared_ptr<OpenCalls>& calls);
void progress_open_calls();
/// Calls of this thread that have been started and not finished.
size_t num_open_calls();

/// Waiting for `call`, which must be among the open calls or done.
Work work_for(std::shared_ptr<AwaitedCall> call);

/// Ranks a, b, ... in the form of AwaitedCall::missing().
class MissingRanks {
 public:
  void add(int world_rank);
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

}  // namespace shoal
