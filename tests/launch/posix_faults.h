// Makes one chosen system call of the calling thread go wrong. The definitions in posix_faults.cpp stand
// before those of the C library, for the program and for the C++ library's file functions alike.
#pragma once

#include <string>
#include <vector>

namespace shoal::test {

enum class Fault {
  none,
  kill,         // SIGKILL before the call
  torn,         // half of a write, then SIGKILL; other calls: SIGKILL after the call
  eio,          // "I/O error"
  enospc,       // "no space left on device"
  eintr,        // "interrupted by a signal"
  short_write,  // half of the bytes; other calls: as usual
};

/// While it lives, the calls of this thread that reach the file system are counted, and call number `at`
/// fails.
class FaultScope {
 public:
  explicit FaultScope(Fault fault = Fault::none, int at = -1);
  ~FaultScope();
  FaultScope(const FaultScope&) = delete;
  FaultScope& operator=(const FaultScope&) = delete;

  /// "pwrite", "fsync", ... in the order of the calls so far.
  const std::vector<std::string>& calls() const { return calls_; }

  // For the replaced functions.
  static FaultScope* current();
  /// The fault of this call, which is none for all but one.
  Fault enter(const char* name);

 private:
  Fault fault_;
  int at_;
  std::vector<std::string> calls_;
};

}  // namespace shoal::test
