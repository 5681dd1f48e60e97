#include "core/base/log.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <memory>
#include <mutex>

namespace shoal::log {

namespace {

struct RankLog {
  int rank = 0, world_size = 1;
  std::shared_ptr<std::FILE> file;
};
thread_local RankLog rank_log;
bool quiet_console = false;
std::mutex console_mutex;
int columns_of_terminal = 0;
bool status_shown = false;
constexpr const char* kEraseLine = "\r\033[K";

// With console_mutex held.
void erase_status() {
  if (status_shown) std::fputs(kEraseLine, stdout);
  status_shown = false;
}

void to_file(const char* level, const std::string& line) {
  if (!rank_log.file) return;
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &utc);
  std::fprintf(rank_log.file.get(), "%s %s %s\n", stamp, level, line.c_str());
  std::fflush(rank_log.file.get());
}

}  // namespace

void set_rank(int rank, int world_size) {
  rank_log.rank = rank;
  rank_log.world_size = world_size;
}

int rank() {
  return rank_log.rank;
}

void set_folder(const std::string& folder) {
  rank_log.file.reset();
  if (folder.empty()) return;
  const auto path = std::filesystem::path(folder) / "log" / str("rank-", rank_log.rank, ".log");
  std::error_code ignored;
  std::filesystem::create_directories(path.parent_path(), ignored);
  const auto status = std::filesystem::status(path, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw Error(str("log file ", path.string(), ": expected a regular file or nothing; remove it"));
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) {
    throw Error(str("log file ", path.string(), ": cannot be opened for writing: ", std::strerror(errno),
                    "; check run.folder and run.name"));
  }
  rank_log.file.reset(file, &std::fclose);
}

void set_quiet(bool quiet) {
  quiet_console = quiet;
}

void set_terminal_columns(int columns) {
  columns_of_terminal = columns;
}

int terminal_columns() {
  return columns_of_terminal;
}

void status(const std::string& line) {
  if (rank_log.rank != 0 || quiet_console || columns_of_terminal <= 0) return;
  const std::lock_guard lock(console_mutex);
  erase_status();
  // A full line would move some terminals to the next one.
  std::fwrite(line.data(), 1, std::min(line.size(), static_cast<size_t>(columns_of_terminal - 1)), stdout);
  status_shown = !line.empty();
  std::fflush(stdout);
}

void info_line(const std::string& line) {
  if (rank_log.rank == 0 && !quiet_console) {
    const std::lock_guard lock(console_mutex);
    erase_status();
    std::fprintf(stdout, "%s\n", line.c_str());
    std::fflush(stdout);
  }
  to_file("info", line);
}

void warn_line(const std::string& line) {
  if (!quiet_console) {
    const std::lock_guard lock(console_mutex);
    erase_status();
    std::fflush(stdout);
    // The status line of rank 0 may be on the terminal of this rank too.
    if (columns_of_terminal > 0 && rank_log.rank != 0) std::fputs(kEraseLine, stderr);
    if (rank_log.world_size > 1) {
      std::fprintf(stderr, "[rank %d] warning: %s\n", rank_log.rank, line.c_str());
    } else {
      std::fprintf(stderr, "warning: %s\n", line.c_str());
    }
  }
  to_file("warn", line);
}

void debug_line(const std::string& line) {
  to_file("debug", line);
}

}  // namespace shoal::log
