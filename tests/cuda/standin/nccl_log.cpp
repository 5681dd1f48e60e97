// What the ranks have called, and how that differs.
#include <set>

#include "core/base/error.h"
#include "tests/cuda/standin/nccl.h"
#include "tests/cuda/standin/nccl_world.h"

namespace shoal::standin {

namespace {

struct Entry {
  int world, rank;
  NcclCallRecord call;
  int peer_owner;  // the thread of the other side of a message
  std::string text(bool with_peer) const {
    return str(nccl_op_name(call.op), '(', call.count, " of type ", static_cast<int>(call.type),
               with_peer ? str(", rank ", call.peer) : "", ") in group ", world);
  }
};

struct Log {
  std::map<int, std::vector<Entry>> entries;  // by thread
  std::map<int, std::set<int>> members;       // threads of each group
  size_t size = 0;
};
Log& log() {
  static auto* shared = new Log;
  return *shared;
}

/// Collectives of `owner` in groups that `other` is in too; or messages from `from` to `to`, of either's log.
std::vector<std::string> shared_collectives(int owner, int other) {
  std::vector<std::string> calls;
  for (const Entry& e : log().entries[owner]) {
    if (e.call.op < NcclOp::send && log().members[e.world].contains(other)) calls.push_back(e.text(true));
  }
  return calls;
}
std::vector<std::string> messages(int owner, NcclOp op, int peer) {
  std::vector<std::string> calls;
  for (const Entry& e : log().entries[owner]) {
    if (e.call.op != op || e.peer_owner != peer) continue;
    calls.push_back(str(e.call.count, " of type ", static_cast<int>(e.call.type), " in group ", e.world));
  }
  return calls;
}

std::string first_difference(const std::string& a, const std::vector<std::string>& of_a, const std::string& b,
                             const std::vector<std::string>& of_b) {
  for (size_t i = 0; i < std::max(of_a.size(), of_b.size()); i++) {
    const std::string left = i < of_a.size() ? of_a[i] : "nothing",
                      right = i < of_b.size() ? of_b[i] : "nothing";
    if (left != right) return str("call ", i, ": ", a, ' ', left, ", ", b, ' ', right);
  }
  return "";
}

}  // namespace

void log_nccl(ncclComm_t comm, const NcclCallRecord& call) {
  const NcclLock lock;
  const NcclWorld& world = *comm->world;
  const int owner = world.owners[static_cast<size_t>(comm->rank)];
  const int peer = call.op >= NcclOp::send ? world.owners[static_cast<size_t>(call.peer)] : 0;
  log().entries[owner].push_back({world.id, comm->rank, call, peer});
  log().members[world.id].insert(world.owners.begin(), world.owners.end());
  log().size++;
}

std::string nccl_log_problem() {
  const NcclLock lock;
  std::vector<int> owners;
  for (const auto& [owner, entries] : log().entries) owners.push_back(owner);
  for (const int a : owners) {
    for (const int b : owners) {
      if (a == b) continue;
      std::string problem = first_difference(str("thread ", a, " calls"), shared_collectives(a, b),
                                             str("thread ", b, " calls"), shared_collectives(b, a));
      if (problem.empty()) {
        problem = first_difference(str("thread ", a, " sends"), messages(a, NcclOp::send, b),
                                   str("thread ", b, " receives"), messages(b, NcclOp::receive, a));
      }
      if (!problem.empty()) return problem;
    }
  }
  return "";
}

size_t nccl_log_size() {
  const NcclLock lock;
  return log().size;
}

void clear_nccl_log() {
  const NcclLock lock;
  log() = {};
}

}  // namespace shoal::standin
