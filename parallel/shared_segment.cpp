#include "parallel/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/base/text.h"
#include "core/tensor/device_runtime.h"

namespace shoal {

namespace {

constexpr int64_t kPage = 4096;
// Names that older headers lack; older kernels refuse the values.
constexpr int kPopulateWrite = 23;   // MADV_POPULATE_WRITE
constexpr unsigned kNoExecSeal = 8;  // MFD_NOEXEC_SEAL: without it some systems refuse, others warn

std::string system_error(const char* call) {
  return str(call, ": ", std::strerror(errno));
}

/// Bytes that can be used without swapping; -1 when unknown.
int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream in(line);
    std::string key;
    int64_t kib = 0;
    if (in >> key >> kib && key == "MemAvailable:") return kib * 1024;
  }
  return -1;
}

/// Makes the pages present and writable here. Changes nothing, also while others write.
void touch(std::byte* data, int64_t bytes) {
  if (madvise(data, static_cast<size_t>(bytes), kPopulateWrite) == 0) return;
  for (int64_t at = 0; at < bytes; at += kPage)
    std::atomic_ref(*reinterpret_cast<uint32_t*>(data + at)).fetch_or(0, std::memory_order_relaxed);
}

/// An open file of this process; closed at the end.
class OpenFile {
 public:
  explicit OpenFile(int number) : number_(number) {}
  ~OpenFile() {
    if (number_ >= 0) ::close(number_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

/// The first non-empty reason of any rank.
std::string first_reason(Communicator& group, const std::string& mine) {
  for (const std::string& reason : group.gather_strings(mine))
    if (!reason.empty()) return reason;
  return "";
}

/// Memory for all parts, as an open file without a name; -1 with the reason.
int create_file(int64_t total_bytes, std::string& reason) {
  if (const int64_t available = available_memory(); available >= 0 && total_bytes > available / 2) {
    reason = str("they need ", human_bytes(total_bytes), " of shared memory, and ", human_bytes(available),
                 " are free");
    return -1;
  }
  int file = memfd_create("shoal", MFD_CLOEXEC | kNoExecSeal);
  if (file < 0) file = memfd_create("shoal", MFD_CLOEXEC);
  if (file < 0) reason = str("they need ", human_bytes(total_bytes), "; ", system_error("memfd_create"));
  if (file >= 0 && ::ftruncate(file, total_bytes) != 0)
    reason = str("they need ", human_bytes(total_bytes), "; ", system_error("ftruncate"));
  return file;
}

}  // namespace

/// Rank 0 makes the memory and the others open it through its process.
struct SegmentSetup {
  Communicator& group;
  int64_t part_bytes, total_bytes;
  std::string reason;
  std::shared_ptr<SharedSegment> segment;

  std::string offer(int file) const {
    return str(getpid(), ' ', file, ' ', reinterpret_cast<uintptr_t>(&segment));
  }
  void accept(const std::string& text) {
    std::istringstream in(text);
    int process = 0, number = -1;
    uintptr_t address = 0;
    in >> process >> number >> address;
    // Ranks that are threads of one process share the mapping too, so that a race detector sees one memory.
    if (process == getpid()) {
      segment = *reinterpret_cast<const std::shared_ptr<SharedSegment>*>(address);
      return;
    }
    const std::string path = str("/proc/", process, "/fd/", number);
    const OpenFile file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.number() < 0) {
      reason = system_error(str("cannot open the memory of process ", process).c_str());
      return;
    }
    map(file.number());
  }
  void map(int file) {
    segment = SharedSegment::map(file, total_bytes, part_bytes);
    if (!segment) reason = str("they need ", human_bytes(total_bytes), "; ", system_error("mmap"));
  }
};

std::shared_ptr<SharedSegment> SharedSegment::map(int file, int64_t total_bytes, int64_t part_bytes) {
  void* data = mmap(nullptr, static_cast<size_t>(total_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) return nullptr;
  madvise(data, static_cast<size_t>(total_bytes), MADV_HUGEPAGE);
  return std::shared_ptr<SharedSegment>(
      new SharedSegment(static_cast<std::byte*>(data), total_bytes, part_bytes));
}

SharedSegment::~SharedSegment() {
  munmap(data_, static_cast<size_t>(total_bytes_));
}

std::shared_ptr<SharedSegment> SharedSegment::create(Communicator& group, int64_t part_bytes,
                                                     std::string* why) {
  const int64_t rounded = round_up(std::max<int64_t>(part_bytes, 1), kPage);
  SegmentSetup setup{group, rounded, rounded * group.size(), "", nullptr};
  const OpenFile file(group.rank() == 0 ? create_file(setup.total_bytes, setup.reason) : -1);
  if (group.rank() == 0 && setup.reason.empty()) setup.map(file.number());
  *why = first_reason(group, setup.reason);
  if (!why->empty()) return nullptr;
  const std::string offer = group.broadcast_string(setup.offer(file.number()), 0);
  if (group.rank() != 0) setup.accept(offer);
  *why = first_reason(group, setup.reason);
  if (!why->empty()) return nullptr;
  touch(setup.segment->part(group.rank()), rounded);
  group.barrier();
  touch(setup.segment->data_, setup.total_bytes);
  group.barrier();
  return setup.segment;
}

std::string memory_domain() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  std::error_code failure;
  const std::string processes = std::filesystem::read_symlink("/proc/self/ns/pid", failure).string();
  return boot.empty() || processes.empty() ? "" : str(boot, ' ', processes, ' ', ::geteuid());
}

PeerMemory::PeerMemory(pid_t process) : process_(process), is_this_process_(process == getpid()) {}

bool PeerMemory::read(std::byte* to, const std::byte* from, int64_t bytes) const {
  if (is_this_process_) {
    if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
    return true;
  }
  for (int64_t done = 0; done < bytes;) {
    const iovec local{to + done, static_cast<size_t>(bytes - done)};
    const iovec remote{const_cast<std::byte*>(from) + done, static_cast<size_t>(bytes - done)};
    const ssize_t copied = process_vm_readv(process_, &local, 1, &remote, 1, 0);
    if (copied <= 0) return false;
    done += copied;
  }
  return true;
}

void permit_memory_reads() {
#ifdef PR_SET_PTRACER
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // refused where nobody asks for consent
#endif
}

}  // namespace shoal
