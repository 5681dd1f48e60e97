// Threads inside one rank. A rank is one OS thread (or process) with a team of `num_threads()` OpenMP
// workers.
#pragma once

#include <cstdint>
#include <utility>

namespace shoal {

/// Size of this rank's team (thread-local: ranks may be threads of one process). Default 1.
int num_threads();
void set_num_threads(int threads);

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
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int t = 0; t < threads; t++) {
    const int64_t begin = n * t / threads, end = n * (t + 1) / threads;
    body(begin, end);
  }
}

/// Calls body(task) for each task in [0, num_tasks), handed out one at a time (for uneven tasks).
template <class Body>
void parallel_tasks(int64_t num_tasks, const Body& body) {
  const int threads = static_cast<int>(num_tasks < num_threads() ? num_tasks : num_threads());
  if (threads <= 1) {
    for (int64_t task = 0; task < num_tasks; task++) body(task);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t task = 0; task < num_tasks; task++) body(task);
}

}  // namespace shoal
