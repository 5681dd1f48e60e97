#include "launch/terminal.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "parallel/bootstrap.h"

namespace shoal {

namespace {

constexpr int kUsualColumns = 80;  // a terminal that does not tell

int columns_of(int file) {
  if (isatty(file) == 0) return 0;
  winsize size{};
  if (ioctl(file, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsualColumns;
  return size.ws_col;
}

int columns_of_launcher() {
  const std::string process = "/proc/" + std::to_string(getppid());
  std::string name;
  std::getline(std::ifstream(process + "/comm"), name);
  if (name != "mpirun" && name != "mpiexec" && name != "orterun" && name != "prterun") return 0;
  std::error_code error;
  const std::string target = std::filesystem::read_symlink(process + "/fd/1", error).string();
  if (error || !target.starts_with("/dev/")) return 0;  // opening a pipe could block
  const int file = open(target.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return 0;
  const int columns = columns_of(file);
  close(file);
  return columns;
}

}  // namespace

int terminal_columns() {
  const char* kind = std::getenv("TERM");
  if (kind == nullptr || *kind == '\0' || std::string_view(kind) == "dumb") return 0;
  return launch_info().mpi ? columns_of_launcher() : columns_of(STDOUT_FILENO);
}

}  // namespace shoal
