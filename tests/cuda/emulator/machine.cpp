// Launches and the choice of the thread that runs next. Like fiber.cpp never compiled with -fsanitize=thread;
// and code that runs on fibers allocates only when it reports a fault.
#include "tests/cuda/emulator/machine.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <numeric>

#include "core/base/error.h"
#include "tests/cuda/emulator/quiet_lock.h"
#include "tests/cuda/emulator/state.h"

namespace shoal::emulator {

namespace {

int races_reported = 0;

/// Thrown by fault() and caught at the bottom of the fiber, so that what the kernel's frames own is freed.
struct KernelStopped {};

Options options_of_environment() {
  Options out;
  if (const char* skip = std::getenv("SHOAL_EMULATOR_SKIP")) out.skip = skip;
  return out;
}

std::string text_of(Index3 i) {
  return str('(', i.x, ", ", i.y, ", ", i.z, ')');
}

std::string text_of(Site site) {
  return str(site.file, ':', site.line);
}

/// The thread to run next, or null.
Thread* take_ready() {
  State& s = state();
  if (s.num_ready == 0) return nullptr;
  const size_t capacity = s.ready.size();
  const auto at = [&](size_t i) -> Thread*& { return s.ready[(s.first + i) % capacity]; };
  s.num_ready--;
  if (s.options.order == Order::fifo) {
    Thread* thread = at(0);
    s.first = (s.first + 1) % capacity;
    return thread;
  }
  if (s.options.order == Order::random) std::swap(at(random_bits() % (s.num_ready + 1)), at(s.num_ready));
  return at(s.num_ready);
}

void run(Thread* thread) {
  State& s = state();
  Thread* from = s.current;
  if (from == thread) return;
  s.current = thread;
  switch_fiber(from->fiber, thread->fiber, from->ended && from != &s.host);
}

/// Ends the kernel with launch.fault. Nothing on the fiber's stack is destroyed any more, so it must own
/// nothing.
[[noreturn]] void end_launch() {
  State& s = state();
  order_release(&s.launch.end_order);
  s.current->ended = true;
  run(&s.host);
  std::abort();  // ended threads are never run
}

std::string deadlock_message() {
  const State& s = state();
  std::string message = str("kernel ", s.launch.kernel, ": all threads wait for ever:");
  int named = 0;
  for (const auto& block : s.blocks) {
    for (unsigned i = 0; i < block->size && block->running > 0; i++) {
      const Thread& t = *block->threads[i];
      if (t.ended || t.waits_in == nullptr || named++ >= 8) continue;
      message += str("\n  block ", text_of(block->index), " thread ", text_of(t.index), " in ", t.waits_in,
                     " at ", text_of(t.waits_at));
    }
  }
  return message;
}

void report_deadlock() {
  state().launch.fault = deadlock_message();
}

/// Runs others until this thread is ready again; for ever when it has ended.
void run_others() {
  Thread* next = take_ready();
  if (next == nullptr) {
    report_deadlock();
    end_launch();
  }
  run(next);
}

void run_kernel(Thread& me) {
  (*state().launch.body)();
  const Block& block = *me.block;
  if (!block.waiting.empty()) {
    fault(str("divergent barrier: this thread ends, others wait at ", text_of(block.barrier_site)));
  }
  leave_warp(me);
  check_copies(me);
}

void thread_main() {
  fiber_started();
  State& s = state();
  Thread* me = s.current;
  order_acquire(&s.launch.start_order);
  order_acquire(&me->block->start_order);
  Block& block = *me->block;
  bool stopped = false;
  try {
    run_kernel(*me);
  } catch (const KernelStopped&) {
    stopped = true;
  }
  if (stopped) end_launch();
  order_release(&s.launch.end_order);
  me->ended = true;
  block.running--;
  if (block.running == 0) {
    run(&s.host);
  } else {
    run_others();
  }
  std::abort();
}

void check_limits(const char* kernel, Index3 grid, Index3 block, size_t shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  SHOAL_CHECK(threads >= 1 && threads <= kMaxThreads && threads % kLanes == 0 && block.z <= 64, "kernel ",
              kernel, ": expected blocks of whole warps and at most ", kMaxThreads, " threads, got ",
              text_of(block));
  SHOAL_CHECK(grid.x >= 1 && grid.y >= 1 && grid.z >= 1 && grid.x <= 0x7FFFFFFFU && grid.y <= 65535 &&
                  grid.z <= 65535,
              "kernel ", kernel, ": expected a grid of 1..2^31-1 x 1..65535 x 1..65535 blocks, got ",
              text_of(grid));
  SHOAL_CHECK(shared_bytes <= kShared, "kernel ", kernel, ": expected at most ", kShared,
              " bytes of shared memory, got ", shared_bytes);
}

void start_block(Block& block, uint64_t number) {
  State& s = state();
  const Index3 grid = s.launch.grid, size = s.launch.block;
  block.index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                 static_cast<unsigned>(number / grid.x / grid.y)};
  block.size = block.running = size.x * size.y * size.z;
  block.waiting.clear();
  block.waiting.reserve(block.size);
  block.votes = {};
  block.warps.assign(block.size / kLanes, Warp{});
  while (block.threads.size() < block.size) block.threads.push_back(std::make_unique<Thread>());
  start_shared_memory(block, s.launch.shared_bytes);
  for (unsigned i = 0; i < block.size; i++) {
    Thread& t = *block.threads[i];
    t.block = &block;
    t.linear = i;
    t.lane = i % kLanes;
    t.warp = &block.warps[i / kLanes];
    t.warp->lanes[t.lane] = &t;
    t.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    t.ended = false;
    end_unordered(t.copies.tsan);
    t.copies.num_pending = t.copies.group = t.copies.waited = t.copies.needed = 0;
    prepare(t.fiber, &thread_main);
    make_ready(&t);
  }
  order_release(&block.start_order);
  s.counts.blocks++;
  s.counts.threads += block.size;
}

/// The numbers of the grid's blocks in the order in which they start.
std::vector<uint64_t> block_order(uint64_t count) {
  State& s = state();
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (s.options.order == Order::lifo) std::reverse(order.begin(), order.end());
  if (s.options.order == Order::random) {
    for (uint64_t i = count; i > 1; i--) std::swap(order[i - 1], order[random_bits() % i]);
  }
  return order;
}

void prepare_launch(const char* kernel, Index3 grid, Index3 block, size_t shared_bytes,
                    const std::function<void()>& body) {
  State& s = state();
  s.launch = Launch{kernel, grid, block, shared_bytes, &body, "", 0, 0};
  s.random = s.options.seed * 0x9E3779B97F4A7C15ULL + 0x2545F4914F6CDD1DULL;
  const auto resident = static_cast<size_t>(std::max(1, s.options.resident_blocks));
  while (s.blocks.size() < resident) s.blocks.push_back(std::make_unique<Block>());
  for (auto& b : s.blocks) b->running = 0;
  s.ready.resize(resident * kMaxThreads);
  s.first = s.num_ready = 0;
  s.barriers.reserve(1024);
  s.current = &s.host;
  s.counts.launches++;
}

void run_blocks(uint64_t count) {
  State& s = state();
  const auto resident = static_cast<size_t>(std::max(1, s.options.resident_blocks));
  const std::vector<uint64_t> order = block_order(count);
  uint64_t started = 0;
  std::vector<bool> busy(resident, false);
  for (;;) {
    bool any = false;
    for (size_t slot = 0; slot < resident; slot++) {
      Block& block = *s.blocks[slot];
      if (busy[slot] && block.running == 0) {
        busy[slot] = false;
        const std::string overrun = shared_overrun(block);
        SHOAL_CHECK(overrun.empty(), "kernel ", s.launch.kernel, " block ", text_of(block.index),
                    ": shared memory was written outside of ", overrun);
      }
      if (!busy[slot] && started < count) {
        start_block(block, order[started++]);
        busy[slot] = true;
      }
      any = any || busy[slot];
    }
    if (!any) return;
    Thread* next = take_ready();
    SHOAL_CHECK(next != nullptr, deadlock_message());
    run(next);
    if (s.launch.fault.empty()) continue;
    order_acquire(&s.launch.end_order);  // the message was written by a fiber
    SHOAL_CHECK(false, s.launch.fault);
  }
}

}  // namespace

State& state() {
  static auto* shared = [] {  // leaked: kernels may run in static destructors
    auto* made = new State;
    made->options = options_of_environment();
    return made;
  }();
  return *shared;
}

Options& options() {
  return state().options;
}
const Counts& counts() {
  return state().counts;
}
int races() {
  return races_reported;
}
std::vector<Barrier> barriers_seen() {
  return state().barriers;
}
std::string Barrier::name() const {
  const std::string path = file;
  return str(kernel, ' ', path.substr(path.rfind('/') + 1), ':', line);
}
void set_memory_check(MemoryCheck check) {
  state().memory_check = check;
}

uint64_t random_bits() {
  uint64_t& r = state().random;
  r ^= r << 13;
  r ^= r >> 7;
  r ^= r << 17;
  return r >> 8;
}

void make_ready(Thread* thread) {
  State& s = state();
  thread->waits_in = nullptr;
  s.ready[(s.first + s.num_ready++) % s.ready.size()] = thread;
}

void wait_in(const char* function, Site site) {
  Thread* me = state().current;
  me->waits_in = function;
  me->waits_at = site;
  run_others();
}

void before_atomic() {
  State& s = state();
  if (s.num_ready == 0 || static_cast<int>(random_bits() % 100) >= s.options.preempt_percent) return;
  Thread* next = take_ready();
  make_ready(s.current);
  run(next);
}

void fault(const std::string& message) {
  const Thread& t = *state().current;
  state().launch.fault = str("kernel ", state().launch.kernel, " block ", text_of(t.block->index), " thread ",
                             text_of(t.index), ": ", message);
  throw KernelStopped{};
}

void run_grid(const char* kernel, Index3 grid, Index3 block, size_t shared_bytes,
              const std::function<void()>& body) {
  State& s = state();
  static QuietLock mutex;  // ranks may be threads: their launches take turns
  const std::lock_guard lock(mutex);
  check_limits(kernel, grid, block, shared_bytes);
  prepare_launch(kernel, grid, block, shared_bytes, body);
  adopt_thread(s.host.fiber);
  order_release(&s.launch.start_order);
  struct AfterAll {
    ~AfterAll() {  // threads that a fault has stopped included
      State& s = state();
      for (const auto& b : s.blocks) {
        for (unsigned i = 0; i < b->size && b->running > 0; i++) {
          for (char& done : b->threads[i]->copies.done) order_acquire(&done);  // of copies not waited for
          if (!b->threads[i]->ended)
            order_release_of(b->threads[i]->fiber, s.host.fiber, &s.launch.end_order);
        }
      }
      order_acquire(&s.launch.end_order);
      s.current = nullptr;
    }
  } const after_all;
  run_blocks(uint64_t{grid.x} * grid.y * grid.z);
  if (s.memory_check != nullptr) {
    const std::string wrong = s.memory_check();
    SHOAL_CHECK(wrong.empty(), "kernel ", kernel, ": ", wrong);
  }
}

Index3 thread_index() {
  return state().current->index;
}
Index3 block_index() {
  return state().current->block->index;
}
Index3 block_size() {
  return state().launch.block;
}
Index3 grid_size() {
  return state().launch.grid;
}
unsigned lane() {
  return state().current->lane;
}

}  // namespace shoal::emulator

#ifdef SHOAL_EMULATOR_TSAN
// TSan calls these. Races are counted, so that a test can plant one and expect it; tests/cuda/main.cpp fails
// every test with an unexpected one.
extern "C" void __tsan_on_report(void*) {
  shoal::emulator::races_reported++;
}
/// Shared pointers count in the program's own code too, which is not compiled with TSan here (it is in the
/// suites of thread ranks): what that part releases looks like a race with what the instrumented part has
/// done.
extern "C" const char* __tsan_default_suppressions() {
  return "race:^std::__shared_count\n";
}

extern "C" const char* __tsan_default_options() {
  return "exitcode=0 report_thread_leaks=0 suppress_equal_addresses=0";
}
#endif
