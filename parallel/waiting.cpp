#include "parallel/waiting.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "core/base/log.h"

namespace shoal {

namespace {

constexpr double kDefaultLimit = 600;  // seconds
constexpr double kPatience = 60;       // seconds; then a warning says who waits for whom
constexpr auto kBusyTime = std::chrono::milliseconds(20);

struct RankProcess {
  std::string host;
  int process = 0;
};
std::vector<RankProcess>& rank_processes() {
  static auto* processes = new std::vector<RankProcess>;
  return *processes;
}

std::string host_name() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// ", stopped" and the like; "" for a process that runs or sleeps.
std::string state_text(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t after_name = stat.rfind(") ");
  if (after_name == std::string::npos) return ", gone";
  switch (stat[after_name + 2]) {
    case 'T':
    case 't':
      return ", stopped";
    case 'Z':
    case 'X':
      return ", gone";
    case 'D':
      return ", waiting for a device or a file system";
    case 'R':
      return ", computing";
    default:
      return "";
  }
}

constexpr const char* kAdvice =
    "a rank is stopped, hung or much slower than the others; SHOAL_COLLECTIVE_TIMEOUT sets the limit in "
    "seconds, 0 is none";

}  // namespace

double wait_limit_s() {
  static const double limit = [] {
    const char* text = std::getenv("SHOAL_COLLECTIVE_TIMEOUT");
    if (text == nullptr || *text == '\0') return kDefaultLimit;
    double value = 0;
    const char* end = text + std::strlen(text);
    const auto [last, error] = std::from_chars(text, end, value);
    if (error != std::errc() || last != end || !(value >= 0 && value <= 1e9))
      throw UsageError(str("SHOAL_COLLECTIVE_TIMEOUT: expected seconds from 0 (no limit) to 1e9, got '", text,
                           "'; the default is ", kDefaultLimit));
    return value;
  }();
  return limit;
}

void Waiting::long_pause(const std::function<WaitedFor()>& describe) {
  const auto waited = Clock::now() - begin_;
  if (waited < kBusyTime) {
    sched_yield();
    return;
  }
  // A long wait (another rank reads data or saves): do not burn a core.
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  const double seconds = std::chrono::duration<double>(waited).count(), limit = wait_limit_s();
  if (limit > 0 && seconds > limit) {
    const WaitedFor what = describe();
    throw Error(
        str("waited ", limit, " s in ", what.call, " for ", what.missing, ", and gave up: ", kAdvice));
  }
  // Well before the limit, so that every waiting rank has said so when the first one ends the job.
  if (!warned_ && seconds > (limit > 0 ? std::min(kPatience, limit / 2) : kPatience)) {
    warned_ = true;
    const WaitedFor what = describe();
    log::warn("waiting in ", what.call, " for ", what.missing);
  }
}

void note_rank_processes(Communicator& world) {
  const std::vector<std::string> texts = world.gather_strings(str(getpid(), ' ', host_name()));
  std::vector<RankProcess> processes(texts.size());
  for (size_t r = 0; r < texts.size(); r++) {
    std::istringstream in(texts[r]);
    in >> processes[r].process >> processes[r].host;
  }
  rank_processes() = processes;
}

std::string describe_rank(int world_rank) {
  const auto& processes = rank_processes();
  if (world_rank < 0 || world_rank >= std::ssize(processes)) return str("rank ", world_rank);
  const RankProcess& known = processes[static_cast<size_t>(world_rank)];
  return str("rank ", world_rank, " (process ", known.process, " on ", known.host,
             known.host == host_name() ? state_text(known.process) : "", ")");
}

struct StepLimit::Watch {
  std::mutex mutex;
  std::condition_variable changed;
  bool over = false;
  std::thread thread;
};

StepLimit::StepLimit(const char* step, int rank) {
  const double limit = wait_limit_s();
  if (limit <= 0) return;
  watch_ = std::make_unique<Watch>();
  watch_->thread = std::thread([watch = watch_.get(), step, rank, limit] {
    std::unique_lock lock(watch->mutex);
    const auto seconds = std::chrono::duration<double>(limit);
    if (watch->changed.wait_for(lock, seconds, [&] { return watch->over; })) return;
    std::fprintf(stderr, "[rank %d] error: waited %g s in %s, and gave up: %s\n", rank, limit, step, kAdvice);
    std::fflush(stderr);
    ::_exit(static_cast<int>(ExitCode::failure));
  });
}

StepLimit::~StepLimit() {
  if (!watch_) return;
  {
    const std::lock_guard lock(watch_->mutex);
    watch_->over = true;
  }
  watch_->changed.notify_one();
  watch_->thread.join();
}

}  // namespace shoal
