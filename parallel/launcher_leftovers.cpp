#include "parallel/launcher_leftovers.h"

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace shoal {

namespace fs = std::filesystem;

namespace {

constexpr const char* kMark = "shoal-job";
constexpr const char* kFolderStart = "pid.";  // and the launcher's process number

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// Process numbers mean something only within their namespace: containers may share a folder.
std::string process_namespace() {
  std::error_code failure;
  return fs::read_symlink("/proc/self/ns/pid", failure).string();
}

/// False also for a process that is dead and not reaped.
bool is_alive(const std::string& process) {
  std::ifstream file("/proc/" + process + "/stat");
  std::string stat;
  std::getline(file, stat);
  const size_t after_name = stat.rfind(") ");
  return after_name != std::string::npos && stat[after_name + 2] != 'Z' && stat[after_name + 2] != 'X';
}

/// The job's number as it stands in the names of its segments; "" when unknown.
std::string job_in_hex() {
  const std::string job = variable("PMIX_NAMESPACE");
  if (job.empty() || job.size() > 10 || job.find_first_not_of("0123456789") != std::string::npos) return "";
  std::array<char, 24> text{};
  std::snprintf(text.data(), text.size(), "%llx", std::stoull(job));
  return text.data();
}

/// vader_segment.<host>.<user>.<job>.<local rank>
void remove_segments(const std::string& job) {
  std::string folder = variable("OMPI_MCA_btl_vader_backing_directory");
  if (folder.empty()) folder = "/dev/shm";
  const std::string part = "." + std::to_string(::geteuid()) + "." + job + ".";
  std::error_code failure;
  for (fs::directory_iterator entry(folder, failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (name.starts_with("vader_segment.") && name.find(part) != std::string::npos)
      fs::remove(entry->path(), ignored);
  }
}

void remove_when_abandoned(const fs::path& folder, const std::string& here) {
  const std::string name = folder.filename().string();
  if (!name.starts_with(kFolderStart)) return;
  std::ifstream mark(folder / kMark);
  std::string where, job;
  if (!std::getline(mark, where) || where != here || is_alive(name.substr(std::string(kFolderStart).size())))
    return;
  if (std::getline(mark, job) && !job.empty()) remove_segments(job);
  std::error_code ignored;
  fs::remove_all(folder, ignored);
}

}  // namespace

void tidy_launcher_folders() {
  const fs::path mine = variable("OMPI_MCA_orte_jobfam_session_dir");
  const std::string here = process_namespace();
  if (!mine.filename().string().starts_with(kFolderStart) || here.empty()) return;
  std::ofstream(mine / kMark) << here << '\n' << job_in_hex() << '\n';
  std::error_code failure;
  for (fs::directory_iterator entry(mine.parent_path(), failure), end; !failure && entry != end;
       entry.increment(failure)) {
    if (entry->path() != mine) remove_when_abandoned(entry->path(), here);
  }
}

}  // namespace shoal
