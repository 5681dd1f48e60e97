// Files that survive a crash: every call is checked, short writes and EINTR are handled, sync means fsync,
// and a failure names the path, the operation and the system's reason. The checkpoint writer and reader use
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/base/error.h"

namespace shoal {

/// "<path>: cannot <operation>: <reason> (errno n)"; for a full disk also the bytes needed and free.
class FileError : public Error {
 public:
  FileError(const std::filesystem::path& path, const std::string& operation, int number,
            int64_t needed_bytes = -1);
  int number() const { return number_; }  // errno

 private:
  int number_;
};

/// An open regular file. Symbolic links are not followed.
class DurableFile {
 public:
  /// A new file, readable and writable; fails when the name exists.
  static DurableFile create(const std::filesystem::path& path);
  static DurableFile open(const std::filesystem::path& path);  // for reading
  DurableFile(DurableFile&& other) noexcept;
  DurableFile& operator=(DurableFile&&) = delete;
  ~DurableFile();  // closes unchecked, when close() was not called

  const std::filesystem::path& path() const { return path_; }
  int64_t size() const;
  /// Allocates disk blocks for `bytes` bytes and sets the size, so that later writes cannot run out of space.
  void reserve(int64_t bytes);
  void write_at(const void* data, int64_t bytes, int64_t offset);
  /// All of the bytes, or an error.
  void read_at(void* data, int64_t bytes, int64_t offset) const;
  /// A failed fsync may have dropped the data: the file is lost, trying again proves nothing.
  void sync();
  void close();

 private:
  DurableFile(std::filesystem::path path, int descriptor);
  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// Makes creations, removals and renames inside the directory durable.
void sync_directory(const std::filesystem::path& directory);
/// Renames; fails with EEXIST when `to` exists. Durable only after sync_directory on the parent.
void rename_new(const std::filesystem::path& from, const std::filesystem::path& to);
/// Bytes that an unprivileged user can still write to the file system of `directory`.
int64_t free_bytes(const std::filesystem::path& directory);
/// The whole file; refuses more than max_bytes before allocating.
std::string read_file(const std::filesystem::path& path, int64_t max_bytes);

}  // namespace shoal
