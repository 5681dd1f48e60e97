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
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/base/log.h"
#include "core/base/random.h"
#include "core/base/text.h"
#include "parallel/collective_check.h"
#include "parallel/launcher_leftovers.h"
#include "parallel/mpi_communicator.h"
#include "parallel/open_calls.h"
#include "parallel/shared_communicator.h"
#include "parallel/waiting.h"

namespace shoal {

namespace {

/// How long a failing rank waits to learn which others have failed.
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

/// `ranks`: all that failed with this message, ascending. What befalls every rank alike is not about ranks.
void print_error(const std::vector<int>& ranks, int size, const std::string& message) {
  std::fflush(stdout);
  if (std::ssize(ranks) < size) {
    std::fprintf(stderr, "[%s] error: %s\n", rank_list(ranks).c_str(), message.c_str());
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

/// `problem`: what is wrong before anything has begun, or "".
int run_body(const std::function<int(const std::shared_ptr<Communicator>&)>& body,
             const std::shared_ptr<Communicator>& world, const std::string& problem, Failure& failure) {
  try {
    if (!problem.empty()) throw UsageError(problem);
    return body(world);
  } catch (const Error& e) {
    failure = {true, e.code(), e.what()};
  } catch (const std::bad_alloc&) {
    failure = {
        true, ExitCode::failure,
        "out of memory on the host; use a smaller micro-batch, sequence length or model, or fewer ranks "
        "per host"};
  } catch (const std::exception& e) {
    failure = {true, ExitCode::failure, exception_text(e)};
  } catch (...) {
    failure = {true, ExitCode::failure, "an exception that is not a std::exception"};
  }
  return static_cast<int>(failure.code);
}

void start_mpi(const LaunchInfo& info) {
  if (info.local_rank == 0) tidy_launcher_folders();
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

/// What a failing rank tells the others.
struct Note {
  uint64_t message = 0;     // its stream_id
  uint64_t open_calls = 0;  // collectives in flight
  uint64_t code = 0;
};
static_assert(std::is_trivially_copyable_v<Note>);

/// Notes of all ranks that fail within kAgreementTime, by rank; nullopt for the others. Every failing rank
/// sends its note to all: a collective would tell nothing when one rank is missing.
std::vector<std::optional<Note>> exchange_notes(MPI_Comm comm, int rank, int size, const Note& mine) {
  const auto ranks = static_cast<size_t>(size);
  // Kept for good: MPI may still write here when the time is over; the caller then aborts the job.
  static std::vector<Note> notes;
  static std::vector<MPI_Request> receives, sends;
  notes.assign(ranks, mine);
  receives.assign(ranks, MPI_REQUEST_NULL);
  sends.assign(ranks, MPI_REQUEST_NULL);
  for (int r = 0; r < size; r++) {
    if (r == rank) continue;
    const auto i = static_cast<size_t>(r);
    MPI_Irecv(&notes[i], sizeof(Note), MPI_BYTE, r, 0, comm, &receives[i]);
    MPI_Isend(&mine, sizeof(Note), MPI_BYTE, r, 0, comm, &sends[i]);
  }
  const auto deadline = std::chrono::steady_clock::now() + kAgreementTime;
  int received = 0, sent = 0;
  while (received == 0 || sent == 0) {
    MPI_Testall(size, receives.data(), &received, MPI_STATUSES_IGNORE);
    MPI_Testall(size, sends.data(), &sent, MPI_STATUSES_IGNORE);
    if (std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::vector<std::optional<Note>> known(ranks);
  for (size_t i = 0; i < ranks; i++) {
    int complete = 1;
    if (receives[i] != MPI_REQUEST_NULL) MPI_Request_get_status(receives[i], &complete, MPI_STATUS_IGNORE);
    if (complete != 0) known[i] = notes[i];
  }
  return known;
}

/// Prints and ends the job, or returns when all ranks may leave through MPI_Finalize: all have failed and
/// nobody has a call in flight. Ranks with the same message speak once, through the lowest of them.
void report(MPI_Comm comm, int rank, int size, const Failure& failure) {
  static Note mine;
  mine = {stream_id(failure.message), num_open_calls(), static_cast<uint64_t>(failure.code)};
  const std::vector<std::optional<Note>> notes = exchange_notes(comm, rank, size, mine);
  bool all_may_leave = true;
  std::vector<int> alike;
  for (int r = 0; r < size; r++) {
    const std::optional<Note>& note = notes[static_cast<size_t>(r)];
    all_may_leave &= note && note->open_calls == 0 && note->code == mine.code;
    if (note && note->message == mine.message && note->code == mine.code) alike.push_back(r);
  }
  if (alike.front() == rank) print_error(alike, size, failure.message);
  if (all_may_leave) return;
  // mpirun drops what is still in its pipes when a job aborts.
  std::this_thread::sleep_for(kPrintTime);
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(failure.code));
}

/// What the environment says of collectives; ranks that disagree would not call the same ones.
struct CollectiveSettings {
  bool shared = false, checks = false;
  std::string problem;  // a value that is none
};
CollectiveSettings collective_settings() {
  CollectiveSettings settings;
  try {
    settings.shared = shared_collectives_wanted();
    settings.checks = collective_checks_enabled();
    wait_limit_s();
  } catch (const UsageError& e) {
    settings.problem = e.what();
    // The ranks still have to meet, to say so once.
    for (const char* name : {"SHOAL_COLLECTIVES", "SHOAL_CHECK_COLLECTIVES", "SHOAL_COLLECTIVE_TIMEOUT"})
      unsetenv(name);
  }
  return settings;
}

/// What this rank has to say when the ranks' settings do not fit together; "" when they do, on every rank.
/// Collective.
std::string settings_problem(const CollectiveSettings& mine) {
  const std::array<int, 3> values = {mine.shared ? 1 : 0, mine.checks ? 1 : 0, mine.problem.empty() ? 0 : 1};
  std::array<int, 3> least{}, most{};
  MPI_Allreduce(values.data(), least.data(), 3, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  MPI_Allreduce(values.data(), most.data(), 3, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  if (!mine.problem.empty()) return mine.problem;
  if (most[2] != 0) return "the environment of another rank is refused";
  std::string list;
  if (least[0] != most[0]) list += "\n  SHOAL_COLLECTIVES: mpi on some ranks, auto on others";
  if (least[1] != most[1]) list += "\n  SHOAL_CHECK_COLLECTIVES: 1 on some ranks, 0 or unset on others";
  if (list.empty()) return "";
  return str("all ranks must be started with the same environment; different are", list,
             "\n  give it to all of them, with mpirun -x NAME=VALUE or srun --export");
}

int run_mpi_world(const LaunchInfo& info,
                  const std::function<int(const std::shared_ptr<Communicator>&)>& body,
                  const CollectiveSettings& settings) {
  std::optional<StepLimit> limit(std::in_place, "the start of MPI", info.rank);
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
  const std::string problem = settings_problem(settings);
  std::shared_ptr<Communicator> world = make_mpi_world();
  if (settings.shared && problem.empty()) world = share_memory(std::move(world));
  limit.reset();
  if (problem.empty()) note_rank_processes(*world);
  Failure failure;
  const int code = run_body(body, world, problem, failure);
  if (failure.failed) report(agreement, rank, size, failure);
  limit.emplace("the end of MPI", rank);
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
  const CollectiveSettings settings = collective_settings();
  if (info.mpi) return run_mpi_world(info, body, settings);
  Failure failure;
  const int code = run_body(body, make_single_communicator(), settings.problem, failure);
  if (failure.failed) print_error({0}, 1, failure.message);
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
