// Stand-in of NCCL for ranks that are threads of one process: what tests can ask of it. The functions have
// the prototypes of the real header. Work is put into streams of the stand-in device and runs when they do;
// it waits for its peers, makes their streams go on, and meanwhile calls the checks of
// core/tensor/host_wait.h. Wrong use throws Error. It cannot hang as NCCL does when ranks call in different
// orders, which is what nccl_log_problem is for.
#pragma once

#include <nccl.h>

#include <string>

namespace shoal::standin {

/// How the calls of the ranks differ since clear_nccl_log: collectives in another order or with other
/// arguments, over all groups that two ranks have in common, or a message without its counterpart. "" when
/// they do not.
std::string nccl_log_problem();
/// Entries since then, of all ranks.
size_t nccl_log_size();
void clear_nccl_log();

/// From now on ncclCommGetAsyncError reports `error` to rank `rank` of every group, until it is ncclSuccess.
void set_nccl_error(int rank, ncclResult_t error);
/// Communicators that were made, and neither destroyed nor aborted; and those aborted so far.
int num_nccl_communicators();
int num_nccl_aborts();

/// cudaDeviceGetPCIBusId names a device of its own for each thread, or the same one for all.
void share_one_device(bool share);

}  // namespace shoal::standin
