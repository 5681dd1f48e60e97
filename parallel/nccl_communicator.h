// NcclCommunicator: tensors of CUDA devices over NCCL, each rank with a device of its own; tensors of the
// host over the host's communicator. Calls run in a stream of the group's own, behind the work that was in
// the caller's current stream when they were started; waiting for one makes the then current stream wait, not
// the host.
//
// Bits. With ordered sums (the default) results of device tensors have the bits of every other communicator:
// ranks exchange their parts, and each sums its piece in rank order with a kernel of our own. That moves the
// bytes of a ring. Without them NCCL sums: it promises no order, and chooses among algorithms by size, number
// of ranks and network. What may be asked of it then: the bits of integers, of max and min of integers, and
// of all calls that only move; sums of floats within rounding (bf16 is rounded at each step), equal on all
// ranks and in each run only as far as the same NCCL on the same machines does so, which is not promised. max
// and min of floats are always ordered, because of NaN.
//
// Failure. While the host waits for a device (core/tensor/host_wait.h) errors that NCCL reports and the limit
// of SHOAL_COLLECTIVE_TIMEOUT are looked at: either aborts NCCL's work of this thread and throws Error, which
// names the oldest call that has not ended.
#pragma once

#include <memory>
#include <string>

#include "parallel/communicator.h"
#include "parallel/waiting.h"

namespace shoal {

/// What a value of SHOAL_NCCL_SUMS means: ordered (also null and ""), or nccl. Throws UsageError.
bool ordered_sums_named(const char* name);
/// The environment's.
bool ordered_sums_wanted();

struct NcclOptions {
  bool ordered_sums = ordered_sums_wanted();
  double limit_s = wait_limit_s();  // of one wait; 0: none
  /// Elements of a tensor times ranks times their size, up to which ordered all_reduce moves everything to
  /// everyone: one exchange instead of two.
  int64_t small_reduce_bytes = int64_t{256} << 10;
};

/// Null when two ranks of `host` have the same device, which NCCL refuses: *why says which, on every rank.
/// `device` is this rank's. Collective; blocks. All ranks must start calls of all their groups in the same
/// order, because calls in flight share the device.
std::shared_ptr<Communicator> make_nccl_group(const std::shared_ptr<Communicator>& host, Device device,
                                              const NcclOptions& options, std::string* why);

}  // namespace shoal
