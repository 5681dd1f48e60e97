// A mutex that TSan does not see: one that it sees would order whatever code runs under it, and so hide races
// between streams or kernels that nothing else orders. For code compiled without -fsanitize=thread.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace shoal::emulator {

class QuietLock {
 public:
  void lock() {
    while (__atomic_exchange_n(&word_, 1U, __ATOMIC_ACQUIRE) != 0) sleep_while(word_, 1);
  }
  void unlock() {
    __atomic_store_n(&word_, 0U, __ATOMIC_RELEASE);
    wake(word_, 1);
  }
  /// Waits, unlocked, until notify_all is called.
  void wait() {
    const uint32_t seen = __atomic_load_n(&changes_, __ATOMIC_RELAXED);
    unlock();
    sleep_while(changes_, seen);
    lock();
  }
  /// To be called when locked.
  void notify_all() {
    __atomic_add_fetch(&changes_, 1U, __ATOMIC_RELAXED);
    wake(changes_, INT32_MAX);
  }

 private:
  static void sleep_while(uint32_t& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(uint32_t& word, int how_many) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, how_many, nullptr, nullptr, 0);
  }
  uint32_t word_ = 0, changes_ = 0;
};

}  // namespace shoal::emulator
