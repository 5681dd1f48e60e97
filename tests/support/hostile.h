// Surroundings that a user may meet and a test must make: a small disk, another user, a limit on file sizes.
#pragma once

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <string>

#include "core/base/error.h"

namespace shoal::testing {

/// A tmpfs of `bytes` bytes mounted on a folder until the end of the scope, when this user may mount.
class SmallDisk {
 public:
  SmallDisk(std::filesystem::path folder, int64_t bytes) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
    mounted_ = ::mount("tmpfs", folder_.c_str(), "tmpfs", 0, str("size=", bytes).c_str()) == 0;
  }
  ~SmallDisk() {
    if (mounted_) ::umount2(folder_.c_str(), MNT_DETACH);
  }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  bool mounted() const { return mounted_; }
  void resize(int64_t bytes) const {
    const int result = ::mount("tmpfs", folder_.c_str(), "tmpfs", MS_REMOUNT, str("size=", bytes).c_str());
    SHOAL_CHECK(result == 0, folder_.string(), ": cannot remount, errno ", errno);
  }

 private:
  std::filesystem::path folder_;
  bool mounted_ = false;
};

/// Writes beyond `bytes` of any file fail (EFBIG) until the end of the scope, like on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(int64_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small{static_cast<rlim_t>(bytes), before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

/// What `body` throws ("" when nothing) in a child process that is not root: root may read and write
/// everything.
inline std::string message_as_nobody(const std::function<void()>& body) {
  constexpr uid_t kNobody = 65534;
  int channel[2];
  SHOAL_CHECK(::pipe(channel) == 0, "no pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    std::string message;
    try {
      if (::geteuid() == 0 && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0))
        throw Error("cannot change the user");
      body();
    } catch (const Error& error) {
      message = error.what();
    } catch (const std::exception& error) {
      message = str("not an Error: ", error.what());
    }
    const ssize_t written = ::write(channel[1], message.data(), message.size());
    ::_exit(written == static_cast<ssize_t>(message.size()) ? 0 : 1);
  }
  ::close(channel[1]);
  std::string message;
  char part[4096];
  for (ssize_t n = 0; (n = ::read(channel[0], part, sizeof part)) > 0;)
    message.append(part, static_cast<size_t>(n));
  ::close(channel[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? message : str("the child died: status ", status);
}

}  // namespace shoal::testing
