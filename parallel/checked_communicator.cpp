#include "parallel/checked_communicator.h"

#include <algorithm>
#include <numeric>

#include "parallel/collective_failpoint.h"

namespace shoal {

namespace {

int64_t elements_per_row(const Tensor& t) {
  int64_t elements = 1;
  for (int d = 1; d < t.dims(); d++) elements *= t.size(d);
  return elements;
}

}  // namespace

std::string CheckedCommunicator::where(const char* call) const {
  return str(call, " [", name_, ", rank ", rank_, " of ", size_, "]");
}

void CheckedCommunicator::check_tensor(const char* call, const Tensor& tensor, const char* which) const {
  SHOAL_CHECK(tensor.defined(), where(call), ": ", which, " is undefined; pass an empty tensor instead");
  // A group of one copies, which any device can.
  SHOAL_CHECK(
      size_ == 1 || carries(tensor.device()), where(call), ": ", which, " is on ", tensor.device(),
      "; this communicator moves cpu memory; make groups from device_world() (parallel/device_world.h) "
      "for tensors of devices");
}

void CheckedCommunicator::check_rows(const Tensor& tensor, std::span<const int64_t> rows,
                                     const char* which) const {
  SHOAL_CHECK(std::ssize(rows) == size_, where("all_to_all"), ": ", which, "_rows has ", rows.size(),
              " entries, expected one per rank");
  for (size_t i = 0; i < rows.size(); i++) {
    SHOAL_CHECK(rows[i] >= 0, where("all_to_all"), ": ", which, "_rows[", i, "] is ", rows[i],
                ", expected >= 0");
  }
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  SHOAL_CHECK(tensor.dims() >= 1 && total == tensor.size(0), where("all_to_all"), ": ", which,
              "_rows sum to ", total, " but the tensor is ", tensor.shape(),
              "; were the counts and the tensor made by different plans?");
}

CollectiveId CheckedCommunicator::next_id(const CollectiveCall& call) {
  // The larger side: what one rank ends up with, or what it gives to the sum.
  const auto bytes = static_cast<double>(std::max(call.in.num_bytes(), call.out.num_bytes()));
  return {collective_name(call.signature.kind), this, num_calls_++, bytes};
}

Work CheckedCommunicator::dispatch(CollectiveCall call) {
  const Device in = call.in.device(), out = call.out.device();
  SHOAL_CHECK(in == out, where(collective_name(call.signature.kind)), ": in is on ", in, " and out is on ",
              out, "; expected both on the same device");
  if (size_ > 1) {
    const CollectiveId id = next_id(call);
    const ProfileCall span(id, /*waits=*/false);
    const CollectivePoint point(name_, call.signature);
    Work work = start(std::move(call));
    work.set_collective(id);
    return work;
  }
  if (call.in.bytes() != call.out.bytes()) call.out.copy_from(call.in);
  return Work{};
}

Work CheckedCommunicator::all_reduce(const Tensor& inout, ReduceOp op) {
  check_tensor("all_reduce", inout, "inout");
  CollectiveCall call;
  call.signature = {CollectiveKind::all_reduce, inout.dtype(), op, 0, inout.numel()};
  call.in = call.out = inout.detach();
  traffic_.all_reduce(inout.num_bytes());
  return dispatch(std::move(call));
}

Work CheckedCommunicator::all_gather(const Tensor& in, const Tensor& out) {
  check_tensor("all_gather", in, "in");
  check_tensor("all_gather", out, "out");
  SHOAL_CHECK(in.dtype() == out.dtype() && out.numel() == size_ * in.numel(), where("all_gather"), ": in is ",
              in.dtype(), ' ', in.shape(), ", so out needs ", size_ * in.numel(), " elements, got ",
              out.dtype(), ' ', out.shape());
  CollectiveCall call;
  call.signature = {CollectiveKind::all_gather, in.dtype(), ReduceOp::sum, 0, in.numel()};
  call.in = in.detach();
  call.out = out.detach();
  traffic_.all_gather(in.num_bytes());
  return dispatch(std::move(call));
}

Work CheckedCommunicator::reduce_scatter(const Tensor& in, const Tensor& out, ReduceOp op) {
  check_tensor("reduce_scatter", in, "in");
  check_tensor("reduce_scatter", out, "out");
  SHOAL_CHECK(in.dtype() == out.dtype() && in.numel() == size_ * out.numel(), where("reduce_scatter"),
              ": out is ", out.dtype(), ' ', out.shape(), ", so in needs ", size_ * out.numel(),
              " elements, got ", in.dtype(), ' ', in.shape());
  CollectiveCall call;
  call.signature = {CollectiveKind::reduce_scatter, in.dtype(), op, 0, out.numel()};
  call.in = in.detach();
  call.out = out.detach();
  traffic_.reduce_scatter(out.num_bytes());
  return dispatch(std::move(call));
}

Work CheckedCommunicator::all_to_all(const Tensor& in, const Tensor& out, std::span<const int64_t> send_rows,
                                     std::span<const int64_t> recv_rows) {
  check_tensor("all_to_all", in, "in");
  check_tensor("all_to_all", out, "out");
  check_rows(in, send_rows, "send");
  check_rows(out, recv_rows, "recv");
  const int64_t row = elements_per_row(in);
  SHOAL_CHECK(in.dtype() == out.dtype() && row == elements_per_row(out), where("all_to_all"),
              ": expected equal dtype and row size, got in ", in.dtype(), ' ', in.shape(), ", out ",
              out.dtype(), ' ', out.shape());
  SHOAL_CHECK(size_ > 1 || send_rows[0] == recv_rows[0], where("all_to_all"), ": sends ", send_rows[0],
              " rows to itself but expects ", recv_rows[0]);
  CollectiveCall call;
  call.signature = {CollectiveKind::all_to_all, in.dtype(), ReduceOp::sum, 0, row};
  call.in = in.detach();
  call.out = out.detach();
  call.send_rows.assign(send_rows.begin(), send_rows.end());
  call.recv_rows.assign(recv_rows.begin(), recv_rows.end());
  traffic_.all_to_all(send_rows, call.row_bytes());
  return dispatch(std::move(call));
}

Work CheckedCommunicator::broadcast(const Tensor& inout, int root) {
  check_tensor("broadcast", inout, "inout");
  SHOAL_CHECK(root >= 0 && root < size_, where("broadcast"), ": root is ", root, ", expected 0..", size_ - 1);
  CollectiveCall call;
  call.signature = {CollectiveKind::broadcast, inout.dtype(), ReduceOp::sum, root, inout.numel()};
  call.in = call.out = inout.detach();
  traffic_.broadcast(inout.num_bytes(), root);
  return dispatch(std::move(call));
}

}  // namespace shoal
