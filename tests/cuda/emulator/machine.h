// The emulated machine: runs the grids of kernels on one OS thread, a fiber per CUDA thread, in a chosen
// order. Tests set options(); emulated_cuda.h, which kernels see, calls the rest.
//
// What makes a launch throw Error: a barrier that not all threads of a block reach, or that they reach at
// different lines; lanes missing from a warp function or reading lanes outside its mask; threads that wait
// for ever; sizes beyond the limits of the hardware; a store past the end of shared or global memory (a store
// of other bytes than the guard holds: under ASan every access); a matrix or an asynchronous copy that is not
// aligned or not in shared memory; an asynchronous copy that no wait waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shoal::emulator {

enum class Order : uint8_t { fifo, lifo, random };
struct Options {
  Order order = Order::fifo;
  uint64_t seed = 1;        // of Order::random
  int resident_blocks = 2;  // blocks of a grid that run at once
  int preempt_percent = 0;  // chance that an atomic first lets another thread run
  std::string skip;         // the barrier "kernel file:line" that does nothing (see Barrier)
};
Options& options();

/// A barrier as a kernel executed it. name(): "kernel file:line".
struct Barrier {
  const char *kernel = nullptr, *file = nullptr;
  int line = 0;
  std::string name() const;
};
/// All barriers executed so far, each once.
std::vector<Barrier> barriers_seen();

struct Counts {
  uint64_t launches = 0, blocks = 0, threads = 0, barriers = 0, warp_functions = 0;
};
/// Work done so far by this process.
const Counts& counts();

/// Races that TSan has reported so far; always 0 in other builds.
int races();

struct Index3 {
  unsigned x = 1, y = 1, z = 1;
};
struct Site {
  const char* file;
  int line;
};

/// Runs body once for each thread of the grid. Throws Error.
void run_grid(const char* kernel, Index3 grid, Index3 block, size_t shared_bytes,
              const std::function<void()>& body);

// For code of kernels, that is, within run_grid:

Index3 thread_index();
Index3 block_index();
Index3 block_size();
Index3 grid_size();
unsigned lane();

struct Votes {
  int count = 0;  // threads whose predicate is true
  bool all = true, any = false;
};
/// Waits for all threads of the block.
Votes block_barrier(bool predicate, Site site);

/// Waits for the lanes of `mask`, gives each the values of all: `bytes` (at most 8) per lane from `in`, 32 of
/// them to `all`, or those of `wanted` lanes. orders_memory: what a lane wrote before is seen by the others
/// after, and it is a Barrier.
void warp_exchange(unsigned mask, const void* in, void* all, size_t bytes, bool orders_memory,
                   const char* function, Site site, unsigned wanted = ~0U);

/// Waits for all 32 lanes. The last one calls work(pointers), where pointer i is what lane i gave as `mine`.
void warp_together(void* mine, void (*work)(void* const* lanes), const char* function, Site site);

/// cp.async, its groups, and the wait for all but the last `may_pend` groups (see ptx.h). A wait is a
/// Barrier.
void start_copy(void* shared, const void* global, size_t bytes, Site site);
void commit_copies();
void wait_copies(unsigned may_pend, Site site);

/// Memory of the block for the variable `key`; filled with 0xFF when the block starts, which is NaN.
void* shared_variable(const void* key, size_t bytes, const char* name);
/// The shared memory whose size the launch said.
void* dynamic_shared();

/// May let another thread run.
void before_atomic();

/// Ends the kernel; run_grid throws the message, with kernel, block and thread.
[[noreturn]] void fault(const std::string& message);

/// Checks that guards around device memory are whole: called after each launch. Returns what is wrong, or "".
using MemoryCheck = std::string (*)();
void set_memory_check(MemoryCheck check);

}  // namespace shoal::emulator
