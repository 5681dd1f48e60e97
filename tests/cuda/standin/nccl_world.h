// What the files of the stand-in of NCCL share. Nothing here is for tests. Compiled without
// -fsanitize=thread, and with a lock of its own: one that TSan saw would order streams that nothing else
// does.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace shoal::standin {

class NcclLock {
 public:
  NcclLock();
  ~NcclLock();
  NcclLock(const NcclLock&) = delete;
  NcclLock& operator=(const NcclLock&) = delete;
};

enum class NcclOp : uint8_t { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };
const char* nccl_op_name(NcclOp op);

/// One call of one rank.
struct NcclCallRecord {
  NcclOp op = NcclOp::send;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t reduction = ncclSum;
  int peer = -1;  // of a message; the root of a broadcast
  cudaStream_t stream = nullptr;
};

/// A message that one side has come to; the other one does the copy.
struct NcclMessage {
  NcclCallRecord call;
  std::shared_ptr<bool> done;
  std::shared_ptr<char> order;  // for TSan, of the rank's work
};

/// A collective on its way.
struct NcclMeeting {
  std::vector<NcclCallRecord> calls;
  std::vector<bool> arrived;
  int num_arrived = 0;
  bool done = false;
  char order = 0;
};

/// Work that is in a stream and has not begun.
struct NcclLaunch {
  cudaStream_t stream = nullptr;
  uint64_t number = 0;    // in the stream
  uint64_t sequence = 0;  // in the communicator
};

/// All ranks of one unique id.
struct NcclWorld {
  int id = 0, size = 0, joined = 0;
  bool broken = false;        // a rank has aborted
  std::vector<bool> aborted;  // per rank
  std::vector<int> owners;    // thread of each rank
  std::map<uint64_t, std::shared_ptr<NcclMeeting>> meetings;
  std::map<std::pair<int, int>, std::deque<NcclMessage>> sends, receives;  // by (from, to)
  std::vector<std::deque<NcclLaunch>> launched;                            // per rank
};

size_t nccl_type_bytes(ncclDataType_t type);
/// calls: of all ranks. Sums run from the last rank to the first and round at each step, as NCCL is free to.
void carry_out(const std::vector<NcclCallRecord>& calls);

/// Puts the calls of one group on one communicator into their stream.
void launch_nccl(ncclComm_t comm, std::vector<NcclCallRecord> calls);

void log_nccl(ncclComm_t comm, const NcclCallRecord& call);

}  // namespace shoal::standin

struct ncclComm {
  std::shared_ptr<shoal::standin::NcclWorld> world;
  int rank = 0;
  uint64_t num_collectives = 0, num_launches = 0;
  int polls = 0;  // left that say "in progress"
  bool finalized = false;
  std::string last_error;
};
