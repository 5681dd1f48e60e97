// cp.async: copies from global to shared memory that go on beside the threads. When one happens depends on
// the order of the threads: Order::fifo at the wait, Order::lifo at once, Order::random at any of both or at
// some barrier or warp function in between. To TSan every group of copies of a thread is a thread of its own,
// which starts when the copies are issued and which only the wait waits for.
#include <algorithm>

#include "core/base/error.h"
#include "tests/cuda/emulator/state.h"

namespace shoal::emulator {

namespace {

constexpr size_t kBytes = 16;

void perform(const AsyncCopy& copy) {
  copy_unseen(copy.to, copy.from, copy.bytes);
  fill_unseen(static_cast<char*>(copy.to) + copy.bytes, 0, kBytes - copy.bytes);
}

/// Performs the pending copy `i`, and forgets it.
void finish(AsyncCopies& copies, size_t i) {
  perform(copies.pending[i]);
  copies.pending[i] = copies.pending[--copies.num_pending];
}

}  // namespace

void require_shared(const void* data, size_t bytes, const char* function, Site site) {
  const Block& block = *state().current->block;
  const auto* first = static_cast<const char*>(data);
  for (const SharedVariable& v : block.variables) {
    const char* start = block.arena + v.offset;
    if (first >= start && first + bytes <= start + v.bytes) return;
  }
  fault(str(function, " at ", site.file, ':', site.line, ": expected an address in shared memory"));
}

void start_copy(void* shared, const void* global, size_t bytes, Site site) {
  State& s = state();
  AsyncCopies& copies = s.current->copies;
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kBytes == 0; };
  if (!aligned(shared) || !aligned(global) || bytes > kBytes) {
    fault(str("copy_async at ", site.file, ':', site.line,
              ": expected places aligned to 16 bytes and at most 16 bytes, got ", bytes));
  }
  require_shared(shared, kBytes, "copy_async", site);
  if (copies.num_pending == copies.pending.size()) fault("too many asynchronous copies at once");
  copies.site = site;
  unordered_copy(copies.tsan, s.current->fiber, shared, kBytes, global, bytes,
                 &copies.done[copies.group % copies.done.size()]);
  const AsyncCopy copy{shared, global, bytes, copies.group};
  if (s.options.order == Order::lifo || (s.options.order == Order::random && random_bits() % 2 == 0)) {
    perform(copy);
  } else {
    copies.pending[copies.num_pending++] = copy;
  }
  copies.needed = copies.group + 1;
}

void commit_copies() {
  AsyncCopies& copies = state().current->copies;
  end_unordered(copies.tsan);
  copies.group++;
}

void wait_copies(unsigned may_pend, Site site) {
  State& s = state();
  AsyncCopies& copies = s.current->copies;
  remember(site);
  const uint64_t end =
      copies.group - std::min<uint64_t>(copies.group, may_pend);  // groups before it are done
  const uint64_t first = copies.waited;
  copies.waited = std::max(first, end);
  if (is_skipped(site)) return;
  for (size_t i = 0; i < copies.num_pending;) {
    if (copies.pending[i].group < end) {
      finish(copies, i);
    } else {
      i++;
    }
  }
  for (uint64_t g = first; g < end; g++) order_acquire(&copies.done[g % copies.done.size()]);
}

void progress_copies(Thread& thread) {
  AsyncCopies& copies = thread.copies;
  if (copies.num_pending == 0 || state().options.order != Order::random || random_bits() % 4 != 0) return;
  finish(copies, random_bits() % copies.num_pending);
}

void check_copies(const Thread& thread) {
  const AsyncCopies& copies = thread.copies;
  if (copies.waited < copies.needed) {
    fault(str("this thread ends, but has not waited for its copy_async at ", copies.site.file, ':',
              copies.site.line));
  }
}

}  // namespace shoal::emulator
