#include "launch/checkpoint.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "core/base/log.h"
#include "launch/checkpoint_agreement.h"
#include "launch/checkpoint_folder.h"

namespace shoal {

namespace {

// A decimal number up to 9999999; empty for anything else.
std::optional<int> parse_count(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && value >= 0 && value < 10000000 ? std::optional(value) : std::nullopt;
}

struct FailpointRequest {
  std::string point, action;
  std::optional<int> rank;
  int delay_ms = 0;
};

// "<point>[@<rank>]:kill | exit | error | delay:<ms>"; empty when it is not of this form.
std::optional<FailpointRequest> parse_failpoint(std::string_view text) {
  FailpointRequest request;
  const size_t colon = text.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  std::string_view point = text.substr(0, colon), action = text.substr(colon + 1);
  if (const size_t at = point.find('@'); at != std::string_view::npos) {
    request.rank = parse_count(point.substr(at + 1));
    if (!request.rank) return std::nullopt;
    point = point.substr(0, at);
  }
  const auto is_point_char = [](char c) { return (c >= 'a' && c <= 'z') || c == '-'; };
  if (point != "*" && (point.empty() || !std::all_of(point.begin(), point.end(), is_point_char)))
    return std::nullopt;
  if (action.starts_with("delay:")) {
    const auto delay = parse_count(action.substr(6));
    if (!delay) return std::nullopt;
    request.delay_ms = *delay;
  } else if (action != "kill" && action != "exit" && action != "error") {
    return std::nullopt;
  }
  request.point = point;
  request.action = action;
  return request;
}

Failpoint failpoint_from_environment(int rank) {
  const char* value = std::getenv("SHOAL_CHECKPOINT_FAILPOINT");
  if (value == nullptr || *value == '\0') return {};
  const auto request = parse_failpoint(value);
  if (!request)
    throw UsageError(
        str("SHOAL_CHECKPOINT_FAILPOINT: expected <point>[@<rank>]:kill | exit | error | delay:<ms>, "
            "got '",
            value, "'; the points are listed in docs/checkpoints.md"));
  if (request->rank && *request->rank != rank) return {};
  return [request = *request](const std::string& point) {
    if (point != request.point && request.point != "*") return;
    log::debug("failpoint ", point, ": ", request.action);
    if (request.action == "kill") std::raise(SIGKILL);
    if (request.action == "exit") std::_Exit(0);
    if (request.action == "error")
      throw Error("failpoint " + point + ": error asked for by SHOAL_CHECKPOINT_FAILPOINT");
    std::this_thread::sleep_for(std::chrono::milliseconds(request.delay_ms));
  };
}

}  // namespace

CheckpointStore::CheckpointStore(CheckpointOptions options, Communicator& world)
    : options_(std::move(options)), world_(world) {
  const std::string problem =
      agree_on_problems(world, message_of([&] { failpoint_ = failpoint_from_environment(world.rank()); }));
  if (!problem.empty()) throw UsageError(problem);
  if (options_.read_only) return;
  run_on_first(world, [&] {
    remove_temporaries(options_.folder);
    return std::string();
  });
}

}  // namespace shoal
