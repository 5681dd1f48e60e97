#include "core/tensor/host_wait.h"

#include <utility>
#include <vector>

namespace shoal {

namespace {

/// Ranks may be threads, and each has its own.
std::vector<std::weak_ptr<HostWaitCheck>>& checks() {
  thread_local std::vector<std::weak_ptr<HostWaitCheck>> mine;
  return mine;
}

}  // namespace

std::shared_ptr<HostWaitCheck> add_host_wait_check(HostWaitCheck check) {
  auto kept = std::make_shared<HostWaitCheck>(std::move(check));
  checks().push_back(kept);
  return kept;
}

bool has_host_wait_checks() {
  std::erase_if(checks(), [](const auto& check) { return check.expired(); });
  return !checks().empty();
}

void run_host_wait_checks(double waited_s) {
  if (!has_host_wait_checks()) return;
  const std::vector<std::weak_ptr<HostWaitCheck>> now = checks();  // a check may end others
  for (const auto& each : now) {
    if (const auto check = each.lock()) (*check)(waited_s);
  }
}

}  // namespace shoal
