// What the host looks at while it waits for a device. Work of a device may never end because another rank has
// died; whoever put such work there adds a check, which every wait of this thread's host calls now and then.
#pragma once

#include <functional>
#include <memory>

namespace shoal {

/// `waited_s`: how long this wait has taken so far. May throw, which ends the wait.
using HostWaitCheck = std::function<void(double waited_s)>;

/// The check is called in waits of this thread for as long as the caller keeps the result.
[[nodiscard]] std::shared_ptr<HostWaitCheck> add_host_wait_check(HostWaitCheck check);
/// Whether there is a check: without one a wait need not look up.
bool has_host_wait_checks();
/// For implementations of waits.
void run_host_wait_checks(double waited_s);

}  // namespace shoal
