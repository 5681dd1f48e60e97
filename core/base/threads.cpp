#include "core/base/threads.h"

#include <unistd.h>

#include <memory>
#include <thread>
#include <vector>

#include "core/base/error.h"

namespace shoal {

namespace {

// Longer than most gaps between two operations of a step, and shorter than what a neighbour would notice.
constexpr int kSpins = 2000;
constexpr int kMaxThreads = (1 << 16) - 1;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// The threads of one rank. Each job has an epoch, which grows and tells its number of shares; share i
/// belongs to whoever raises taken_[i] to the epoch. Function and context stay valid until all shares have
/// ended, so for as long as one that was taken runs; a worker that wakes late finds all shares of its epoch
/// taken and touches neither.
class Team {
 public:
  explicit Team(int size) : size_(size), taken_(static_cast<size_t>(size)) {
    for (int i = 1; i < size; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    stop_.store(true, std::memory_order_relaxed);
    publish(0);
    // A forked process has none of the threads.
    for (std::thread& worker : workers_) getpid() == process_ ? worker.join() : worker.detach();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  int size() const { return size_; }

  void run(int shares, void (*share)(void*, int), void* context) {
    share_ = share;
    context_ = context;
    ended_.store(0, std::memory_order_relaxed);
    const uint64_t epoch = publish(shares);
    for (int i = 0; i < shares; i++) take(i, epoch);
    for (int spins = 0; ended_.load(std::memory_order_acquire) < shares; spins++)
      spins < kSpins ? relax() : std::this_thread::yield();
  }

 private:
  static constexpr uint64_t kMaxShares = kMaxThreads + 1;

  uint64_t publish(int shares) {
    const uint64_t job = epoch_.load(std::memory_order_relaxed) / kMaxShares + 1;
    const uint64_t epoch = job * kMaxShares + static_cast<uint64_t>(shares);
    epoch_.store(epoch, std::memory_order_seq_cst);
    bell_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) bell_.notify_all();
    return epoch;
  }

  /// A share that throws ends the process: unwinding would take the context away from the others.
  void take(int i, uint64_t epoch) noexcept {
    uint64_t taken = taken_[static_cast<size_t>(i)].load(std::memory_order_relaxed);
    if (taken >= epoch ||
        !taken_[static_cast<size_t>(i)].compare_exchange_strong(taken, epoch, std::memory_order_acq_rel))
      return;
    share_(context_, i);
    ended_.fetch_add(1, std::memory_order_release);
  }

  void work(int i) {
    uint64_t seen = 0;
    while (true) {
      for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen && spins < kSpins; spins++) relax();
      if (epoch_.load(std::memory_order_acquire) == seen) sleep(seen);
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      if (static_cast<uint64_t>(i) < seen % kMaxShares) take(i, seen);
    }
  }

  /// Until the epoch is no longer `seen`.
  void sleep(uint64_t seen) {
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    while (true) {
      const int32_t rung = bell_.load(std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) != seen) break;
      bell_.wait(rung, std::memory_order_seq_cst);
    }
    sleeping_.fetch_sub(1, std::memory_order_seq_cst);
  }

  const int size_;
  const pid_t process_ = getpid();
  void (*share_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::vector<std::atomic<uint64_t>> taken_;
  alignas(64) std::atomic<uint64_t> epoch_{0};
  std::atomic<int32_t> bell_{0};  // changes with the epoch; what sleepers wait for
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> ended_{0};
  std::vector<std::thread> workers_;
};

thread_local int team_size = 1;
thread_local bool inside = false;  // a body that runs in parallel
thread_local std::unique_ptr<Team> team;

}  // namespace

int num_threads() {
  return inside ? 1 : team_size;
}

void set_num_threads(int threads) {
  SHOAL_CHECK(threads >= 1 && threads <= kMaxThreads, "set_num_threads: expected 1 to ", kMaxThreads,
              ", got ", threads);
  team_size = threads;
}

void run_shares(int shares, void (*share)(void* context, int i), void* context) {
  if (!team || team->size() != team_size) {
    team.reset();
    team = std::make_unique<Team>(team_size);
  }
  inside = true;
  team->run(shares, share, context);
  inside = false;
}

}  // namespace shoal
