// How a rank waits for other ranks: it looks busily at first, then gives the core away between looks, says
// after a while for whom it waits, and gives up at a limit, so that a job with a hung rank ends with a word.
// Also: which process each rank is, for those messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace shoal {

/// What a rank waits for: "all_reduce [world, rank 0 of 2], call 7" and the ranks of the world that have not
/// answered.
struct WaitedFor {
  std::string call, missing;
};

/// One wait. Costs nothing until the first look has failed.
class Waiting {
 public:
  /// After every unsuccessful look. `describe` is called when there is something to say. Throws Error when
  /// the limit is reached.
  template <class Describe>
  void pause(const Describe& describe) {
    if (++turn_ % 64 == 0) long_pause(describe);
  }

 private:
  void long_pause(const std::function<WaitedFor()>& describe);
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
  int64_t turn_ = 0;
  bool warned_ = false;
};

/// Seconds a rank waits for the others in one call: SHOAL_COLLECTIVE_TIMEOUT, default 600; 0: for ever.
/// Throws UsageError when the variable is no such number.
double wait_limit_s();

/// Collective. Remembers host and process of every rank of the world.
void note_rank_processes(Communicator& world);
/// "rank 1 (process 4242 on node7, stopped)": for processes of this host with the state, if it says
/// something.
std::string describe_rank(int world_rank);

/// Ends the process when a step of MPI itself, which cannot be waited for in any other way, takes longer than
/// the limit. For start and end of a job.
class StepLimit {
 public:
  /// `step` as in "MPI_Init_thread"; a string literal.
  StepLimit(const char* step, int rank);
  ~StepLimit();
  StepLimit(const StepLimit&) = delete;
  StepLimit& operator=(const StepLimit&) = delete;

 private:
  struct Watch;
  std::unique_ptr<Watch> watch_;
};

}  // namespace shoal
