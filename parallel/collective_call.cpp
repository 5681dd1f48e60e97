#include "parallel/collective_call.h"

namespace shoal {

const char* collective_name(CollectiveKind kind) {
  static constexpr const char* kNames[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                           "broadcast",  "barrier",    "split"};
  return kNames[static_cast<size_t>(kind)];
}

const char* reduce_op_name(ReduceOp op) {
  static constexpr const char* kNames[] = {"sum", "max", "min"};
  return kNames[static_cast<size_t>(op)];
}

std::string CollectiveSignature::text() const {
  const char* name = collective_name(kind);
  switch (kind) {
    case CollectiveKind::all_reduce:
      return str(name, '(', reduce_op_name(op), ", ", dtype, ", ", count, " elements)");
    case CollectiveKind::reduce_scatter:
      return str(name, '(', reduce_op_name(op), ", ", dtype, ", ", count, " elements per rank)");
    case CollectiveKind::all_gather:
      return str(name, '(', dtype, ", ", count, " elements per rank)");
    case CollectiveKind::all_to_all:
      return str(name, '(', dtype, ", rows of ", count, " elements)");
    case CollectiveKind::broadcast:
      return str(name, '(', dtype, ", ", count, " elements, root ", root, ')');
    case CollectiveKind::barrier:
    case CollectiveKind::split:
      break;
  }
  return str(name, "()");
}

Work forward_call(Communicator& to, const CollectiveCall& call) {
  const CollectiveSignature& s = call.signature;
  switch (s.kind) {
    case CollectiveKind::all_reduce:
      return to.all_reduce(call.out, s.op);
    case CollectiveKind::all_gather:
      return to.all_gather(call.in, call.out);
    case CollectiveKind::reduce_scatter:
      return to.reduce_scatter(call.in, call.out, s.op);
    case CollectiveKind::all_to_all:
      return to.all_to_all(call.in, call.out, call.send_rows, call.recv_rows);
    case CollectiveKind::broadcast:
      return to.broadcast(call.out, s.root);
    case CollectiveKind::barrier:
    case CollectiveKind::split:
      break;
  }
  to.barrier();
  return Work{};
}

std::string mismatch_message(const std::string& group, uint64_t call_number, int rank_a,
                             const CollectiveSignature& a, int rank_b, const CollectiveSignature& b) {
  return str("collective calls differ [", group, ", call ", call_number, "]: rank ", rank_a, " called ",
             a.text(), ", rank ", rank_b, " called ", b.text(),
             "; all ranks of a group must make the same calls in the same order");
}

std::string row_mismatch_message(const std::string& group, uint64_t call_number, int from, int64_t sent,
                                 int to, int64_t expected) {
  return str("all_to_all [", group, ", call ", call_number, "]: rank ", from, " sends ", sent,
             " rows to rank ", to, ", which expects ", expected,
             "; were the counts of the two ranks made by different plans?");
}

}  // namespace shoal
