// Compiled without -fsanitize=thread even in the TSan build: the emulator's own memory is no matter of
// kernels.
#include "tests/cuda/emulator/fiber.h"

#include <sys/mman.h>

#include <cstdint>

#include "core/base/error.h"

#if !defined(__x86_64__)
#error "the emulator switches stacks of x86-64 only"
#endif

extern "C" {
void shoal_swap_stacks(void** save, void* load);
#ifdef SHOAL_EMULATOR_TSAN
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
#endif
#ifdef __SANITIZE_ADDRESS__
void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t bytes);
void __sanitizer_finish_switch_fiber(void* saved, const void** old_bottom, size_t* old_bytes);
void __asan_poison_memory_region(const volatile void* data, size_t bytes);
void __asan_unpoison_memory_region(const volatile void* data, size_t bytes);
#endif
}

// Saves what a called function must preserve (System V ABI), changes the stack, restores it from there.
asm(R"(
  .text
  .globl shoal_swap_stacks
  .type shoal_swap_stacks, @function
shoal_swap_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size shoal_swap_stacks, .-shoal_swap_stacks
)");

namespace shoal::emulator {

namespace {

constexpr size_t kPage = 4096;
constexpr int kSavedRegisters = 6;
Fiber* os_thread = nullptr;  // the fiber whose stack ASan tells at the first switch away from it

#ifdef SHOAL_EMULATOR_TSAN
constexpr size_t kUsedStack = size_t{16} << 10;  // as deep as kernels go; its traces are wiped
constexpr unsigned kNoOrder = 1;                 // __tsan_switch_to_fiber_no_sync

void new_tsan_thread(Fiber& fiber) {
  if (fiber.tsan != nullptr) __tsan_destroy_fiber(fiber.tsan);
  fiber.tsan = __tsan_create_fiber(0);
  renew_pages(fiber.stack + fiber.stack_bytes - kUsedStack, kUsedStack);
}
#endif

}  // namespace

void adopt_thread(Fiber& fiber) {
  os_thread = &fiber;
  fiber.stack = nullptr;  // unknown yet; another OS thread has another one
#ifdef SHOAL_EMULATOR_TSAN
  fiber.tsan = __tsan_get_current_fiber();
#endif
}

void prepare(Fiber& fiber, void (*entry)()) {
  if (fiber.stack == nullptr) {
    char* pages = map_pages(Fiber::kStackBytes + kPage);
    mprotect(pages, kPage, PROT_NONE);  // an overflow of the stack is a crash, not a riddle
    fiber.stack = pages + kPage;
    fiber.stack_bytes = Fiber::kStackBytes;
  }
#ifdef SHOAL_EMULATOR_TSAN
  new_tsan_thread(fiber);
#endif
  allow(fiber.stack, fiber.stack_bytes);
  fiber.asan_stack = nullptr;
  auto** top = reinterpret_cast<void**>(fiber.stack + fiber.stack_bytes);
  *--top = nullptr;  // where entry would return to; also aligns the stack as a call does
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; i++) *--top = nullptr;
  fiber.stack_pointer = top;
}

void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool ended) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(ended ? nullptr : &from.asan_stack, to.stack, to.stack_bytes);
#endif
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_switch_to_fiber(to.tsan, kNoOrder);
#endif
  shoal_swap_stacks(&from.stack_pointer, to.stack_pointer);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(from.asan_stack, nullptr, nullptr);
#endif
}

void fiber_started() {
#ifdef __SANITIZE_ADDRESS__
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (os_thread->stack == nullptr) {  // the first fiber comes from there
    os_thread->stack = static_cast<char*>(const_cast<void*>(bottom));
    os_thread->stack_bytes = bytes;
  }
#endif
}

void order_release([[maybe_unused]] void* address) {
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_release(address);
#endif
}

void order_acquire([[maybe_unused]] void* address) {
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_acquire(address);
#endif
}

void order_release_of([[maybe_unused]] Fiber& fiber, [[maybe_unused]] Fiber& running,
                      [[maybe_unused]] void* address) {
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_switch_to_fiber(fiber.tsan, kNoOrder);
  __tsan_release(address);
  __tsan_switch_to_fiber(running.tsan, kNoOrder);
#endif
}

void unordered_copy([[maybe_unused]] void*& tsan, [[maybe_unused]] Fiber& running, [[maybe_unused]] void* to,
                    [[maybe_unused]] size_t bytes_to, [[maybe_unused]] const void* from,
                    [[maybe_unused]] size_t bytes_from, [[maybe_unused]] void* done) {
#ifdef SHOAL_EMULATOR_TSAN
  if (tsan == nullptr) tsan = __tsan_create_fiber(0);
  char start = 0;
  __tsan_release(&start);
  __tsan_switch_to_fiber(tsan, kNoOrder);
  __tsan_acquire(&start);
  if (bytes_from > 0) __tsan_read_range(const_cast<void*>(from), bytes_from);
  __tsan_write_range(to, bytes_to);
  __tsan_release(done);
  __tsan_switch_to_fiber(running.tsan, kNoOrder);
#endif
}

void end_unordered([[maybe_unused]] void*& tsan) {
#ifdef SHOAL_EMULATOR_TSAN
  if (tsan != nullptr) __tsan_destroy_fiber(tsan);
  tsan = nullptr;
#endif
}

void read_seen(void* to, const void* from, size_t bytes) {
#ifdef SHOAL_EMULATOR_TSAN
  __tsan_read_range(const_cast<void*>(from), bytes);
#endif
  copy_unseen(to, from, bytes);
}

void forbid([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(data, bytes);
#endif
}

void allow([[maybe_unused]] const void* data, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(data, bytes);
#endif
}

char* map_pages(size_t bytes) {
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  SHOAL_CHECK(data != MAP_FAILED, "emulator: cannot map ", bytes, " bytes");
  return static_cast<char*>(data);
}

void renew_pages(char* data, size_t bytes) {
  const size_t whole = (bytes + kPage - 1) / kPage * kPage;
  if (whole == 0) return;
  mmap(data, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

// Volatile, because a call of memcpy would go through TSan's.
namespace {

/// Volatile: what the compiler could make a call of memcpy would be seen.
template <class Word>
void copy_words(void* to, const void* from, size_t bytes) {
  using Any [[gnu::may_alias]] = Word;
  auto* out = static_cast<volatile Any*>(to);
  const auto* in = static_cast<const volatile Any*>(from);
  for (size_t i = 0; i < bytes / sizeof(Word); i++) out[i] = in[i];
}

uintptr_t address(const void* data) {
  return reinterpret_cast<uintptr_t>(data);
}

}  // namespace

void copy_unseen(void* to, const void* from, size_t bytes) {
  const uintptr_t units = address(to) | address(from) | bytes;
  if (units % sizeof(uint64_t) == 0) return copy_words<uint64_t>(to, from, bytes);
  if (units % sizeof(uint32_t) == 0) return copy_words<uint32_t>(to, from, bytes);
  copy_words<char>(to, from, bytes);
}

void fill_unseen(void* to, unsigned char value, size_t bytes) {
  using Any [[gnu::may_alias]] = uint64_t;
  const uint64_t eight = uint64_t{value} * 0x0101010101010101U;
  size_t done = 0;
  if (address(to) % sizeof(uint64_t) == 0) {
    for (; done + sizeof(uint64_t) <= bytes; done += sizeof(uint64_t))
      *reinterpret_cast<volatile Any*>(static_cast<char*>(to) + done) = eight;
  }
  for (; done < bytes; done++) static_cast<volatile unsigned char*>(to)[done] = value;
}

}  // namespace shoal::emulator
