// SharedSegment: memory that all ranks of a group on one host have mapped, one part per rank. It has no name
// in any file system, so nothing is left of it however the ranks end.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "parallel/communicator.h"

namespace shoal {

class SharedSegment {
 public:
  /// Zeroed parts of at least part_bytes. Every page is touched here, by its own rank first, so that later
  /// use meets no page faults. Collective; blocks. When a rank cannot, all get nullptr, with the reason in
  /// *why.
  static std::shared_ptr<SharedSegment> create(Communicator& group, int64_t part_bytes, std::string* why);
  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  /// 4096-byte aligned.
  std::byte* part(int rank) const { return data_ + rank * part_bytes_; }
  int64_t part_bytes() const { return part_bytes_; }

 private:
  SharedSegment(std::byte* data, int64_t total_bytes, int64_t part_bytes)
      : data_(data), total_bytes_(total_bytes), part_bytes_(part_bytes) {}
  static std::shared_ptr<SharedSegment> map(int file, int64_t total_bytes, int64_t part_bytes);
  friend struct SegmentSetup;

  std::byte* data_;
  int64_t total_bytes_, part_bytes_;
};

/// Equal for processes that can share memory and see each other's process ids; "" when unknown.
std::string memory_domain();

/// A process of the group, and what can be done with its memory.
class PeerMemory {
 public:
  explicit PeerMemory(pid_t process);
  /// Copies from an address of that process; false with errno when it is not possible (another rank has
  /// ended, or this system does not permit it).
  bool read(std::byte* to, const std::byte* from, int64_t bytes) const;

 private:
  pid_t process_;
  bool is_this_process_;
};
/// Lets other processes of this user read the memory of this one, where the system asks for consent.
void permit_memory_reads();

}  // namespace shoal
