// Compiled without -fsanitize=thread.
#include "tests/cuda/standin/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "core/base/error.h"
#include "tests/cuda/emulator/fiber.h"
#include "tests/cuda/emulator/machine.h"
#include "tests/cuda/emulator/quiet_lock.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kGuardsAreForbidden = true;
#else
constexpr bool kGuardsAreForbidden = false;
#endif
// Access is given and taken often; to huge pages that is cheap.
constexpr size_t kPage = size_t{2} << 20, kUnit = 256, kGuard = 256, kArena = size_t{64} << 30;
constexpr unsigned char kPoison = 0xFF;

struct State {
  emulator::QuietLock lock;
  char* arena = nullptr;
  size_t used = 0;  // bytes from the start that were ever allocated; whole pages are accessible
  int accessors = 0;
  int64_t capacity = int64_t{1} << 30, bytes = 0;
  std::map<char*, size_t> live, pinned;
  std::map<size_t, std::deque<char*>> free;  // by size with guards; the one freed first is used first
  struct sigaction previous {};
};
State& state();

size_t whole_units(size_t bytes) {
  return (bytes + kUnit - 1) / kUnit * kUnit + 2 * kGuard;
}
size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

void protect(int access, size_t begin, size_t end) {
  if (begin < end) mprotect(state().arena + begin, end - begin, access);
}

// Only what may be called in a signal handler.
void on_fault(int number, siginfo_t* info, void* context) {
  State& s = state();
  if (in_arena(info->si_addr)) {
    constexpr char kText[] =
        "stand-in of CUDA: host code reads or writes device memory; copy it to the host first\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kText, sizeof kText - 1);
  }
  sigaction(SIGSEGV, &s.previous, nullptr);  // which meets the same fault again
  if (s.previous.sa_handler == SIG_DFL) return;
  if ((s.previous.sa_flags & SA_SIGINFO) != 0) s.previous.sa_sigaction(number, info, context);
}

State& state() {
  static auto* shared = [] {
    auto* made = new State;
    void* pages =
        mmap(nullptr, kArena + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    SHOAL_CHECK(pages != MAP_FAILED, "stand-in of CUDA: cannot map the device's memory");
    made->arena = reinterpret_cast<char*>(whole_pages(reinterpret_cast<size_t>(pages)));
    madvise(made->arena, kArena, MADV_HUGEPAGE);
    return made;
  }();
  static const bool handled = [] {
    struct sigaction action {};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &shared->previous) == 0;
  }();
  SHOAL_CHECK(handled, "stand-in of CUDA: no handler of faults");
  return *shared;
}

bool is_poison(const char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) {
    if (static_cast<unsigned char>(data[i]) != kPoison) return false;
  }
  return true;
}

/// What is wrong with the guards, or "".
std::string overrun() {
  if (kGuardsAreForbidden) return "";
  const DeviceAccess access;
  const std::lock_guard lock(state().lock);
  for (const auto& [data, bytes] : state().live) {
    const bool before = !is_poison(data - kGuard, kGuard), after = !is_poison(data + bytes, kGuard);
    if (before || after) {
      return str("device memory was written ", before ? "before" : "after", " an allocation of ", bytes,
                 " bytes");
    }
  }
  return "";
}

[[maybe_unused]] const bool checked = [] {
  emulator::set_memory_check(&overrun);
  return true;
}();

const std::pair<char* const, size_t>* containing(const std::map<char*, size_t>& map, const void* data) {
  auto after = map.upper_bound(static_cast<char*>(const_cast<void*>(data)));
  return after == map.begin() ? nullptr : &*std::prev(after);
}
bool holds(const std::map<char*, size_t>& map, const void* data, size_t bytes) {
  const auto* found = containing(map, data);
  return found != nullptr && static_cast<const char*>(data) + bytes <= found->first + found->second;
}

}  // namespace

DeviceAccess::DeviceAccess(bool wanted) : wanted_(wanted) {
  if (!wanted_) return;
  State& s = state();
  const std::lock_guard lock(s.lock);
  if (s.accessors++ == 0) protect(PROT_READ | PROT_WRITE, 0, whole_pages(s.used));
}

DeviceAccess::~DeviceAccess() {
  if (!wanted_) return;
  State& s = state();
  const std::lock_guard lock(s.lock);
  if (--s.accessors == 0) protect(PROT_NONE, 0, whole_pages(s.used));
}

int64_t& device_capacity() {
  return state().capacity;
}
int64_t device_bytes() {
  const std::lock_guard lock(state().lock);
  return state().bytes;
}

void* allocate_device(size_t bytes) {
  const DeviceAccess access;
  State& s = state();
  const std::lock_guard lock(s.lock);
  if (s.bytes + static_cast<int64_t>(bytes) > s.capacity) return nullptr;
  const size_t total = whole_units(bytes);
  char* guard = nullptr;
  if (std::deque<char*>& reusable = s.free[total]; !reusable.empty()) {
    guard = reusable.front();
    reusable.pop_front();
    acquire(guard);  // from who freed it
  } else {
    SHOAL_CHECK(s.used + total <= kArena, "stand-in of CUDA: the arena is used up");
    guard = s.arena + s.used;
    const size_t before = whole_pages(s.used);
    s.used += total;
    protect(PROT_READ | PROT_WRITE, before, whole_pages(s.used));
  }
  emulator::allow(guard, total);
  emulator::fill_unseen(guard, kPoison, total);
  char* data = guard + kGuard;
  emulator::forbid(guard, kGuard);
  emulator::forbid(data + bytes, total - kGuard - bytes);
  s.live[data] = bytes;
  s.bytes += static_cast<int64_t>(bytes);
  return data;
}

void free_device(void* pointer) {
  const DeviceAccess access;
  State& s = state();
  auto* data = static_cast<char*>(pointer);
  size_t bytes = 0;
  {
    const std::lock_guard lock(s.lock);
    const auto found = s.live.find(data);
    SHOAL_CHECK(found != s.live.end(), "stand-in of CUDA: free of memory that is not allocated");
    bytes = found->second;
    s.live.erase(found);
    s.bytes -= static_cast<int64_t>(bytes);
  }
  will_write(data, bytes);  // to TSan a race with every use that does not come before
  emulator::fill_unseen(data, kPoison, bytes);
  char* guard = data - kGuard;
  release(guard);
  const size_t total = whole_units(bytes);
  emulator::forbid(guard, total);
  const std::lock_guard lock(s.lock);
  s.free[total].push_back(guard);
}

void check_device_range(const void* data, size_t bytes, const char* what) {
  SHOAL_CHECK(in_arena(data), "stand-in of CUDA: ", what, " is not in device memory");
  const std::lock_guard lock(state().lock);
  SHOAL_CHECK(holds(state().live, data, bytes), "stand-in of CUDA: ", what, " of ", bytes,
              " bytes is not within one allocation of device memory");
}

bool in_arena(const void* data) {
  const auto* at = static_cast<const char*>(data);
  return at >= state().arena && at < state().arena + kArena;
}

void* allocate_pinned(size_t bytes) {
  void* data = std::aligned_alloc(kUnit, whole_units(bytes));
  SHOAL_CHECK(data != nullptr, "stand-in of CUDA: no memory");
  const std::lock_guard lock(state().lock);
  state().pinned[static_cast<char*>(data)] = bytes;
  return data;
}

void free_pinned(void* data) {
  {
    const std::lock_guard lock(state().lock);
    SHOAL_CHECK(state().pinned.erase(static_cast<char*>(data)) == 1,
                "stand-in of CUDA: free of host memory that is not page-locked");
  }
  std::free(data);
}

bool is_pinned(const void* data, size_t bytes) {
  const std::lock_guard lock(state().lock);
  return holds(state().pinned, data, bytes);
}

}  // namespace shoal::standin
