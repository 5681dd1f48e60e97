// How the ranks of a checkpoint operation stay together: a failure on one rank becomes the same message on
// all, and no rank leaves the sequence of collectives. Used by the checkpoint writer and reader.
#pragma once

#include <functional>
#include <string>

#include "core/base/error.h"
#include "parallel/communicator.h"

namespace shoal {

/// Runs work; "" or the message of what it threw.
std::string message_of(const std::function<void()>& work);

/// Collective. "" when no rank has a problem, else "rank 1: disk full; ranks 2, 3: ..." on every rank.
std::string agree_on_problems(Communicator& world, const std::string& problem);

/// Collective. Runs work on rank 0 and returns its result on every rank; what it throws is thrown as Error
/// with the same message on every rank.
std::string run_on_first(Communicator& world, const std::function<std::string()>& work);

}  // namespace shoal
