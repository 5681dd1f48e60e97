// Progress as JSON, and stop signals.
#include <atomic>
#include <csignal>

#include <nlohmann/json.hpp>

#include "launch/trainer.h"

namespace shoal {

std::string Progress::to_json() const {
  return nlohmann::json{{"step", step},
                        {"tokens", tokens},
                        {"samples", samples},
                        {"skipped", skipped},
                        {"optimizer_steps", optimizer_steps},
                        {"data_fingerprint", data_fingerprint}}
      .dump(2);
}

Progress Progress::from_json(const std::string& json) {
  try {
    const nlohmann::json j = nlohmann::json::parse(json);
    Progress p;
    p.step = j.at("step");
    p.tokens = j.at("tokens");
    p.samples = j.at("samples");
    p.skipped = j.at("skipped");
    p.optimizer_steps = j.at("optimizer_steps");
    p.data_fingerprint = j.at("data_fingerprint");
    return p;
  } catch (const nlohmann::json::exception& e) {
    throw Error(str("checkpoint state: expected the progress of a training run, got something else (",
                    e.what(), ")"));
  }
}

namespace {
// Lock-free, so fit for a handler; a sig_atomic_t would race, because any thread may run the handler.
std::atomic<bool> stop_signal = false;
static_assert(std::atomic<bool>::is_always_lock_free);
void on_stop_signal(int) {
  stop_signal = true;
}
}  // namespace

void install_stop_signals() {
  struct sigaction action {};
  action.sa_handler = on_stop_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);
  action.sa_flags |= static_cast<int>(SA_RESETHAND);  // a second Ctrl-C does not wait for the step
  sigaction(SIGINT, &action, nullptr);
}

bool stop_signal_seen() {
  return stop_signal;
}

}  // namespace shoal
