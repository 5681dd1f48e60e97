#include "data/file_io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>
#include <utility>

#include "core/base/error.h"

namespace shoal {

namespace {

constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr const char* kTemporaryMark = ".tmp.";  // then the process and a number

std::string reason() {
  return std::strerror(errno);
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

void sync_folder_of(const std::string& path) {
  const int fd = ::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0)
    return;  // the rename itself succeeded; without read permission on the folder it cannot be synced
  ::fsync(fd);
  ::close(fd);
}

/// Maps that a signal handler can look up: fixed size, no locks. A map that finds no free slot is left out.
struct MapSlot {
  std::atomic<const char*> begin{nullptr};
  std::atomic<size_t> size{0};
  std::array<char, 512> path{};
};
std::array<MapSlot, 64> map_slots;
std::atomic_flag map_slots_busy = ATOMIC_FLAG_INIT;

void note_map(const char* begin, size_t size, const std::string& path) {
  while (map_slots_busy.test_and_set()) std::this_thread::yield();
  for (MapSlot& slot : map_slots) {
    if (slot.begin.load() != nullptr) continue;
    slot.path.fill('\0');
    path.copy(slot.path.data(), slot.path.size() - 1);
    slot.size = size;
    slot.begin = begin;
    break;
  }
  map_slots_busy.clear();
}

void forget_map(const char* begin) {
  for (MapSlot& slot : map_slots) {
    const char* expected = begin;
    if (slot.begin.compare_exchange_strong(expected, nullptr)) return;
  }
}

void say(const char* text) {
  const ssize_t ignored = ::write(STDERR_FILENO, text, std::strlen(text));
  (void)ignored;
}

void on_bus_error(int, siginfo_t* info, void*) {
  const char* at = static_cast<const char*>(info->si_addr);
  for (const MapSlot& slot : map_slots) {
    const char* begin = slot.begin.load();
    if (begin == nullptr || at < begin || at >= begin + slot.size.load()) continue;
    say("error: ");
    say(slot.path.data());
    say(": the file became shorter, or its disk failed, while it was in use; start again when it is whole\n");
    ::_exit(1);
  }
  ::signal(SIGBUS, SIG_DFL);  // not ours: the access is repeated and ends the process
}

}  // namespace

MappedFile::MappedFile(const std::string& path, Access access) : path_(path) {
  // O_NONBLOCK: opening a pipe would wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) throw Error(str(path, ": cannot open for reading: ", reason()));
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    throw Error(str(path, ": expected a regular file"));
  }
  size_ = status.st_size;
  if (size_ > 0) {
    void* mapped = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, fd, 0);
    const std::string why = reason();
    ::close(fd);
    if (mapped == MAP_FAILED) throw Error(str(path, ": cannot map ", size_, " bytes: ", why));
    data_ = static_cast<const char*>(mapped);
    note_map(data_, static_cast<size_t>(size_), path);
    ::madvise(mapped, static_cast<size_t>(size_),
              access == Access::sequential ? MADV_SEQUENTIAL : MADV_NORMAL);
  } else {
    ::close(fd);
  }
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  forget_map(data_);
  ::munmap(const_cast<char*>(data_), static_cast<size_t>(size_));
}

void report_truncated_maps() {
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
}

void require_file_or_nothing(const std::string& path) {
  std::error_code unknown;  // whoever opens it says what is wrong
  const auto status = std::filesystem::status(path, unknown);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw UsageError(str(path, ": expected a regular file or nothing, got ",
                         std::filesystem::is_directory(status) ? "a folder" : "a pipe, socket or device",
                         "; remove it or choose another path"));
}

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  static std::atomic<int64_t> counter{0};  // several writers of one process
  require_file_or_nothing(path);
  // The file that a link points to is replaced, not the link.
  std::error_code no_link;
  if (std::filesystem::is_symlink(path, no_link))
    path_ = std::filesystem::weakly_canonical(path, no_link).string();
  temporary_ = str(path_, kTemporaryMark, ::getpid(), ".", counter++);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("cannot create");
  buffer_.reserve(kBufferBytes);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) {
    ::close(fd_);
    ::unlink(temporary_.c_str());
  }
}

void AtomicFile::fail(const char* what) const {
  const int error = errno;
  std::string message =
      str(path_, ": ", what, " ", temporary_, " after ", written_, " bytes: ", std::strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    // What is buffered is known to be needed; the rest of the file may not have been made yet.
    if (!buffer_.empty()) message += str("; needed at least ", buffer_.size(), " bytes more");
    struct statvfs space {};
    if (::statvfs(folder_of(path_).c_str(), &space) == 0) {
      message += str("; free ", static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize),
                     " bytes");
    }
    message += "; free space or choose another output folder";
  }
  throw Error(message);
}

void AtomicFile::write(const void* bytes, size_t size) {
  SHOAL_CHECK(fd_ >= 0, path_, ": write after commit");
  const char* p = static_cast<const char*>(bytes);
  while (size > 0) {
    if (buffer_.size() == kBufferBytes) flush();
    const size_t part = std::min(size, kBufferBytes - buffer_.size());
    buffer_.insert(buffer_.end(), p, p + part);
    p += part;
    size -= part;
  }
}

void AtomicFile::flush() {
  size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t n = ::write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("cannot write");
    done += static_cast<size_t>(n);
    written_ += n;
  }
  buffer_.clear();
}

void AtomicFile::sync() {
  flush();
  if (::fsync(fd_) != 0) fail("cannot sync");
}

void AtomicFile::commit() {
  sync();
  const int fd = std::exchange(fd_, -1);
  const bool closed = ::close(fd) == 0;
  if (!closed || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    errno = error;
    fail(closed ? "cannot rename" : "cannot close");
  }
  sync_folder_of(path_);
}

void AtomicFile::remove_leftovers(const std::string& path) {
  namespace fs = std::filesystem;
  const std::string start = fs::path(path).filename().string() + kTemporaryMark;
  std::error_code failure;
  for (fs::directory_iterator entry(fs::path(path).parent_path(), failure), end; !failure && entry != end;
       entry.increment(failure)) {
    std::error_code ignored;
    if (entry->path().filename().string().starts_with(start)) fs::remove(entry->path(), ignored);
  }
}

void write_file(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content.data(), content.size());
  file.commit();
}

std::string read_file(const std::string& path, int64_t max_bytes) {
  const MappedFile file(path, MappedFile::Access::sequential);
  if (file.size() > max_bytes) {
    throw UsageError(str(path, ": expected at most ", max_bytes, " bytes, got ", file.size()));
  }
  return std::string(file.text());
}

FileLock::FileLock(const std::string& path, const std::function<void()>& waiting) {
  while (!acquire(path, LOCK_EX | LOCK_NB)) {
    waiting();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

std::unique_ptr<FileLock> FileLock::try_lock(const std::string& path) {
  std::unique_ptr<FileLock> lock(new FileLock);
  return lock->acquire(path, LOCK_EX | LOCK_NB) ? std::move(lock) : nullptr;
}

bool FileLock::acquire(const std::string& path, int operation) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) throw Error(str(path, ": cannot create the lock file: ", reason()));
  while (::flock(fd_, operation) != 0) {
    if (errno == EINTR) continue;
    const int error = errno;
    ::close(std::exchange(fd_, -1));
    if (error == EWOULDBLOCK) return false;
    throw Error(str(path, ": cannot lock: ", std::strerror(error)));
  }
  return true;
}

FileLock::~FileLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace shoal
