// NcclGroup: NCCL's communicator of one group, the stream of its calls, the calls that have not ended, and
// what happens when one never does. Used by NcclCommunicator.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <deque>
#include <memory>
#include <string>

#include "core/tensor/host_wait.h"
#include "core/tensor/stream.h"
#include "parallel/collective_call.h"
#include "parallel/nccl_communicator.h"

namespace shoal {

class NcclGroup {
 public:
  /// Collective over `host`; blocks until NCCL has connected all ranks, or throws Error at the limit.
  NcclGroup(const std::shared_ptr<Communicator>& host, Device device, const NcclOptions& options);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  ncclComm_t comm() const { return comm_; }
  const Stream& stream() const { return stream_; }
  cudaStream_t cuda_stream() const;
  Device device() const { return device_; }
  const NcclOptions& options() const { return options_; }
  uint64_t num_calls() const { return num_calls_; }

  /// A call begins or has been put into the stream; what happens in between is checked in its name.
  void begin(const CollectiveSignature& signature);
  void end();
  /// Throws Error unless `code`, which `function` of NCCL returned, is success; waits for what is in
  /// progress.
  void check(ncclResult_t code, const char* function);

 private:
  struct Call {
    CollectiveSignature signature;
    uint64_t number = 0;
    std::shared_ptr<CUevent_st> end;  // in the stream
  };
  std::string where(const std::string& call) const;
  std::string text(const Call& call) const;  // "all_reduce(sum, f32, 4 elements) [dp, rank 0 of 2], call 7"
  void connect(const std::shared_ptr<Communicator>& host);
  void check(ncclResult_t code, const char* function, const std::string& what);
  ncclResult_t settle(const std::string& what);
  void forget_ended();
  void check_wait(double waited_s);
  [[noreturn]] void fail(const std::string& message);
  void abort() noexcept;

  NcclOptions options_;
  Device device_;
  std::string name_;
  int rank_, size_;
  Stream stream_;
  ncclComm_t comm_ = nullptr;
  std::string failure_;  // why it was aborted
  uint64_t num_calls_ = 0;
  Call current_;
  bool issuing_ = false;  // between begin() and end()
  std::deque<Call> open_;
  std::shared_ptr<HostWaitCheck> wait_check_;
};

/// Throws Error unless `code`, which `function` of CUDA's runtime returned, is success.
void check_cuda(cudaError_t code, const char* function, const std::string& where);

}  // namespace shoal
