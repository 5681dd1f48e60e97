// The functions of NCCL that the backend uses: arguments, groups of calls, communicators and their states.
#include "tests/cuda/standin/nccl.h"

#include <cuda_runtime_api.h>
#include <sched.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/base/error.h"
#include "tests/cuda/standin/failures.h"
#include "tests/cuda/standin/nccl_world.h"

namespace shoal::standin {

namespace {

struct State {
  std::map<int, std::shared_ptr<NcclWorld>> worlds;  // not complete
  int num_ids = 0, num_threads = 0, num_communicators = 0, num_aborts = 0;
  std::map<int, ncclResult_t> errors;  // of ranks
  bool one_device = false;
};
State& state() {
  static auto* shared = new State;
  return *shared;
}

std::atomic_flag locked = ATOMIC_FLAG_INIT;

/// A number for the calling thread.
int this_owner() {
  thread_local const int mine = [] {
    const NcclLock lock;
    return ++state().num_threads;
  }();
  return mine;
}

/// The calls of the calling thread between ncclGroupStart and ncclGroupEnd.
struct PendingGroup {
  int depth = 0;
  std::vector<std::pair<ncclComm_t, NcclCallRecord>> calls;
};
PendingGroup& pending() {
  thread_local PendingGroup mine;
  return mine;
}

void launch_pending() {
  std::vector<std::pair<ncclComm_t, NcclCallRecord>> calls = std::move(pending().calls);
  pending().calls.clear();
  while (!calls.empty()) {
    const ncclComm_t comm = calls.front().first;
    const cudaStream_t stream = calls.front().second.stream;
    const bool messages = calls.front().second.op >= NcclOp::send;
    std::vector<NcclCallRecord> now;
    std::vector<std::pair<ncclComm_t, NcclCallRecord>> later;
    for (auto& [of, call] : calls) {
      // Messages of one group go together; a collective goes alone.
      const bool same = of == comm && (messages ? call.op >= NcclOp::send : now.empty());
      if (!same) {
        later.emplace_back(of, call);
        continue;
      }
      SHOAL_CHECK(call.stream == stream, "stand-in of NCCL: messages of one group in two streams");
      now.push_back(call);
    }
    comm->polls = 2;
    launch_nccl(comm, std::move(now));
    calls = std::move(later);
  }
}

/// ncclSuccess unless a failure of `function` is planted.
ncclResult_t enter(const char* function) {
  return planted_failure(function) == 0 ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t submit(const char* function, ncclComm_t comm, const NcclCallRecord& call) {
  if (const ncclResult_t planted = enter(function); planted != ncclSuccess) return planted;
  SHOAL_CHECK(comm != nullptr && comm->world && !comm->finalized, "stand-in of NCCL: ", nccl_op_name(call.op),
              " on a communicator that has ended or was never made");
  SHOAL_CHECK(comm->polls == 0, "stand-in of NCCL: ", nccl_op_name(call.op),
              " while ncclCommGetAsyncError still says that the last call is in progress");
  const bool message = call.op >= NcclOp::send;
  const bool peer_known = call.peer >= 0 && call.peer < comm->world->size;
  SHOAL_CHECK(!(message || call.op == NcclOp::broadcast) || peer_known,
              "stand-in of NCCL: ", nccl_op_name(call.op), " with rank ", call.peer, " of ",
              comm->world->size);
  SHOAL_CHECK(!message || call.peer != comm->rank || pending().depth > 0,
              "stand-in of NCCL: a message to oneself outside of a group never ends");
  log_nccl(comm, call);
  pending().calls.emplace_back(comm, call);
  if (pending().depth > 0) return ncclSuccess;
  launch_pending();
  return ncclInProgress;
}

}  // namespace

NcclLock::NcclLock() {
  while (locked.test_and_set(std::memory_order_acquire)) sched_yield();
}
NcclLock::~NcclLock() {
  locked.clear(std::memory_order_release);
}

const char* nccl_op_name(NcclOp op) {
  static constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather",
                                           "broadcast",  "send",           "receive"};
  return kNames[static_cast<size_t>(op)];
}

size_t nccl_type_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64:
    case ncclInt64:
    case ncclUint64:
      return 8;
    case ncclFloat32:
    case ncclInt32:
    case ncclUint32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

void set_nccl_error(int rank, ncclResult_t error) {
  const NcclLock lock;
  state().errors[rank] = error;
}
int num_nccl_communicators() {
  const NcclLock lock;
  return state().num_communicators;
}
int num_nccl_aborts() {
  const NcclLock lock;
  return state().num_aborts;
}
void share_one_device(bool share) {
  const NcclLock lock;
  state().one_device = share;
}

}  // namespace shoal::standin

using namespace shoal::standin;

extern "C" {

cudaError_t cudaDeviceGetPCIBusId(char* name, int length, int) {
  if (const int planted = planted_failure("cudaDeviceGetPCIBusId"); planted != 0)
    return static_cast<cudaError_t>(planted);
  const int device = this_owner();
  const NcclLock lock;
  std::snprintf(name, static_cast<size_t>(length), "0000:%02X:00.0", state().one_device ? 0 : device);
  return cudaSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const ncclResult_t planted = enter("ncclGetUniqueId"); planted != ncclSuccess) return planted;
  const NcclLock lock;
  const int number = ++state().num_ids;
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (const ncclResult_t planted = enter("ncclCommInitRankConfig"); planted != ncclSuccess) return planted;
  SHOAL_CHECK(config != nullptr && config->blocking == 0,
              "stand-in of NCCL: only communicators that do not block");
  int number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  const int owner = this_owner();
  const NcclLock lock;
  std::shared_ptr<NcclWorld>& world = state().worlds[number];
  if (!world) {
    world = std::make_shared<NcclWorld>();
    world->id = number;
    world->size = size;
    world->owners.resize(static_cast<size_t>(size));
    world->launched.resize(static_cast<size_t>(size));
    world->aborted.resize(static_cast<size_t>(size));
  }
  int& slot = world->owners.at(static_cast<size_t>(rank));
  SHOAL_CHECK(number > 0 && world->size == size && slot == 0, "stand-in of NCCL: rank ", rank, " of ", size,
              " joins twice, or with another size than the others");
  slot = owner;
  world->joined++;
  *comm = new ncclComm{world, rank, 0, 0, 0, false, ""};
  state().num_communicators++;
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (const ncclResult_t planted = enter("ncclCommGetAsyncError"); planted != ncclSuccess) return planted;
  const NcclLock lock;
  *error = ncclSuccess;
  const auto injected = state().errors.find(comm->rank);
  if (comm->world->broken) {
    *error = ncclRemoteError;
  } else if (injected != state().errors.end() && injected->second != ncclSuccess) {
    *error = injected->second;
  } else if (comm->world->joined < comm->world->size) {
    *error = ncclInProgress;
  } else if (comm->polls > 0) {
    comm->polls--;
    *error = ncclInProgress;
  }
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  if (const ncclResult_t planted = enter("ncclCommFinalize"); planted != ncclSuccess) return planted;
  const NcclLock lock;
  comm->finalized = true;
  comm->polls = 2;
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  SHOAL_CHECK(comm->finalized, "stand-in of NCCL: ncclCommDestroy before ncclCommFinalize");
  const NcclLock lock;
  state().num_communicators--;
  delete comm;
  return enter("ncclCommDestroy");
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const NcclLock lock;
  comm->world->broken = true;
  comm->world->aborted[static_cast<size_t>(comm->rank)] = true;
  state().num_communicators--;
  state().num_aborts++;
  delete comm;
  return enter("ncclCommAbort");
}

const char* ncclGetErrorString(ncclResult_t result) {
  static constexpr const char* kTexts[] = {"no error",
                                           "unhandled cuda error",
                                           "unhandled system error",
                                           "internal error",
                                           "invalid argument",
                                           "invalid usage",
                                           "remote process exited or there was a network error",
                                           "NCCL operation in progress"};
  return result < ncclNumResults ? kTexts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) {
  return "stand-in";
}

ncclResult_t ncclGroupStart() {
  if (const ncclResult_t planted = enter("ncclGroupStart"); planted != ncclSuccess) return planted;
  pending().depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  SHOAL_CHECK(pending().depth > 0, "stand-in of NCCL: ncclGroupEnd without ncclGroupStart");
  const ncclResult_t planted = enter("ncclGroupEnd");
  if (--pending().depth > 0 || pending().calls.empty()) return planted;
  if (planted != ncclSuccess) {
    pending().calls.clear();
    return planted;
  }
  launch_pending();
  return ncclInProgress;
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit("ncclSend", comm, {NcclOp::send, data, nullptr, count, type, ncclSum, peer, stream});
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit("ncclRecv", comm, {NcclOp::receive, nullptr, data, count, type, ncclSum, peer, stream});
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclAllReduce", comm, {NcclOp::all_reduce, in, out, count, type, op, -1, stream});
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclReduceScatter", comm, {NcclOp::reduce_scatter, in, out, count, type, op, -1, stream});
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return submit("ncclAllGather", comm, {NcclOp::all_gather, in, out, count, type, ncclSum, -1, stream});
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit("ncclBroadcast", comm, {NcclOp::broadcast, in, out, count, type, ncclSum, root, stream});
}

}  // extern "C"
