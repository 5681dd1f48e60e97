// Fibers of the emulator: a stack, and where its code stopped. One fiber runs at a time, on one OS thread.
// Under ASan and TSan every switch is announced; TSan (SHOAL_EMULATOR_TSAN) takes each fiber for a thread,
// and a switch orders nothing, so that code of two fibers is concurrent unless the emulator says otherwise.
#pragma once

#include <cstddef>

namespace shoal::emulator {

struct Fiber {
  static constexpr size_t kStackBytes = size_t{128} << 10;
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // null: the stack of the OS thread
  size_t stack_bytes = 0;
  void* asan_stack = nullptr;  // ASan's own stack of a fiber that will go on
  void* tsan = nullptr;        // TSan's thread
};

/// Makes the fiber of the running OS thread, from which others are started.
void adopt_thread(Fiber& fiber);
/// Makes `fiber` start with `entry`, which must not return, on a new or used stack. To TSan it is a new
/// thread.
void prepare(Fiber& fiber, void (*entry)());
/// Stops `from`, which is running, and goes on with `to`. ended: `from` will never go on.
void switch_fiber(Fiber& from, Fiber& to, bool ended);
/// To be called first thing on a new fiber.
void fiber_started();

/// What TSan is to know: a release of an address happens before a later acquire of it.
void order_release(void* address);
void order_acquire(void* address);
/// A release by `fiber`, which will never go on, while `running` runs.
void order_release_of(Fiber& fiber, Fiber& running, void* address);

/// A copy that goes on beside all threads: to TSan it is made by a thread of its own, `tsan` (started when
/// null), after what `running` did so far, and happens before an acquire of `done`. The bytes are not copied
/// here.
void unordered_copy(void*& tsan, Fiber& running, void* to, size_t bytes_to, const void* from,
                    size_t bytes_from, void* done);
void end_unordered(void*& tsan);
/// Copies bytes that TSan sees the running fiber read.
void read_seen(void* to, const void* from, size_t bytes);

/// What ASan is to know: memory that must not, or may again, be touched.
void forbid(const void* data, size_t bytes);
void allow(const void* data, size_t bytes);

/// New zeroed pages, of which the sanitizers have seen nothing.
char* map_pages(size_t bytes);
/// Makes pages, which were mapped so, new again. `bytes` is rounded up to whole pages.
void renew_pages(char* data, size_t bytes);

/// memcpy and memset that TSan does not see.
void copy_unseen(void* to, const void* from, size_t bytes);
void fill_unseen(void* to, unsigned char value, size_t bytes);

}  // namespace shoal::emulator
