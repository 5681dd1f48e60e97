#include "launch/checkpoint_agreement.h"

#include <map>
#include <vector>

#include "core/base/text.h"

namespace shoal {

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    const std::string message = error.what();
    return message.empty() ? "unknown failure" : message;
  }
  return "";
}

std::string agree_on_problems(Communicator& world, const std::string& problem) {
  if (world.all_true(problem.empty())) return "";
  const std::vector<std::string> problems = world.gather_strings(problem);
  std::vector<std::string> order;
  std::map<std::string, std::vector<std::string>> ranks;
  for (size_t r = 0; r < problems.size(); r++) {
    if (problems[r].empty()) continue;
    if (ranks[problems[r]].empty()) order.push_back(problems[r]);
    ranks[problems[r]].push_back(std::to_string(r));
  }
  std::vector<std::string> parts;
  for (const std::string& text : order)
    parts.push_back(str(ranks[text].size() > 1 ? "ranks " : "rank ", join(ranks[text], ", "), ": ", text));
  return join(parts, "; ");
}

std::string run_on_first(Communicator& world, const std::function<std::string()>& work) {
  std::string result;
  if (world.rank() == 0) {
    const std::string problem = message_of([&] { result = "+" + work(); });
    if (!problem.empty()) result = "-" + problem;
  }
  result = world.broadcast_string(result, 0);
  if (result.at(0) == '-') throw Error(result.substr(1));
  return result.substr(1);
}

}  // namespace shoal
