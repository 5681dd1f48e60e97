#include "parallel/bootstrap.h"

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <set>
#include <string_view>
#include <thread>

#include "core/base/log.h"
#include "core/base/random.h"
#include "parallel/mpi_communicator.h"

namespace shoal {

namespace {

/// How long a rank with a UsageError waits to learn whether all ranks have the same one.
constexpr auto kAgreementTime = std::chrono::seconds(2);
/// From printing a message to the abort.
constexpr auto kPrintTime = std::chrono::milliseconds(300);

/// The variable as a number, or `absent`. A Slurm list like "4(x2),1" counts as its first number.
int env_int(const char* name, int absent) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text < '0' || *text > '9') return absent;
  return static_cast<int>(std::strtol(text, nullptr, 10));
}

struct LauncherNames {
  const char *rank, *size, *local_rank, *local_size;
};
// Open MPI, MPICH and relatives (Hydra), Slurm. PMIX_RANK alone says only that some launcher was there.
constexpr LauncherNames kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
};

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

void print_error(int rank, int size, const std::string& message) {
  std::fflush(stdout);
  if (size > 1) {
    std::fprintf(stderr, "[rank %d] error: %s\n", rank, message.c_str());
  } else {
    std::fprintf(stderr, "error: %s\n", message.c_str());
  }
  std::fflush(stderr);
}

/// What went wrong in body, if anything.
struct Failure {
  bool failed = false;
  ExitCode code = ExitCode::failure;
  std::string message;
};

int run_body(const std::function<int(const std::shared_ptr<Communicator>&)>& body,
             const std::shared_ptr<Communicator>& world, Failure& failure) {
  try {
    return body(world);
  } catch (const Error& e) {
    failure = {true, e.code(), e.what()};
  } catch (const std::bad_alloc&) {
    failure = {
        true, ExitCode::failure,
        "out of memory on the host; use a smaller micro-batch, sequence length or model, or fewer ranks "
        "per host"};
  } catch (const std::exception& e) {
    failure = {true, ExitCode::failure, e.what()};
  } catch (...) {
    failure = {true, ExitCode::failure, "an exception that is not a std::exception"};
  }
  return static_cast<int>(failure.code);
}

void start_mpi(const LaunchInfo& info) {
  // A rank must not outlive its launcher, not even when the launcher is killed with SIGKILL: it would wait
  // for its peers for ever. SIGKILL, because SIGTERM asks the trainer to save, which needs the peers.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() == 1 && info.size > 1) log::debug("the launcher has gone, or it is process 1 of a container");
  // Ranks that share a core must give it away while they wait, or every message costs a time slice.
  if (info.local_size > usable_cores()) setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  int provided = 0;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  SHOAL_CHECK(code == MPI_SUCCESS, "MPI_Init_thread failed with code ", code);
  SHOAL_CHECK(provided >= MPI_THREAD_FUNNELED, "MPI_Init_thread: this MPI offers thread level ", provided,
              ", expected at least MPI_THREAD_FUNNELED (", MPI_THREAD_FUNNELED, ")");
}

/// Paths of Open MPI's shared memory segments that this process has mapped: its own and its neighbours'.
std::set<std::string> mapped_segments() {
  std::set<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path != std::string::npos && line.find("/vader_segment.", path) != std::string::npos &&
        line.find(" (deleted)", path) == std::string::npos)
      paths.insert(line.substr(path));
  }
  return paths;
}

/// The segments have names in /dev/shm, which stay, 4 MiB a rank, when the launcher is killed with SIGKILL.
/// Once every rank has mapped those of its host the names are needed no more. Removes this rank's and returns
/// it; "" when there is none. Collective.
std::string forget_segment_name(const LaunchInfo& info) {
  const std::set<std::string> paths = mapped_segments();
  const std::string ending = str('.', info.local_rank);  // vader_segment.<host>.<user>.<job>.<local rank>
  const auto mine = std::find_if(paths.begin(), paths.end(),
                                 [&](const std::string& path) { return path.ends_with(ending); });
  int complete = static_cast<int>(paths.size()) == info.local_size && mine != paths.end() ? 1 : 0;
  int all_complete = 0;
  MPI_Allreduce(&complete, &all_complete, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  // Not all: another transport, or segments that are mapped on first use.
  if (all_complete == 0 || ::unlink(mine->c_str()) != 0) return "";
  return *mine;
}

void warn_about_launcher(int size) {
  const int tasks = env_int("SLURM_STEP_NUM_TASKS", 1);
  if (size == 1 && tasks > 1 && env_int("SLURM_PROCID", 0) == 0) {
    log::warn("Slurm started ", tasks, " tasks but MPI sees each as a world of one, so ", tasks,
              " separate runs are starting: the MPI plugin does not fit; use `srun --mpi=pmix` (see `srun "
              "--mpi=list`) or start with mpirun");
  }
}

/// True when all ranks fail with this message and nobody has a call in flight. Gives up after kAgreementTime.
bool all_ranks_agree(MPI_Comm comm, int size, const std::string& message) {
  const std::array<uint64_t, 2> mine = {stream_id(message), num_open_mpi_calls()};
  std::vector<uint64_t> all(2 * static_cast<size_t>(size));
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Iallgather(mine.data(), 2, MPI_UINT64_T, all.data(), 2, MPI_UINT64_T, comm, &request) !=
      MPI_SUCCESS)
    return false;
  const auto deadline = std::chrono::steady_clock::now() + kAgreementTime;
  int complete = 0;
  while (MPI_Test(&request, &complete, MPI_STATUS_IGNORE) == MPI_SUCCESS && complete == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      // MPI may still write into `all`; the caller aborts the job.
      static std::vector<uint64_t> kept;
      kept.swap(all);
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (size_t r = 0; r < static_cast<size_t>(size); r++) {
    if (all[2 * r] != mine[0] || all[2 * r + 1] != 0) return false;
  }
  return true;
}

/// Prints and ends the job, or returns when all ranks may leave through MPI_Finalize.
void report(MPI_Comm agreement, int rank, int size, const Failure& failure) {
  if (failure.code == ExitCode::usage && all_ranks_agree(agreement, size, failure.message)) {
    if (rank == 0) print_error(0, 1, failure.message);
    return;
  }
  print_error(rank, size, failure.message);
  // mpirun drops what is still in its pipes when a job aborts.
  std::this_thread::sleep_for(kPrintTime);
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(failure.code));
}

int run_mpi_world(const LaunchInfo& info,
                  const std::function<int(const std::shared_ptr<Communicator>&)>& body) {
  start_mpi(info);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  log::set_rank(rank, size);
  warn_about_launcher(size);
  const std::string segment = forget_segment_name(info);
  MPI_Comm agreement = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &agreement);
  MPI_Comm_set_errhandler(agreement, MPI_ERRORS_RETURN);
  std::shared_ptr<Communicator> world = make_mpi_world();
  Failure failure;
  const int code = run_body(body, world, failure);
  if (failure.failed) report(agreement, rank, size, failure);
  world.reset();
  std::fflush(stdout);
  MPI_Comm_free(&agreement);
  // MPI_Finalize removes the name and complains when it is not there.
  if (!segment.empty()) std::ofstream(segment).close();
  MPI_Finalize();
  return code;
}

}  // namespace

LaunchInfo launch_info() {
  LaunchInfo info;
  for (const LauncherNames& names : kLaunchers) {
    if (env_int(names.rank, -1) < 0 || env_int(names.size, -1) < 1) continue;
    info.mpi = true;
    info.rank = env_int(names.rank, 0);
    info.size = env_int(names.size, 1);
    info.local_rank = env_int(names.local_rank, 0);
    info.local_size = env_int(names.local_size, 1);
    return info;
  }
  if (env_int("PMIX_RANK", -1) >= 0) {
    info.mpi = true;
    info.rank = env_int("PMIX_RANK", 0);
  }
  return info;
}

int run_world(const std::function<int(const std::shared_ptr<Communicator>& world)>& body) {
  const LaunchInfo info = launch_info();
  if (info.mpi) return run_mpi_world(info, body);
  Failure failure;
  const int code = run_body(body, make_single_communicator(), failure);
  if (failure.failed) print_error(0, 1, failure.message);
  return code;
}

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown";
  std::string version(text.data(), static_cast<size_t>(length));
  version = version.substr(0, version.find_first_of(",\n"));
  // "Open MPI v4.1.4" -> "Open MPI 4.1.4"
  if (const size_t v = version.find(" v"); v != std::string::npos) version.erase(v + 1, 1);
  return version;
}

}  // namespace shoal
