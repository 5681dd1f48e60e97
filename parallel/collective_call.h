// CollectiveCall: one call on a communicator, as data. CheckedCommunicator makes it, implementations carry it
// out, and its signature is what all ranks of a group must agree on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor/tensor.h"
#include "parallel/communicator.h"

namespace shoal {

const char* reduce_op_name(ReduceOp op);  // "sum"

/// What must be equal on all ranks of a group. `count`: elements of the tensor (all_reduce, broadcast), of
/// one rank's part (all_gather, reduce_scatter) or of one row (all_to_all).
struct CollectiveSignature {
  CollectiveKind kind = CollectiveKind::barrier;
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  int64_t count = 0;
  bool operator==(const CollectiveSignature&) const = default;
  /// "all_reduce(sum, f32, 10 elements)"
  std::string text() const;
};

struct CollectiveCall {
  CollectiveSignature signature;
  Tensor in, out;  // the same tensor for calls in place
  std::vector<int64_t> send_rows, recv_rows;

  bool on_cpu() const { return in.device().type == DeviceType::cpu; }
  int64_t row_bytes() const { return signature.count * dtype_size(signature.dtype); }
};

/// The same call on another communicator of the same ranks.
Work forward_call(Communicator& to, const CollectiveCall& call);

/// The message for ranks that disagree: names both calls and both ranks.
std::string mismatch_message(const std::string& group, uint64_t call_number, int rank_a,
                             const CollectiveSignature& a, int rank_b, const CollectiveSignature& b);
/// The message for an all_to_all whose counts do not fit: `sent` rows from `from`, `expected` by `to`.
std::string row_mismatch_message(const std::string& group, uint64_t call_number, int from, int64_t sent,
                                 int to, int64_t expected);

}  // namespace shoal
