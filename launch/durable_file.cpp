#include "launch/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

namespace shoal {

namespace {

// One call moves at most this much; Linux itself stops at 2 GiB - 4 KiB.
constexpr int64_t kMaxTransfer = int64_t{64} << 20;

std::string describe(const std::filesystem::path& path, const std::string& operation, int number,
                     int64_t needed) {
  std::string text = str(path.string(), ": cannot ", operation, ": ", std::system_category().message(number),
                         " (errno ", number, ")");
  if (number != ENOSPC && number != EDQUOT) return text;
  if (needed >= 0) text += str("; needed ", needed, " bytes");
  struct statvfs space {};
  if (statvfs(path.parent_path().c_str(), &space) == 0)
    text +=
        str("; free ", static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize), " bytes");
  return text;
}

/// open(2), again after a signal.
int open_file(const std::filesystem::path& path, int flags) {
  for (;;) {
    const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
    if (descriptor >= 0 || errno != EINTR) return descriptor;
  }
}

/// 0 or the error number. After a signal nothing is lost yet, unlike after an I/O error.
int sync_descriptor(int descriptor) {
  int result = 0;
  do {
    result = fsync(descriptor);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

}  // namespace

FileError::FileError(const std::filesystem::path& path, const std::string& operation, int number,
                     int64_t needed_bytes)
    : Error(describe(path, operation, number, needed_bytes)), number_(number) {}

DurableFile::DurableFile(std::filesystem::path path, int descriptor)
    : path_(std::move(path)), descriptor_(descriptor) {}

DurableFile::DurableFile(DurableFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

DurableFile::~DurableFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

DurableFile DurableFile::create(const std::filesystem::path& path) {
  const int descriptor = open_file(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW);
  if (descriptor < 0) throw FileError(path, "create", errno);
  return {path, descriptor};
}

DurableFile DurableFile::open(const std::filesystem::path& path) {
  // O_NONBLOCK: a pipe put in the place of a file must not block the open.
  const int descriptor = open_file(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) throw FileError(path, "open", errno);
  DurableFile file(path, descriptor);
  struct stat status {};
  if (fstat(descriptor, &status) != 0) throw FileError(path, "stat", errno);
  if (!S_ISREG(status.st_mode)) throw Error(str(path.string(), ": not a regular file"));
  return file;
}

int64_t DurableFile::size() const {
  struct stat status {};
  if (fstat(descriptor_, &status) != 0) throw FileError(path_, "stat", errno);
  return status.st_size;
}

void DurableFile::reserve(int64_t bytes) {
  if (bytes == 0) return;
  int failure = EINTR;
  while (failure == EINTR) failure = posix_fallocate(descriptor_, 0, bytes);
  if (failure == EOPNOTSUPP || failure == EINVAL) return;  // the writes will find out
  if (failure != 0) throw FileError(path_, str("reserve ", bytes, " bytes"), failure, bytes);
}

void DurableFile::write_at(const void* data, int64_t bytes, int64_t offset) {
  const auto* from = static_cast<const std::byte*>(data);
  for (int64_t done = 0; done < bytes;) {
    const auto wanted = static_cast<size_t>(std::min(bytes - done, kMaxTransfer));
    const ssize_t written = pwrite(descriptor_, from + done, wanted, offset + done);
    if (written < 0 && errno == EINTR) continue;
    // Zero bytes without an error would loop for ever.
    if (written <= 0)
      throw FileError(path_, str("write ", bytes - done, " bytes at offset ", offset + done),
                      written < 0 ? errno : EIO, bytes - done);
    done += written;
  }
}

void DurableFile::read_at(void* data, int64_t bytes, int64_t offset) const {
  auto* to = static_cast<std::byte*>(data);
  for (int64_t done = 0; done < bytes;) {
    const auto wanted = static_cast<size_t>(std::min(bytes - done, kMaxTransfer));
    const ssize_t got = pread(descriptor_, to + done, wanted, offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw FileError(path_, str("read at offset ", offset + done), errno);
    if (got == 0)
      throw Error(str(path_.string(), ": ends at offset ", offset + done, ", expected ", bytes - done,
                      " more bytes"));
    done += got;
  }
}

void DurableFile::sync() {
  if (const int failure = sync_descriptor(descriptor_); failure != 0)
    throw FileError(path_, "fsync", failure);
}

void DurableFile::close() {
  // After EINTR the descriptor is closed on Linux; a second close could hit another thread's file.
  const int result = ::close(std::exchange(descriptor_, -1));
  if (result != 0 && errno != EINTR) throw FileError(path_, "close", errno);
}

void sync_directory(const std::filesystem::path& directory) {
  const int descriptor = open_file(directory, O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) throw FileError(directory, "open the directory", errno);
  const int failure = sync_descriptor(descriptor);
  ::close(descriptor);
  // EINVAL: this file system cannot sync directories and orders them itself.
  if (failure != 0 && failure != EINVAL) throw FileError(directory, "fsync the directory", failure);
}

void rename_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  const std::string operation = str("rename to ", to.filename().string());
  if (errno != EINVAL && errno != ENOSYS) throw FileError(from, operation, errno);
  // No RENAME_NOREPLACE here (some network file systems). rename() replaces files and empty directories.
  struct stat status {};
  if (lstat(to.c_str(), &status) == 0) throw FileError(from, operation, EEXIST);
  if (std::rename(from.c_str(), to.c_str()) != 0) throw FileError(from, operation, errno);
}

int64_t free_bytes(const std::filesystem::path& directory) {
  struct statvfs space {};
  if (statvfs(directory.c_str(), &space) != 0) throw FileError(directory, "statvfs", errno);
  return static_cast<int64_t>(space.f_bavail) * static_cast<int64_t>(space.f_frsize);
}

std::string read_file(const std::filesystem::path& path, int64_t max_bytes) {
  const DurableFile file = DurableFile::open(path);
  const int64_t bytes = file.size();
  if (bytes > max_bytes)
    throw Error(str(path.string(), ": expected at most ", max_bytes, " bytes, got ", bytes));
  std::string text(static_cast<size_t>(bytes), '\0');
  file.read_at(text.data(), bytes, 0);
  return text;
}

}  // namespace shoal
