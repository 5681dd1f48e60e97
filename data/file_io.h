// Files as the data folder needs them: read-only memory maps, files that appear under their name only when
// they are complete, and a lock between processes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

/// A read-only memory map of a whole file. Movable. Error when the file cannot be opened.
class MappedFile {
 public:
  enum class Access { sequential, random };
  explicit MappedFile(const std::string& path, Access access = Access::random);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  const char* data() const { return data_; }  // null when the file is empty
  std::string_view text() const { return {data_, static_cast<size_t>(size_)}; }

 private:
  std::string path_;
  const char* data_ = nullptr;
  int64_t size_ = 0;
};

/// From now on a mapped file that somebody truncates ends the process with exit code 1 and a message that
/// names the file, instead of a bare bus error. For main; replaces the handler of SIGBUS.
void report_truncated_maps();

/// Throws UsageError when `path` exists (links followed) and is no regular file: opening a pipe waits for
/// ever, and replacing a device destroys it.
void require_file_or_nothing(const std::string& path);

/// A file written under a temporary name beside `path` and moved there by commit(). Without commit() nothing
/// remains. Errors (disk full, no permission) name the file, the bytes written so far, the system's
/// reason, and for a full disk the bytes needed next and free.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* bytes, size_t size);
  template <class T>
  void write_value(const T& value) {
    write(&value, sizeof value);
  }
  /// Writes what is buffered and fsyncs; commit() then only renames. For pairs of files that appear together.
  void sync();
  /// sync(), close, rename, fsync of the folder.
  void commit();
  /// Removes what killed processes have left beside `path`. Only for a caller who knows that nobody else is
  /// writing it.
  static void remove_leftovers(const std::string& path);

 private:
  void flush();
  [[noreturn]] void fail(const char* what) const;

  std::string path_, temporary_;
  int fd_ = -1;
  int64_t written_ = 0;
  std::vector<char> buffer_;
};

/// Atomically replaces `path` with `content`.
void write_file(const std::string& path, std::string_view content);
/// The whole file; Error when it cannot be read, UsageError when it is larger than max_bytes.
std::string read_file(const std::string& path, int64_t max_bytes);

/// Holds an exclusive lock on a lock file until destroyed.
class FileLock {
 public:
  /// Blocks while another process holds it, and calls `waiting` some times a second, which may throw.
  FileLock(const std::string& path, const std::function<void()>& waiting);
  /// Does not block: null when somebody else holds the lock.
  static std::unique_ptr<FileLock> try_lock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  FileLock() = default;
  bool acquire(const std::string& path, int operation);
  int fd_ = -1;
};

}  // namespace shoal
