// Threads inside one rank. A rank is one OS thread (or process) with a team of `num_threads()` workers,
// itself included. Nobody waits for a worker that has not begun: when the machine is busy elsewhere, the
// rank's own thread does that worker's share, so a team is never much slower than one thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace shoal {

/// Size of this rank's team (thread-local: ranks may be threads of one process). Default 1; always 1 inside a
/// body that runs in parallel.
int num_threads();
void set_num_threads(int threads);

/// Calls share(context, i) once for each i in [0, shares), 1 <= shares <= num_threads(), as far as possible
/// share i on worker i every time, and returns when all have ended.
void run_shares(int shares, void (*share)(void* context, int i), void* context);
/// The same with a function object.
template <class Share>
void run_shares(int shares, const Share& share) {
  run_shares(
      shares, [](void* context, int i) { (*static_cast<const Share*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&share)));
}

/// Calls body(begin, end) on disjoint ranges that cover [0, n), in parallel when n >= 2 * grain and the team
/// has more than one thread. The split depends only on n, grain and the team size. body must not throw.
template <class Body>
void parallel_for(int64_t n, int64_t grain, const Body& body) {
  const int64_t wanted = grain > 0 ? n / grain : n;
  const int threads = static_cast<int>(wanted < num_threads() ? wanted : num_threads());
  if (threads <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  run_shares(threads, [&](int i) { body(n * i / threads, n * (i + 1) / threads); });
}

/// Calls body(task) for each task in [0, num_tasks), handed out one at a time (for uneven tasks).
template <class Body>
void parallel_tasks(int64_t num_tasks, const Body& body) {
  const int threads = static_cast<int>(num_tasks < num_threads() ? num_tasks : num_threads());
  if (threads <= 1) {
    for (int64_t task = 0; task < num_tasks; task++) body(task);
    return;
  }
  std::atomic<int64_t> next{0};
  run_shares(threads, [&](int) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) body(task);
  });
}

}  // namespace shoal
