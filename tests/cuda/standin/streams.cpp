// Compiled without -fsanitize=thread: what TSan is to know of streams is said to it.
#include "tests/cuda/standin/streams.h"

#include <unistd.h>

#include <cstring>
#include <exception>
#include <vector>

#include "core/base/error.h"
#include "tests/cuda/emulator/quiet_lock.h"
#include "tests/cuda/standin/memory.h"
#include "tests/cuda/standin/queue.h"

#ifdef SHOAL_EMULATOR_TSAN
extern "C" {
void __tsan_read_range(void* data, unsigned long bytes);
void __tsan_write_range(void* data, unsigned long bytes);
}
#endif

namespace shoal::standin {

namespace {

struct State {
  emulator::QuietLock lock;
  Options options;
  uint64_t generation = 1;  // of the options
  uint64_t random = 1;
  CUstream_st standard;
  std::vector<CUstream_st*> streams{&standard};  // destroyed ones too: their addresses are not used again
};
State& state() {
  static auto* shared = new State;  // leaked: device memory is released late
  return *shared;
}

class Locked {
 public:
  Locked() { state().lock.lock(); }
  ~Locked() { state().lock.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
};

struct ThisThread {
  int64_t id = gettid();
  uint64_t generation = 0;
  int num_streams = 0;
  Counts counts;
};
ThisThread& this_thread() {
  static thread_local ThisThread mine;
  return mine;
}

uint64_t random_below(uint64_t limit) {
  uint64_t& r = state().random;
  r ^= r << 13;
  r ^= r >> 7;
  r ^= r << 17;
  return (r >> 8) % limit;
}

CUstream_st& known(CUstream_st* stream) {
  State& s = state();
  if (stream == nullptr) return s.standard;
  for (CUstream_st* each : s.streams) {
    if (each != stream) continue;
    SHOAL_CHECK(!stream->destroyed, "stand-in of CUDA: use of a destroyed stream");
    return *stream;
  }
  SHOAL_CHECK(false, "stand-in of CUDA: use of something that is no stream");
}

#ifdef SHOAL_EMULATOR_TSAN
// A stream has a stack of its own: on the host's, TSan would take what both keep there for shared memory.
struct Entry {
  CUstream_st* stream;
  const std::function<void()>* body;
  emulator::Fiber* back;
};
thread_local Entry entry;

[[gnu::noinline]] Entry& this_entry() {
  return entry;
}

void stream_main() {
  emulator::fiber_started();
  for (;;) {
    Entry now = this_entry();  // whatever thread this is
    (*now.body)();
    emulator::switch_fiber(now.stream->fiber, *now.back, false);
  }
}

/// Before the first work is put into it, since to TSan the host writes the stack.
void make_stack(CUstream_st& stream) {
  if (stream.fiber.stack == nullptr) emulator::prepare(stream.fiber, &stream_main);
}

void on_stream(CUstream_st& stream, const std::function<void()>& body) {
  emulator::Fiber here;
  emulator::adopt_thread(here);
  const Entry outer = this_entry();
  this_entry() = {&stream, &body, &here};
  emulator::switch_fiber(here, stream.fiber, false);
  this_entry() = outer;
}
#else
void make_stack(CUstream_st&) {}
void on_stream(CUstream_st&, const std::function<void()>& body) {
  body();
}
#endif

/// Does one piece of work, unlocked; returns what it threw. The work is a matter of the stream from the
/// moment it is put there, its end included: nothing of it lies on the host's stack.
std::exception_ptr perform(CUstream_st& stream, Work* work) {
  std::exception_ptr thrown;
  on_stream(stream, [&stream, &thrown, work] {
    acquire(work->order.get());
    if (work->wait_for) acquire(&work->wait_for->order);
    try {
      if (work->call) work->call();
    } catch (...) {
      thrown = std::current_exception();
    }
    if (work->record) release(&work->record->order);
    delete work;
    release(&stream.order);
  });
  if (thrown) acquire(&stream.order);
  return thrown;
}

/// Locked. Does the work of `stream` before number `end`.
void run(CUstream_st& stream, uint64_t end) {
  State& s = state();
  const int64_t me = this_thread().id;
  while (stream.done < end) {
    if (stream.runner != 0 && stream.runner != me) {
      s.lock.wait();
      continue;
    }
    SHOAL_CHECK(stream.runner == 0, "stand-in of CUDA: '", stream.queue.empty() ? "?" : stream.queue[0]->name,
                "' waits for work that waits for it");
    stream.runner = me;
    Work* work = stream.queue.front();
    stream.queue.pop_front();
    std::exception_ptr thrown;
    try {
      if (work->wait_for) run(*work->wait_for->stream, work->wait_for->number + 1);
    } catch (...) {
      thrown = std::current_exception();
    }
    s.lock.unlock();
    const std::exception_ptr own = perform(stream, work);
    if (!thrown) thrown = own;
    s.lock.lock();
    stream.done++;
    stream.runner = 0;
    s.lock.notify_all();
    if (thrown) std::rethrow_exception(thrown);
  }
}

/// Locked. What the policy does after some work came into `stream`.
void follow_policy(CUstream_st& stream) {
  State& s = state();
  const int64_t me = this_thread().id;
  if (s.options.policy == Policy::eager ||
      (s.options.policy == Policy::favour && stream.index == s.options.favoured)) {
    if (stream.runner != me) run(stream, stream.enqueued);
  } else if (s.options.policy == Policy::random && random_below(4) == 0) {
    for (size_t i = 0; i < s.streams.size(); i++) {  // which may grow meanwhile
      CUstream_st& some = *s.streams[i];
      // Other ranks' work may wait for work that this one has not put into a stream yet.
      if ((some.owner != me && some.owner != 0) || some.runner != 0 || random_below(2) == 0) continue;
      run(some, some.done + random_below(some.enqueued - some.done + 1));
    }
  }
}

/// Runs a stream for the host, with the device's memory accessible.
void run_for_host(CUstream_st& stream, uint64_t end) {
  const DeviceAccess access;
  const Locked locked;
  run(stream, end);
}

}  // namespace

Options options() {
  return state().options;
}

void set_options(const Options& options) {
  host_wait_all();
  const Locked locked;
  state().options = options;
  state().random = options.seed * 0x9E3779B97F4A7C15ULL + 0x2545F4914F6CDD1DULL;
  state().generation++;
}

Counts& counts() {
  return this_thread().counts;
}

CUstream_st* create_stream() {
  const Locked locked;
  ThisThread& me = this_thread();
  if (me.generation != state().generation) me.num_streams = 0;
  me.generation = state().generation;
  auto* stream = new CUstream_st;
  stream->owner = me.id;
  stream->index = ++me.num_streams;
  state().streams.push_back(stream);
  return stream;
}

void destroy_stream(CUstream_st* stream) {
  const Locked locked;
  SHOAL_CHECK(stream != nullptr, "stand-in of CUDA: the default stream cannot be destroyed");
  known(stream).destroyed = true;
}

uint64_t push(CUstream_st* stream, Work work) {
  const DeviceAccess access(state().options.policy != Policy::lazy);
  const Locked locked;
  CUstream_st& to = known(stream);
  auto* kept = new Work(std::move(work));
  kept->order = std::make_unique<char>();
  if (kept->record) *kept->record = {&to, to.enqueued, 0, 0};
  make_stack(to);
  release(kept->order.get());
  // Who allocates or records may hold a lock that other ranks' work needs, which a policy would run here.
  const bool is_work = kept->call && std::strncmp(kept->name, "cudaMallocAsync", 15) != 0 &&
                       std::strncmp(kept->name, "cudaFreeAsync", 13) != 0;
  to.queue.push_back(kept);
  const uint64_t number = to.enqueued++;
  this_thread().counts.enqueued++;
  if (is_work || state().options.policy == Policy::eager) follow_policy(to);
  return number;
}

uint64_t enqueue(cudaStream_t stream, const char* name, std::function<void()> work) {
  return push(stream, {name, std::move(work), nullptr, nullptr, nullptr});
}

std::shared_ptr<Mark> record(CUstream_st* stream) {
  auto mark = std::make_shared<Mark>();
  push(stream, {"event record", nullptr, nullptr, mark, nullptr});
  return mark;
}

void wait(CUstream_st* stream, const std::shared_ptr<Mark>& mark) {
  push(stream, {"event wait", nullptr, mark, nullptr, nullptr});
}

void run_until(cudaStream_t stream, uint64_t number) {
  const Locked locked;
  run(stream == nullptr ? state().standard : *stream, number + 1);
}

bool query(Mark& mark) {
  constexpr int kPatience = 16;
  const Policy policy = state().options.policy;
  bool force = false;
  {
    const Locked locked;
    // Others' work may wait for work that this thread has not put into a stream yet.
    const bool mine = mark.stream->owner == this_thread().id || mark.stream->owner == 0;
    force = mine && mark.stream->runner == 0 &&
            (++mark.queries > kPatience || (policy == Policy::random && random_below(3) == 0));
  }
  if (force) run_for_host(*mark.stream, mark.number + 1);
  const Locked locked;
  if (mark.stream->done <= mark.number) return false;
  acquire(&mark.order);
  return true;
}

void host_wait(Mark& mark) {
  counts().host_waits++;
  run_for_host(*mark.stream, mark.number + 1);
  acquire(&mark.order);
}

void host_wait(CUstream_st* stream) {
  counts().host_waits++;
  CUstream_st* waited = nullptr;
  uint64_t end = 0;
  {
    const Locked locked;
    waited = &known(stream);
    end = waited->enqueued;
  }
  run_for_host(*waited, end);
  acquire(&waited->order);
}

void host_wait_all() {
  counts().host_waits++;
  std::vector<std::pair<CUstream_st*, uint64_t>> all;
  {
    const Locked locked;
    for (CUstream_st* stream : state().streams) all.emplace_back(stream, stream->enqueued);
  }
  for (const auto& [stream, end] : all) {
    run_for_host(*stream, end);
    acquire(&stream->order);
  }
}

void will_read([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_read_range(const_cast<void*>(data), bytes);
#endif
}
void will_write([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_write_range(data, bytes);
#endif
}
void release(void* address) {
  emulator::order_release(address);
}
void acquire(void* address) {
  emulator::order_acquire(address);
}

}  // namespace shoal::standin
