#include "launch/stop_signals.h"

#include <atomic>
#include <csignal>

namespace shoal {

namespace {

constexpr int kPatientInterrupts = 2;

// Lock-free, so fit for a handler; a sig_atomic_t would race, because any thread may run the handler.
std::atomic<bool> stop_signal = false;
std::atomic<int> num_interrupts = 0;
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

void on_stop_signal(int number) {
  stop_signal = true;
  if (number != SIGINT || ++num_interrupts <= kPatientInterrupts) return;
  std::signal(SIGINT, SIG_DFL);
  std::raise(SIGINT);  // takes effect when the handler returns
}

}  // namespace

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGTERM, SIGUSR1, SIGINT, SIGHUP}) {
    struct sigaction before {};
    sigaction(number, nullptr, &before);
    if ((number == SIGINT || number == SIGHUP) && before.sa_handler == SIG_IGN) continue;
    sigaction(number, &action, nullptr);
  }
}

bool stop_signal_seen() {
  return stop_signal;
}

}  // namespace shoal
