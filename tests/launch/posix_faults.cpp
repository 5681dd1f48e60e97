#include "tests/launch/posix_faults.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>

namespace shoal::test {

namespace {

thread_local FaultScope* current_scope = nullptr;

/// The function that would have been called without this file.
template <class F>
F* next(F*, const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

int number_of(Fault fault) {
  switch (fault) {
    case Fault::eio:
      return EIO;
    case Fault::enospc:
      return ENOSPC;
    case Fault::eintr:
      return EINTR;
    default:
      return 0;
  }
}

Fault enter(const char* name) {
  FaultScope* scope = FaultScope::current();
  if (scope == nullptr) return Fault::none;
  const Fault fault = scope->enter(name);
  if (fault == Fault::kill) raise(SIGKILL);
  return fault;
}

/// Carries a call out, or fails with the error number and `failed`.
template <class Call, class Result>
Result guarded(const char* name, const Call& call, Result failed) {
  const Fault fault = enter(name);
  if (const int number = number_of(fault); number != 0) {
    errno = number;
    return failed;
  }
  const Result result = call();
  if (fault == Fault::torn) raise(SIGKILL);
  return result;
}

}  // namespace

FaultScope::FaultScope(Fault fault, int at) : fault_(fault), at_(at) {
  current_scope = this;
}
FaultScope::~FaultScope() {
  current_scope = nullptr;
}
FaultScope* FaultScope::current() {
  return current_scope;
}
Fault FaultScope::enter(const char* name) {
  current_scope = nullptr;  // what the bookkeeping does is not counted
  calls_.emplace_back(name);
  current_scope = this;
  return static_cast<int>(calls_.size()) - 1 == at_ ? fault_ : Fault::none;
}

}  // namespace shoal::test

using shoal::test::enter;
using shoal::test::Fault;
using shoal::test::guarded;
using shoal::test::next;
using shoal::test::number_of;

extern "C" {

int open(const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  static auto* const real = next(&open, "open");
  return guarded(
      "open", [&] { return real(path, flags, mode); }, -1);
}

int openat(int folder, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;
  va_end(list);
  static auto* const real = next(&openat, "openat");
  return guarded(
      "openat", [&] { return real(folder, path, flags, mode); }, -1);
}

DIR* opendir(const char* path) {
  static auto* const real = next(&opendir, "opendir");
  return guarded(
      "opendir", [&] { return real(path); }, static_cast<DIR*>(nullptr));
}

int fsync(int file) {
  static auto* const real = next(&fsync, "fsync");
  return guarded(
      "fsync", [&] { return real(file); }, -1);
}

int close(int file) {
  static auto* const real = next(&close, "close");
  // The descriptor is gone, whatever close says.
  const Fault fault = enter("close");
  const int result = real(file);
  if (fault == Fault::torn) raise(SIGKILL);
  if (number_of(fault) == 0) return result;
  errno = number_of(fault);
  return -1;
}

ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
  static auto* const real = next(&pwrite, "pwrite");
  const Fault fault = enter("pwrite");
  if (number_of(fault) != 0) {
    errno = number_of(fault);
    return -1;
  }
  const bool cut = fault == Fault::short_write || fault == Fault::torn;
  const ssize_t written = real(file, data, cut ? std::max<size_t>(bytes / 2, 1) : bytes, offset);
  if (fault == Fault::torn) raise(SIGKILL);
  return written;
}

ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
  static auto* const real = next(&pread, "pread");
  return guarded(
      "pread", [&] { return real(file, data, bytes, offset); }, ssize_t{-1});
}

int posix_fallocate(int file, off_t offset, off_t bytes) {
  static auto* const real = next(&posix_fallocate, "posix_fallocate");
  const Fault fault = enter("posix_fallocate");
  if (number_of(fault) != 0) return number_of(fault);
  const int result = real(file, offset, bytes);
  if (fault == Fault::torn) raise(SIGKILL);
  return result;
}

int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const real = next(&mkdir, "mkdir");
  return guarded(
      "mkdir", [&] { return real(path, mode); }, -1);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static auto* const real = next(&renameat2, "renameat2");
  return guarded(
      "renameat2", [&] { return real(from_folder, from, to_folder, to, flags); }, -1);
}

int remove(const char* path) noexcept {
  static auto* const real = next(&remove, "remove");
  return guarded(
      "remove", [&] { return real(path); }, -1);
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  static auto* const real = next(&unlinkat, "unlinkat");
  return guarded(
      "unlinkat", [&] { return real(folder, path, flags); }, -1);
}

int statvfs(const char* path, struct statvfs* space) noexcept {
  static auto* const real = next<int(const char*, struct statvfs*)>(nullptr, "statvfs");
  return guarded(
      "statvfs", [&] { return real(path, space); }, -1);
}

}  // extern "C"
