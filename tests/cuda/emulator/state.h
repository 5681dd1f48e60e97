// What the parts of the emulator share. Nothing here is for tests or kernels.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "tests/cuda/emulator/fiber.h"
#include "tests/cuda/emulator/machine.h"

namespace shoal::emulator {

constexpr unsigned kLanes = 32, kMaxThreads = 1024;
constexpr size_t kStaticShared = size_t{48} << 10, kShared = size_t{227} << 10;  // of sm_90
constexpr size_t kArena = size_t{384} << 10;  // of a block: shared memory and guards around each variable
constexpr size_t kGuard = 128;                // bytes; keeps variables aligned like dynamic shared memory
constexpr unsigned char kPoison = 0xFF;

struct Block;
struct Warp;

/// 16 bytes on their way to shared memory: `bytes` of `from`, then zeros.
struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
  uint64_t group;
};
struct AsyncCopies {
  std::array<AsyncCopy, 256> pending;
  size_t num_pending = 0;
  uint64_t group = 0;   // that is open: committed groups so far
  uint64_t waited = 0;  // groups before it are known to be done
  uint64_t needed = 0;  // groups before it hold all copies
  Site site{};          // of the last copy
  void* tsan = nullptr;
  std::array<char, 8> done{};  // of groups in turn, for TSan
};

struct Thread {
  Fiber fiber;
  AsyncCopies copies;
  Block* block = nullptr;
  Warp* warp = nullptr;
  Index3 index;
  unsigned linear = 0, lane = 0;
  bool ended = true;
  const char* waits_in = nullptr;  // null: ready or running
  Site waits_at{};
  Votes votes;
};

/// Lanes that met in a warp function.
struct WarpMeeting {
  bool used = false, complete = false;
  unsigned mask = 0, arrived = 0, left = 0;
  const char* function = nullptr;
  Site site{};
  alignas(8) std::array<std::array<unsigned char, 8>, kLanes> values;
};
struct Warp {
  static constexpr size_t kMeetings = 8;  // of disjoint masks, or complete and not yet left by all
  std::array<Thread*, kLanes> lanes{};
  std::array<WarpMeeting, kMeetings> meetings;
  unsigned ended = 0;  // lanes
};

struct SharedVariable {
  const void* key;
  size_t offset, bytes;
  const char* name;
};
struct Block {
  Index3 index;
  unsigned running = 0, size = 0;
  std::vector<std::unique_ptr<Thread>> threads;  // more than size when an earlier launch had larger blocks
  std::vector<Warp> warps;
  // The barrier: who waits, where, and how they voted. Two addresses for TSan, used in turn.
  std::vector<Thread*> waiting;
  Site barrier_site{};
  Votes votes;
  unsigned phase = 0;
  std::array<char, 2> barrier_order{};
  // Shared memory.
  char* arena = nullptr;
  std::vector<SharedVariable> variables;
  size_t used = 0, static_bytes = 0, dynamic_offset = 0;
  char start_order = 0;
};

/// The launch that is running.
struct Launch {
  const char* kernel = nullptr;
  Index3 grid, block;
  size_t shared_bytes = 0;
  const std::function<void()>* body = nullptr;
  std::string fault;  // why it ended early
  char start_order = 0, end_order = 0;
};

struct State {
  Options options;
  Launch launch;
  Thread host;  // where run_grid was called
  Thread* current = nullptr;
  std::vector<std::unique_ptr<Block>> blocks;  // resident ones
  std::vector<Thread*> ready;                  // a ring: those from `first` on, `num_ready` of them
  size_t first = 0, num_ready = 0;
  uint64_t random = 1;
  Counts counts;
  std::vector<Barrier> barriers;
  MemoryCheck memory_check = nullptr;
};
State& state();

uint64_t random_bits();
void make_ready(Thread* thread);
/// The running thread waits until someone makes it ready.
void wait_in(const char* function, Site site);

/// Notes a barrier that is executed, for barriers_seen.
void remember(Site site);
bool is_skipped(Site site);

/// Faults unless the bytes lie in one shared variable of the running block.
void require_shared(const void* data, size_t bytes, const char* function, Site site);
/// Lets a copy of the thread arrive, perhaps.
void progress_copies(Thread& thread);
/// Faults when a copy of the thread was never waited for.
void check_copies(const Thread& thread);

void start_shared_memory(Block& block, size_t dynamic_bytes);
/// The name of a variable behind whose end something was written; "" when there is none.
std::string shared_overrun(const Block& block);
/// Throws the running thread's kernel out when one of its lanes is waited for.
void leave_warp(Thread& thread);

}  // namespace shoal::emulator
