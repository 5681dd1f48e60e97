// Signals that ask for an orderly end: SIGTERM, SIGUSR1, SIGINT (Ctrl-C) and SIGHUP (a closed terminal). The
// handler sets a flag; the trainer looks at it once per step and saves, the preparation of data looks at it
// between batches and gives up.
#pragma once

#include <exception>

namespace shoal {

/// Before MPI starts, so that no signal finds the process without a handler. A repeated signal changes
/// nothing, so that it cannot destroy the save that the first one asked for; the third SIGINT ends the
/// process at once. A SIGHUP or SIGINT that is ignored (nohup, a background job of a script) stays ignored.
void install_stop_signals();
bool stop_signal_seen();

/// Thrown when a stop was asked for before there was anything to save.
class StopRequested : public std::exception {
 public:
  const char* what() const noexcept override { return "stopped on request"; }
};

}  // namespace shoal
