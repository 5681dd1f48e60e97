// CheckedCommunicator: the part of a communicator that all implementations share. Checks the arguments, does
// groups of one by a local copy, and hands everything else to start().
#pragma once

#include <memory>
#include <span>
#include <string>

#include "parallel/collective_call.h"
#include "parallel/communicator.h"

namespace shoal {

class CheckedCommunicator : public Communicator {
 public:
  CheckedCommunicator(int rank, int size, std::string name)
      : rank_(rank), size_(size), name_(std::move(name)), traffic_(rank, size, name_) {}
  int rank() const final { return rank_; }
  int size() const final { return size_; }
  const std::string& name() const final { return name_; }

  Work all_reduce(const Tensor& inout, ReduceOp op) final;
  Work all_gather(const Tensor& in, const Tensor& out) final;
  Work reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op) final;
  Work all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> send_rows,
                  std::span<const int64_t> recv_rows) final;
  Work broadcast(const Tensor& inout, int root) final;
  TrafficCounter& traffic() final { return traffic_; }

 protected:
  /// Begins a checked call on a group of two or more; returns without waiting for other ranks.
  virtual Work start(CollectiveCall call) = 0;

 private:
  std::string where(const char* call) const;
  void check_tensor(const char* call, const Tensor& tensor, const char* which) const;
  void check_rows(const Tensor& tensor, std::span<const int64_t> rows, const char* which) const;
  Work dispatch(CollectiveCall call);
  CollectiveId next_id(const CollectiveCall& call);

  int rank_, size_;
  std::string name_;
  TrafficCounter traffic_;
  uint32_t num_calls_ = 0;
};

}  // namespace shoal
