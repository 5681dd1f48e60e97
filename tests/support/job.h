// A started program with everything it starts: own session, own temporary folders, a hard time limit, nothing
// left at the end of the test. For tests that run `shoal` alone and under mpirun.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.h"

namespace shoal::testing {

/// Calls `reached` until it returns true or the time is over; false: it never did.
inline bool wait_until(const std::function<bool()>& reached, double seconds = 60) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!reached()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

/// What could be read: a file under /proc may end in an error, as its process may end at any time.
inline std::string file_bytes(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream bytes;
  bytes << in.rdbuf();  // a read error ends it; an iterator would throw
  return bytes.str();
}

/// How a program ended.
struct Ended {
  int code = -1;  // exit code, 128 + signal, or 124 after the time limit
  std::string out, err;
  std::string all() const { return out + err; }
};

class Job {
 public:
  /// Starts `argv` in `folder`. TMPDIR and Open MPI's shared memory are folders inside it, so that what a
  /// killed job leaves there can be seen and goes with the folder.
  Job(const std::vector<std::string>& argv, const std::filesystem::path& folder)
      : marker_(str("SHOAL_TEST_JOB=", ::getpid(), '.', next_number())) {
    std::filesystem::create_directories(folder / "tmp");
    std::filesystem::create_directories(folder / "shm");
    out_ = folder / "stdout.txt";
    err_ = folder / "stderr.txt";
    for (const auto& path : {out_, err_})
      std::ofstream(path).flush();  // nobody reads what an earlier job said
    std::vector<std::string> variables = {
        marker_, "OMPI_MCA_mpi_yield_when_idle=1", "TMPDIR=" + (folder / "tmp").string(),
        "OMPI_MCA_btl_vader_backing_directory=" + (folder / "shm").string()};
    for (char** v = environ; *v != nullptr; v++) {
      if (std::strncmp(*v, "TMPDIR=", 7) != 0 && std::strncmp(*v, "GTEST_", 6) != 0)
        variables.emplace_back(*v);
    }
    // Prepared here: between fork and exec nothing may allocate.
    std::vector<char*> arguments = pointers(argv), environment = pointers(variables);
    pid_ = ::fork();
    SHOAL_CHECK(pid_ >= 0, "fork failed");
    if (pid_ == 0) run_child(arguments, environment, folder.c_str());
  }
  ~Job() { kill_all(); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }

  /// Waits for the started program (not for what it has left behind); kills everything when it takes longer.
  Ended wait(double seconds = 60) {
    const bool in_time = wait_until([&] { return has_ended(); }, seconds);
    if (!in_time) kill_all();
    Ended ended{124, file_bytes(out_), file_bytes(err_)};
    if (in_time) ended.code = WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
    return ended;
  }
  bool has_ended() {
    if (!reaped_) reaped_ = ::waitpid(pid_, &status_, WNOHANG) == pid_;
    return reaped_;
  }

  std::string out_so_far() const { return file_bytes(out_); }
  std::string err_so_far() const { return file_bytes(err_); }

  /// Living processes of the job: in its session, or with its mark in their environment. Zombies are dead.
  std::vector<pid_t> processes() const {
    std::vector<pid_t> found;
    std::error_code gone;
    for (std::filesystem::directory_iterator entry("/proc", gone), end; !gone && entry != end;
         entry.increment(gone)) {
      const std::string name = entry->path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string stat = file_bytes(entry->path() / "stat");
      const size_t after_name = stat.rfind(')');
      char state = 0;
      int parent = 0, group = 0, session = 0;
      if (after_name == std::string::npos ||
          std::sscanf(stat.c_str() + after_name + 1, " %c %d %d %d", &state, &parent, &group, &session) !=
              4 ||
          state == 'Z' || state == 'X')
        continue;
      if (session == pid_ || environment_of(name).find('\0' + marker_ + '\0') != std::string::npos)
        found.push_back(std::stoi(name));
    }
    return found;
  }
  /// Process of an MPI rank, once it has started.
  std::optional<pid_t> rank(int number) const {
    const std::string variable = str('\0', "OMPI_COMM_WORLD_RANK=", number, '\0');
    for (const pid_t process : processes()) {
      if (environment_of(std::to_string(process)).find(variable) != std::string::npos) return process;
    }
    return std::nullopt;
  }
  /// True when nothing of the job is alive after some time.
  bool leaves_nothing_alive() {
    return wait_until([&] { return has_ended() && processes().empty(); }, 20);
  }

 private:
  static int next_number() {
    static std::atomic<int> number = 0;  // tests run jobs side by side
    return number++;
  }
  static std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> out;
    for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
    out.push_back(nullptr);
    return out;
  }
  static std::string environment_of(const std::string& process) {
    return '\0' + file_bytes("/proc/" + process + "/environ");
  }
  [[noreturn]] void run_child(const std::vector<char*>& argv, const std::vector<char*>& environment,
                              const char* folder) const {
    ::setsid();
    // A script that runs the tests in the background ignores these; a user's terminal does not.
    ::signal(SIGINT, SIG_DFL);
    ::signal(SIGHUP, SIG_DFL);
    const int in = ::open("/dev/null", O_RDONLY);
    const int out = ::open(out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    const int err = ::open(err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ::dup2(in, 0);
    ::dup2(out, 1);
    ::dup2(err, 2);
    if (::chdir(folder) == 0) ::execvpe(argv[0], argv.data(), environment.data());
    ::_exit(127);
  }
  void kill_all() {
    wait_until(
        [&] {
          for (const pid_t process : processes()) ::kill(process, SIGKILL);
          return has_ended() && processes().empty();
        },
        20);
  }

  std::string marker_;
  std::filesystem::path out_, err_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool reaped_ = false;
};

}  // namespace shoal::testing
