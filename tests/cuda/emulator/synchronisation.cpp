// Where threads of a block meet: barriers, warp functions; and shared memory.
#include <bit>
#include <cstring>

#include "core/base/error.h"
#include "tests/cuda/emulator/state.h"

namespace shoal::emulator {

void remember(Site site) {
  State& s = state();
  for (const Barrier& b : s.barriers) {
    if (b.line == site.line && b.kernel == s.launch.kernel && std::strcmp(b.file, site.file) == 0) return;
  }
  if (s.barriers.size() < s.barriers.capacity())
    s.barriers.push_back({s.launch.kernel, site.file, site.line});
}

bool is_skipped(Site site) {
  const State& s = state();
  if (s.options.skip.empty()) return false;
  return s.options.skip == Barrier{s.launch.kernel, site.file, site.line}.name();
}

namespace {

void complete_barrier(Block& block) {
  for (Thread* t : block.waiting) {
    t->votes = block.votes;
    make_ready(t);
  }
  block.waiting.clear();
  block.votes = {};
  block.phase ^= 1U;
}

WarpMeeting& meeting_of(Warp& warp, unsigned bit, unsigned mask, const char* function, Site site) {
  for (WarpMeeting& m : warp.meetings) {
    if (!m.used || m.complete || (m.mask & bit) == 0) continue;
    if (m.mask != mask || m.site.line != site.line || std::strcmp(m.function, function) != 0) {
      fault(str("divergent warp: ", function, " with mask ", mask, " at ", site.file, ':', site.line,
                " meets ", m.function, " with mask ", m.mask, " at ", m.site.file, ':', m.site.line));
    }
    return m;
  }
  for (WarpMeeting& m : warp.meetings) {
    if (m.used) continue;
    m.used = true;
    m.complete = false;
    m.mask = mask;
    m.arrived = m.left = 0;
    m.function = function;
    m.site = site;
    return m;
  }
  fault("too many warp functions at once");
}

/// The meeting that the running lane now takes part in, with its value.
WarpMeeting& enter_meeting(unsigned mask, const void* in, size_t bytes, const char* function, Site site) {
  Thread* me = state().current;
  Warp& warp = *me->warp;
  const unsigned bit = 1U << me->lane;
  state().counts.warp_functions++;
  progress_copies(*me);
  if ((mask & bit) == 0) {
    fault(str(function, " at ", site.file, ':', site.line, ": the calling lane ", me->lane,
              " is not in mask ", mask));
  }
  if ((mask & warp.ended) != 0) {
    fault(str(function, " at ", site.file, ':', site.line, ": mask ", mask, " names lanes that have ended"));
  }
  WarpMeeting& meeting = meeting_of(warp, bit, mask, function, site);
  copy_unseen(meeting.values[me->lane].data(), in, bytes);
  meeting.arrived |= bit;
  return meeting;
}

/// Waits for the other lanes; the last one calls `work` unless it is null.
void meet(WarpMeeting& meeting, void (*work)(void* const* lanes)) {
  const Thread* me = state().current;
  if (meeting.arrived != meeting.mask) return wait_in(meeting.function, meeting.site);
  meeting.complete = true;
  if (work != nullptr) {
    std::array<void*, kLanes> lanes;
    for (unsigned i = 0; i < kLanes; i++) copy_unseen(&lanes[i], meeting.values[i].data(), sizeof(void*));
    work(lanes.data());
  }
  for (unsigned i = 0; i < kLanes; i++) {
    if (i != me->lane && (meeting.mask >> i & 1U) != 0) make_ready(me->warp->lanes[i]);
  }
}

void leave_meeting(WarpMeeting& meeting, unsigned bit) {
  meeting.left |= bit;
  if (meeting.left == meeting.mask) meeting.used = false;
}

char* place(Block& block, size_t bytes) {
  const size_t offset = (block.used + kGuard + kGuard - 1) / kGuard * kGuard;
  if (offset + bytes + kGuard > kArena) fault("too many shared variables");
  fill_unseen(block.arena + block.used, kPoison, offset + bytes + kGuard - block.used);
  block.used = offset + bytes;
  allow(block.arena + offset, bytes);
  return block.arena + offset;
}

bool is_poison(const char* data, size_t bytes) {
  const auto* p = reinterpret_cast<const volatile unsigned char*>(data);
  for (size_t i = 0; i < bytes; i++) {
    if (p[i] != kPoison) return false;
  }
  return true;
}

}  // namespace

Votes block_barrier(bool predicate, Site site) {
  State& s = state();
  Thread* me = s.current;
  Block& block = *me->block;
  s.counts.barriers++;
  remember(site);
  if (is_skipped(site)) return {predicate ? 1 : 0, predicate, predicate};
  progress_copies(*me);
  if (block.running < block.size) {
    fault(str("divergent barrier: this thread is at ", site.file, ':', site.line, ", ",
              block.size - block.running, " threads of the block have ended"));
  }
  if (block.waiting.empty()) {
    block.barrier_site = site;
  } else if (block.barrier_site.line != site.line || std::strcmp(block.barrier_site.file, site.file) != 0) {
    fault(str("divergent barrier: this thread is at ", site.file, ':', site.line, ", others wait at ",
              block.barrier_site.file, ':', block.barrier_site.line));
  }
  char* order = &block.barrier_order[block.phase];
  order_release(order);
  block.votes.count += predicate ? 1 : 0;
  block.votes.all = block.votes.all && predicate;
  block.votes.any = block.votes.any || predicate;
  block.waiting.push_back(me);
  if (block.waiting.size() == block.running) complete_barrier(block);
  wait_in("__syncthreads", site);
  order_acquire(order);
  return me->votes;
}

void warp_exchange(unsigned mask, const void* in, void* all, size_t bytes, bool orders_memory,
                   const char* function, Site site, unsigned wanted) {
  const unsigned me = lane();
  if (orders_memory) {
    remember(site);
    if (is_skipped(site)) return;
  }
  WarpMeeting& meeting = enter_meeting(mask, in, bytes, function, site);
  if (orders_memory) order_release(&meeting);
  meet(meeting, nullptr);
  if (orders_memory) order_acquire(&meeting);
  for (unsigned left = mask & wanted; left != 0; left &= left - 1) {
    const auto i = static_cast<size_t>(std::countr_zero(left));
    copy_unseen(static_cast<char*>(all) + i * bytes, meeting.values[i].data(), bytes);
  }
  leave_meeting(meeting, 1U << me);
}

void warp_together(void* mine, void (*work)(void* const* lanes), const char* function, Site site) {
  const unsigned me = lane();
  WarpMeeting& meeting = enter_meeting(~0U, &mine, sizeof mine, function, site);
  meet(meeting, work);
  leave_meeting(meeting, 1U << me);
}

void leave_warp(Thread& thread) {
  thread.warp->ended |= 1U << thread.lane;
  for (const WarpMeeting& m : thread.warp->meetings) {
    if (m.used && !m.complete && (m.mask >> thread.lane & 1U) != 0) {
      fault(str("this lane ends, but ", m.function, " at ", m.site.file, ':', m.site.line, " waits for it"));
    }
  }
}

void start_shared_memory(Block& block, size_t dynamic_bytes) {
#ifdef SHOAL_EMULATOR_TSAN
  if (block.arena != nullptr) renew_pages(block.arena, block.used);  // TSan must not remember the last block
#endif
  if (block.arena == nullptr) block.arena = map_pages(kArena);
  forbid(block.arena, kArena);
  block.variables.clear();
  block.variables.reserve(64);
  block.used = block.static_bytes = 0;
  allow(block.arena, kArena);  // for place(), which also fills guards
  block.dynamic_offset = static_cast<size_t>(place(block, dynamic_bytes) - block.arena);
  block.variables.push_back({nullptr, block.dynamic_offset, dynamic_bytes, "dynamic shared memory"});
  forbid(block.arena, kArena);
  allow(block.arena + block.dynamic_offset, dynamic_bytes);
}

void* shared_variable(const void* key, size_t bytes, const char* name) {
  Block& block = *state().current->block;
  for (const SharedVariable& v : block.variables) {
    if (v.key == key) return block.arena + v.offset;
  }
  block.static_bytes += bytes;
  if (block.static_bytes > kStaticShared) {
    fault(str("expected at most ", kStaticShared, " bytes of static shared memory, got ", block.static_bytes,
              " with ", name));
  }
  if (block.static_bytes + state().launch.shared_bytes > kShared) {
    fault(str("expected at most ", kShared, " bytes of shared memory, got ",
              block.static_bytes + state().launch.shared_bytes, " with ", name));
  }
  if (block.variables.size() == block.variables.capacity()) fault("too many shared variables");
  char* guard = block.arena + block.used;
  allow(guard, kArena - block.used);  // for place(), which also fills the guards
  char* data = place(block, bytes);
  const size_t end = block.used;
  forbid(block.arena + end, kArena - end);
  forbid(guard, static_cast<size_t>(data - guard));
  block.variables.push_back({key, static_cast<size_t>(data - block.arena), bytes, name});
  return data;
}

void* dynamic_shared() {
  const Block& block = *state().current->block;
  return block.arena + block.dynamic_offset;
}

std::string shared_overrun(const Block& block) {
  for (const SharedVariable& v : block.variables) {
    allow(block.arena + v.offset - kGuard, kGuard);
    allow(block.arena + v.offset + v.bytes, kGuard);
    if (!is_poison(block.arena + v.offset - kGuard, kGuard) ||
        !is_poison(block.arena + v.offset + v.bytes, kGuard)) {
      return v.name;
    }
  }
  return "";
}

}  // namespace shoal::emulator
