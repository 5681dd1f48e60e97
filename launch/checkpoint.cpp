#include "launch/checkpoint.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <regex>
#include <thread>

#include "launch/checkpoint_agreement.h"
#include "launch/checkpoint_folder.h"

namespace shoal {

namespace {

// SHOAL_CHECKPOINT_FAILPOINT="<point>[@<rank>]:kill | error | delay:<ms>"
Failpoint failpoint_from_environment(int rank) {
  const char* value = std::getenv("SHOAL_CHECKPOINT_FAILPOINT");
  if (value == nullptr || *value == '\0') return {};
  static const std::regex form("([a-z-]+)(?:@([0-9]{1,6}))?:(?:(kill|error)|delay:([0-9]{1,7}))");
  std::cmatch match;
  if (!std::regex_match(value, match, form))
    throw UsageError(
        str("SHOAL_CHECKPOINT_FAILPOINT: expected <point>[@<rank>]:kill | error | delay:<ms>, got '", value,
            "'; the points are listed in docs/checkpoints.md"));
  if (match[2].matched && std::stoi(match[2]) != rank) return {};
  const std::string wanted = match[1], action = match[3];
  const auto delay = std::chrono::milliseconds(match[4].matched ? std::stoi(match[4]) : 0);
  return [wanted, action, delay](const std::string& point) {
    if (point != wanted) return;
    if (action == "kill") std::raise(SIGKILL);
    if (action == "error")
      throw Error("failpoint " + point + ": error asked for by SHOAL_CHECKPOINT_FAILPOINT");
    std::this_thread::sleep_for(delay);
  };
}

}  // namespace

CheckpointStore::CheckpointStore(CheckpointOptions options, Communicator& world)
    : options_(std::move(options)), world_(world) {
  const std::string problem =
      agree_on_problems(world, message_of([&] { failpoint_ = failpoint_from_environment(world.rank()); }));
  if (!problem.empty()) throw UsageError(problem);
  run_on_first(world, [&] {
    remove_temporaries(options_.folder);
    return std::string();
  });
}

}  // namespace shoal
