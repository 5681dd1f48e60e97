#include "parallel/nccl_group.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "core/base/log.h"

namespace shoal {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The groups of this thread. When one fails all are aborted: work of the others waits in the same device.
std::vector<NcclGroup*>& groups_of_thread() {
  thread_local std::vector<NcclGroup*> groups;
  return groups;
}

constexpr const char* kAdvice =
    "a rank has ended, is stopped, hung or much slower than the others; SHOAL_COLLECTIVE_TIMEOUT sets the "
    "limit in seconds, 0 is none";

}  // namespace

void check_cuda(cudaError_t code, const char* function, const std::string& where) {
  if (code != cudaSuccess) throw Error(str(where, ": ", function, " failed: ", cudaGetErrorString(code)));
}

NcclGroup::NcclGroup(const std::shared_ptr<Communicator>& host, Device device, const NcclOptions& options)
    : options_(options),
      device_(device),
      name_(host->name()),
      rank_(host->rank()),
      size_(host->size()),
      stream_(make_stream(device)) {
  groups_of_thread().push_back(this);
  try {
    connect(host);
  } catch (...) {
    std::erase(groups_of_thread(), this);
    abort();
    throw;
  }
  wait_check_ = add_host_wait_check([this](double waited_s) { check_wait(waited_s); });
}

NcclGroup::~NcclGroup() {
  wait_check_ = nullptr;
  std::erase(groups_of_thread(), this);
  // While an exception unwinds the peers may be gone, and nobody waits for what is in flight.
  if (comm_ == nullptr || std::uncaught_exceptions() > 0) {
    abort();
    return;
  }
  try {
    check(ncclCommFinalize(comm_), "ncclCommFinalize", where("the end of NCCL"));
    ncclCommDestroy(std::exchange(comm_, nullptr));
  } catch (const std::exception& e) {
    log::warn(e.what());
    abort();
  }
}

cudaStream_t NcclGroup::cuda_stream() const {
  return reinterpret_cast<cudaStream_t>(stream_.handle);
}

std::string NcclGroup::where(const std::string& call) const {
  return str(call, " [", name_, ", rank ", rank_, " of ", size_, "]");
}

std::string NcclGroup::text(const Call& call) const {
  return str(where(call.signature.text()), ", call ", call.number);
}

void NcclGroup::connect(const std::shared_ptr<Communicator>& host) {
  ncclUniqueId id{};
  std::string problem;
  if (rank_ == 0) {
    const ncclResult_t code = ncclGetUniqueId(&id);
    if (code != ncclSuccess) problem = str("ncclGetUniqueId failed: ", ncclGetErrorString(code));
  }
  // All ranks learn whether the first one could.
  problem = host->broadcast_string(problem, 0);
  SHOAL_CHECK(problem.empty(), where("nccl"), ": ", problem);
  const std::string bytes = host->broadcast_string({id.internal, sizeof id.internal}, 0);
  std::memcpy(id.internal, bytes.data(), sizeof id.internal);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // or nothing could be said about a rank that does not come
  check(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config), "ncclCommInitRankConfig",
        where("the start of NCCL"));
}

ncclResult_t NcclGroup::settle(const std::string& what) {
  const Clock::time_point begin = Clock::now();
  for (int turn = 0;; turn++) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t code = ncclCommGetAsyncError(comm_, &state);
    if (code != ncclSuccess) return code;
    if (state != ncclInProgress) return state;
    if (turn < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (options_.limit_s > 0 && seconds_since(begin) > options_.limit_s)
      fail(str("waited ", options_.limit_s, " s in ", what, " for other ranks, and gave up: ", kAdvice));
  }
}

void NcclGroup::check(ncclResult_t code, const char* function, const std::string& what) {
  if (code == ncclInProgress) code = settle(what);
  if (code == ncclSuccess) return;
  fail(str(what, ": ", function, " failed: ", ncclGetErrorString(code), " (",
           comm_ == nullptr ? "" : ncclGetLastError(comm_), "); NCCL_DEBUG=INFO says more"));
}

void NcclGroup::check(ncclResult_t code, const char* function) {
  if (code != ncclSuccess) check(code, function, text(current_));
}

void NcclGroup::begin(const CollectiveSignature& signature) {
  current_ = {signature, num_calls_++, nullptr};
  SHOAL_CHECK(comm_ != nullptr, text(current_), ": NCCL was aborted: ", failure_);
  forget_ended();
  issuing_ = true;
}

void NcclGroup::end() {
  issuing_ = false;
  cudaEvent_t mark = nullptr;
  if (const cudaError_t code = cudaEventCreateWithFlags(&mark, cudaEventDisableTiming); code != cudaSuccess)
    check_cuda(code, "cudaEventCreateWithFlags", text(current_));
  current_.end.reset(mark, [](cudaEvent_t event) { cudaEventDestroy(event); });
  if (const cudaError_t code = cudaEventRecord(mark, cuda_stream()); code != cudaSuccess)
    check_cuda(code, "cudaEventRecord", text(current_));
  open_.push_back(std::exchange(current_, {}));
}

void NcclGroup::forget_ended() {
  while (!open_.empty() && cudaEventQuery(open_.front().end.get()) == cudaSuccess) open_.pop_front();
}

void NcclGroup::check_wait(double waited_s) {
  if (comm_ == nullptr) return;
  ncclResult_t state = ncclSuccess;
  ncclResult_t code = ncclCommGetAsyncError(comm_, &state);
  if (code == ncclSuccess) code = state;
  const bool late = options_.limit_s > 0 && waited_s > options_.limit_s;
  if ((code == ncclSuccess || code == ncclInProgress) && !late) return;
  forget_ended();
  if (late && open_.empty() && !issuing_) return;  // the device works on something else
  const std::string call = !open_.empty() ? text(open_.front())
                           : issuing_     ? text(current_)
                                          : where("no call in flight");
  if (late)
    fail(str("waited ", options_.limit_s, " s in ", call, " for other ranks, and gave up: ", kAdvice));
  const bool elsewhere = code == ncclRemoteError || code == ncclSystemError;
  fail(str(
      call, ": NCCL reports: ", ncclGetErrorString(code), " (", ncclGetLastError(comm_), "); ",
      elsewhere ? "another rank has ended or the connection to it is lost" : "NCCL_DEBUG=INFO says more"));
}

void NcclGroup::fail(const std::string& message) {
  const std::vector<NcclGroup*> groups = groups_of_thread();
  for (NcclGroup* group : groups) {
    group->failure_ = message;
    group->abort();
  }
  failure_ = message;
  abort();
  throw Error(message);
}

void NcclGroup::abort() noexcept {
  if (comm_ != nullptr) ncclCommAbort(std::exchange(comm_, nullptr));
}

}  // namespace shoal
