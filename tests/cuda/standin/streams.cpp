// Compiled without -fsanitize=thread: what TSan is to know of streams is said to it.
#include "tests/cuda/standin/streams.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/tensor/host_wait.h"
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

using Clock = std::chrono::steady_clock;

struct State {
  emulator::QuietLock lock;
  Options options;
  uint64_t generation = 1;  // of the options
  uint64_t changes = 0;     // to the queues and to what is done
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
  const Mark* asked = nullptr;  // by query, last, and not reached
  uint64_t asked_at = 0;        // work enqueued by then
  int num_asked = 0;            // times in a row
  uint64_t circle_at = 0;       // State::changes
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

struct Outcome {
  bool ended = true;
  std::exception_ptr thrown;
};

/// Does a piece of work, or tries to, unlocked. The work is a matter of the stream from the moment it is put
/// there: nothing of it lies on the host's stack.
Outcome perform(CUstream_st& stream, Work* work) {
  Outcome outcome;
  on_stream(stream, [&stream, &outcome, work] {
    acquire(work->order.get());
    if (work->wait_for) acquire(&work->wait_for->order);
    try {
      work->needs.clear();
      outcome.ended = !work->attempt || work->attempt(work->needs);
    } catch (...) {
      outcome.thrown = std::current_exception();
    }
    if (!outcome.ended) return;
    if (work->record) release(&work->record->order);
    release(&stream.order);
  });
  if (outcome.thrown) acquire(&stream.order);
  return outcome;
}

/// A walk from the work that is wanted to what it waits for.
struct Walk {
  std::vector<const CUstream_st*> path;
  bool busy = false;      // another thread does work that is waited for
  bool circular = false;  // work waits for itself
};

bool step(CUstream_st& stream, uint64_t end, Walk& walk);

/// Locked. Does the first work of `stream`, which waits for no event; false when it did not get further.
bool try_first(CUstream_st& stream, Walk& walk) {
  State& s = state();
  Work* work = stream.first;
  const bool begins = !std::exchange(work->begun, true);
  stream.runner = this_thread().id;
  s.lock.unlock();
  const Outcome outcome = perform(stream, work);
  s.lock.lock();
  const bool moved = outcome.ended || begins;
  if (outcome.ended) {
    stream.first = work->next;
    if (stream.first == nullptr) stream.last = nullptr;
    s.lock.unlock();
    on_stream(stream, [work] { delete work; });
    s.lock.lock();
    stream.done++;
  }
  stream.runner = 0;
  if (moved) s.changes++;
  s.lock.notify_all();
  if (outcome.thrown) std::rethrow_exception(outcome.thrown);
  if (moved) return true;
  std::vector<Need> needs(work->needs.size());  // a copy: another thread may end the work and delete it
  emulator::copy_unseen(needs.data(), work->needs.data(), needs.size() * sizeof(Need));
  return std::any_of(needs.begin(), needs.end(),
                     [&](const Need& need) { return step(known(need.stream), need.number + 1, walk); });
}

/// Locked, and unlocked in between. Does one piece of the work before number `end` of `stream`, or of the
/// work that it waits for; false when nothing of it can be done now. Never waits.
bool step(CUstream_st& stream, uint64_t end, Walk& walk) {
  if (stream.done >= end) return false;
  SHOAL_CHECK(stream.runner != this_thread().id, "stand-in of CUDA: '", stream.first->name,
              "' waits for work of its own stream");
  if (stream.runner != 0) walk.busy = true;
  if (std::find(walk.path.begin(), walk.path.end(), &stream) != walk.path.end()) walk.circular = true;
  if (walk.busy || walk.circular) return false;
  walk.path.push_back(&stream);
  const Mark* mark = stream.first->wait_for.get();
  const bool waits = mark != nullptr && mark->stream->done <= mark->number;
  const bool moved = waits ? step(*mark->stream, mark->number + 1, walk) : try_first(stream, walk);
  walk.path.pop_back();
  return moved;
}

/// Locked. Throws Error when what a walk found is a circle: found twice in a row, with no change in between.
void check_circle(const Walk& walk, const CUstream_st& stream) {
  if (!walk.circular) return;
  uint64_t& found_at = this_thread().circle_at;
  SHOAL_CHECK(std::exchange(found_at, state().changes) != state().changes, "stand-in of CUDA: '",
              stream.first == nullptr ? "?" : stream.first->name, "' waits for work that waits for it");
}

/// Locked. Does what can be done of the work of `stream` before number `end`.
void advance(CUstream_st& stream, uint64_t end) {
  Walk walk;
  while (step(stream, end, walk)) walk = {};
  check_circle(walk, stream);
}

/// Locked. What the policy does after some work came into `stream`.
void follow_policy(CUstream_st& stream) {
  State& s = state();
  if (s.options.policy == Policy::eager ||
      (s.options.policy == Policy::favour && stream.index == s.options.favoured)) {
    if (stream.runner != this_thread().id) advance(stream, stream.enqueued);
  } else if (s.options.policy == Policy::random && random_below(4) == 0) {
    for (size_t i = 0; i < s.streams.size(); i++) {  // which may grow meanwhile
      CUstream_st& some = *s.streams[i];
      if (some.runner != 0 || random_below(2) == 0) continue;
      advance(some, some.done + random_below(some.enqueued - some.done + 1));
    }
  }
}

/// Waits a little for work of other ranks that is not in a stream yet, unlocked.
void wait_for_others(Clock::time_point begin) {
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  run_host_wait_checks(std::chrono::duration<double>(Clock::now() - begin).count());
}

/// Until the work of `stream` before number `end` is done, with the device's memory accessible.
void run_for_host(CUstream_st& stream, uint64_t end) {
  const DeviceAccess access;
  const Clock::time_point begin = Clock::now();
  State& s = state();
  for (;;) {
    {
      const Locked locked;
      if (stream.done >= end) return;
      Walk walk;
      if (step(stream, end, walk)) continue;
      check_circle(walk, stream);
      if (walk.busy) s.lock.wait();
      if (walk.busy || walk.circular) continue;
    }
    wait_for_others(begin);
  }
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
  if (kept->record) *kept->record = {&to, to.enqueued, 0};
  make_stack(to);
  release(kept->order.get());
  (to.first == nullptr ? to.first : to.last->next) = kept;
  to.last = kept;
  const uint64_t number = to.enqueued++;
  state().changes++;
  this_thread().counts.enqueued++;
  follow_policy(to);
  return number;
}

uint64_t enqueue(cudaStream_t stream, const char* name, std::function<void()> work) {
  Work one{name};
  one.attempt = [work = std::move(work)](std::vector<Need>&) {
    work();
    return true;
  };
  return push(stream, std::move(one));
}

uint64_t enqueue_attempts(cudaStream_t stream, const char* name,
                          std::function<bool(std::vector<Need>&)> attempt) {
  Work one{name};
  one.attempt = std::move(attempt);
  return push(stream, std::move(one));
}

std::shared_ptr<Mark> record(CUstream_st* stream) {
  auto mark = std::make_shared<Mark>();
  Work work{"event record"};
  work.record = mark;
  push(stream, std::move(work));
  return mark;
}

void wait(CUstream_st* stream, const std::shared_ptr<Mark>& mark) {
  Work work{"event wait"};
  work.wait_for = mark;
  push(stream, std::move(work));
}

bool query(Mark& mark) {
  constexpr int kPatience = 16;  // questions with nothing in between; then the host waits
  ThisThread& me = this_thread();
  bool goes_on = false;
  {
    const Locked locked;
    if (mark.stream->done <= mark.number) {
      const bool again = me.asked == &mark && me.asked_at == me.counts.enqueued;
      me.num_asked = again ? me.num_asked + 1 : 1;
      me.asked = &mark;
      me.asked_at = me.counts.enqueued;
      if (me.num_asked == kPatience) me.counts.host_waits++;
      goes_on =
          me.num_asked >= kPatience || (state().options.policy == Policy::random && random_below(3) == 0);
    }
  }
  const DeviceAccess access(goes_on);
  const Locked locked;
  if (goes_on) advance(*mark.stream, mark.number + 1);
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
