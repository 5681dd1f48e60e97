#include "parallel/nccl_communicator.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "core/nn/placement.h"
#include "core/ops/reduce_rows.h"
#include "parallel/checked_communicator.h"
#include "parallel/collective_check.h"
#include "parallel/device_world.h"
#include "parallel/nccl_group.h"

namespace shoal {

namespace {

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return ncclFloat32;
    case DType::bf16:
      return ncclBfloat16;
    case DType::f64:
      return ncclFloat64;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    case DType::u8:
      break;
  }
  return ncclUint8;
}

ncclRedOp_t nccl_op(ReduceOp op) {
  if (op == ReduceOp::sum) return ncclSum;
  return op == ReduceOp::max ? ncclMax : ncclMin;
}
RowReduction row_reduction(ReduceOp op) {
  if (op == ReduceOp::sum) return RowReduction::sum;
  return op == ReduceOp::max ? RowReduction::max : RowReduction::min;
}

/// Within a group a call may say that it goes on at the group's end.
bool usable(ncclResult_t code) {
  return code == ncclSuccess || code == ncclInProgress;
}

/// Bytes between ranks: what one rank sends to each other one and receives from it.
struct Message {
  int peer;
  const std::byte* out;
  int64_t out_bytes;
  std::byte* in;
  int64_t in_bytes;
};

/// Puts one call into the group's stream, which is the current one.
class NcclCall {
 public:
  NcclCall(NcclGroup& group, const CollectiveCall& call, int rank, int size)
      : group_(group), call_(call), rank_(rank), size_(size) {}
  void issue();

 private:
  const CollectiveSignature& signature() const { return call_.signature; }
  int64_t part_bytes() const { return signature().count * dtype_size(signature().dtype); }
  bool sums_itself() const {
    const bool is_sum = signature().op == ReduceOp::sum;
    return is_float(signature().dtype) && (group_.options().ordered_sums || !is_sum);
  }
  void copy_own(std::byte* to, const std::byte* from, int64_t bytes) const;
  void exchange(const std::vector<Message>& messages);
  void all_reduce();
  void ordered_all_reduce();
  void reduce_scatter();
  /// Part r of `in`, at offsets[r], to rank r; the own part of each rank into scratch, whose rows are summed.
  void sum_parts_into(const Tensor& out, const std::vector<ShardRange>& parts);
  void all_to_all();

  NcclGroup& group_;
  const CollectiveCall& call_;
  int rank_, size_;
};

void NcclCall::copy_own(std::byte* to, const std::byte* from, int64_t bytes) const {
  const Device device = group_.device();
  if (bytes > 0 && to != from) device_runtime(device.type).copy(to, device, from, device, bytes);
}

void NcclCall::exchange(const std::vector<Message>& messages) {
  group_.check(ncclGroupStart(), "ncclGroupStart");
  ncclResult_t code = ncclSuccess;
  const char* function = "ncclSend";
  for (const Message& m : messages) {
    if (usable(code) && m.out_bytes > 0) {
      code = ncclSend(m.out, static_cast<size_t>(m.out_bytes), ncclUint8, m.peer, group_.comm(),
                      group_.cuda_stream());
    }
    if (usable(code) && m.in_bytes > 0) {
      function = "ncclRecv";
      code = ncclRecv(m.in, static_cast<size_t>(m.in_bytes), ncclUint8, m.peer, group_.comm(),
                      group_.cuda_stream());
    }
  }
  const ncclResult_t end = ncclGroupEnd();  // in any case, or the next call would belong to this group
  if (!usable(code)) group_.check(code, function);
  group_.check(end, "ncclGroupEnd");
}

void NcclCall::issue() {
  const CollectiveSignature& s = signature();
  const auto count = static_cast<size_t>(s.count);
  switch (s.kind) {
    case CollectiveKind::all_reduce:
      if (count > 0) all_reduce();
      return;
    case CollectiveKind::reduce_scatter:
      if (count > 0) reduce_scatter();
      return;
    case CollectiveKind::all_gather:
      if (count == 0) return;
      return group_.check(ncclAllGather(call_.in.bytes(), call_.out.bytes(), count, nccl_type(s.dtype),
                                        group_.comm(), group_.cuda_stream()),
                          "ncclAllGather");
    case CollectiveKind::broadcast:
      if (count == 0) return;
      return group_.check(ncclBroadcast(call_.in.bytes(), call_.out.bytes(), count, nccl_type(s.dtype),
                                        s.root, group_.comm(), group_.cuda_stream()),
                          "ncclBroadcast");
    case CollectiveKind::all_to_all:
      return all_to_all();
    case CollectiveKind::barrier:
    case CollectiveKind::split:
      break;  // go over the host
  }
}

void NcclCall::all_reduce() {
  if (sums_itself()) return ordered_all_reduce();
  const CollectiveSignature& s = signature();
  group_.check(ncclAllReduce(call_.in.bytes(), call_.out.bytes(), static_cast<size_t>(s.count),
                             nccl_type(s.dtype), nccl_op(s.op), group_.comm(), group_.cuda_stream()),
               "ncclAllReduce");
}

void NcclCall::ordered_all_reduce() {
  const CollectiveSignature& s = signature();
  const Tensor flat = call_.out.flat(0, s.count);
  if (size_ * part_bytes() <= group_.options().small_reduce_bytes) {
    const Tensor all = Tensor::empty({size_, s.count}, s.dtype, group_.device());
    group_.check(ncclAllGather(flat.bytes(), all.bytes(), static_cast<size_t>(s.count), nccl_type(s.dtype),
                               group_.comm(), group_.cuda_stream()),
                 "ncclAllGather");
    return reduce_rows(group_.device(), all, row_reduction(s.op), flat);
  }
  std::vector<ShardRange> pieces;
  for (int r = 0; r < size_; r++) pieces.push_back(shard_range(s.count, {r, size_}));
  const ShardRange own = pieces[static_cast<size_t>(rank_)];
  const Tensor mine = flat.flat(own.begin, own.end - own.begin);
  sum_parts_into(mine, pieces);
  std::vector<Message> messages;
  const int64_t element = dtype_size(s.dtype);
  for (int i = 1; i < size_; i++) {
    const int peer = (rank_ + i) % size_;
    const ShardRange theirs = pieces[static_cast<size_t>(peer)];
    messages.push_back({peer, mine.bytes(), mine.num_bytes(), flat.bytes() + theirs.begin * element,
                        (theirs.end - theirs.begin) * element});
  }
  exchange(messages);
}

void NcclCall::reduce_scatter() {
  const CollectiveSignature& s = signature();
  if (!sums_itself()) {
    return group_.check(
        ncclReduceScatter(call_.in.bytes(), call_.out.bytes(), static_cast<size_t>(s.count),
                          nccl_type(s.dtype), nccl_op(s.op), group_.comm(), group_.cuda_stream()),
        "ncclReduceScatter");
  }
  std::vector<ShardRange> parts;
  for (int r = 0; r < size_; r++) parts.push_back({r * s.count, (r + 1) * s.count});
  sum_parts_into(call_.out, parts);
}

void NcclCall::sum_parts_into(const Tensor& out, const std::vector<ShardRange>& parts) {
  const CollectiveSignature& s = signature();
  const int64_t element = dtype_size(s.dtype), own_bytes = out.num_bytes();
  const Tensor scratch = Tensor::empty({size_, out.numel()}, s.dtype, group_.device());
  std::vector<Message> messages;
  for (int i = 0; i < size_; i++) {
    const int peer = (rank_ + i) % size_;
    const ShardRange theirs = parts[static_cast<size_t>(peer)];
    const std::byte* from = call_.in.bytes() + theirs.begin * element;
    std::byte* to = scratch.bytes() + peer * own_bytes;
    if (peer == rank_) {
      copy_own(to, from, own_bytes);
    } else {
      messages.push_back({peer, from, (theirs.end - theirs.begin) * element, to, own_bytes});
    }
  }
  exchange(messages);
  reduce_rows(group_.device(), scratch, row_reduction(s.op), out);
}

void NcclCall::all_to_all() {
  const auto n = static_cast<size_t>(size_), me = static_cast<size_t>(rank_);
  const int64_t row_bytes = call_.row_bytes();
  std::vector<int64_t> send_at(n), recv_at(n);
  std::exclusive_scan(call_.send_rows.begin(), call_.send_rows.end(), send_at.begin(), int64_t{0});
  std::exclusive_scan(call_.recv_rows.begin(), call_.recv_rows.end(), recv_at.begin(), int64_t{0});
  copy_own(call_.out.bytes() + recv_at[me] * row_bytes, call_.in.bytes() + send_at[me] * row_bytes,
           call_.send_rows[me] * row_bytes);
  std::vector<Message> messages;
  for (size_t i = 1; i < n; i++) {
    const size_t peer = (me + i) % n;
    const int64_t out_bytes = call_.send_rows[peer] * row_bytes, in_bytes = call_.recv_rows[peer] * row_bytes;
    if (out_bytes == 0 && in_bytes == 0) continue;
    messages.push_back({static_cast<int>(peer), call_.in.bytes() + send_at[peer] * row_bytes, out_bytes,
                        call_.out.bytes() + recv_at[peer] * row_bytes, in_bytes});
  }
  if (!messages.empty()) exchange(messages);
}

/// What the group's stream may still read or write is not used again before it is done.
void keep_in_use(const CollectiveCall& call, const NcclGroup& group) {
  call.in.used_on(group.stream());
  call.out.used_on(group.stream());
}

/// Keeps the tensors until the stream in which they were given is behind the call: then their memory may be
/// given to work that comes later in that stream. Where another one waits, they are in use for longer.
struct NcclWork final : Work::Impl {
  NcclWork(std::shared_ptr<NcclGroup> group, Event end, CollectiveCall call)
      : group(std::move(group)),
        end(std::move(end)),
        call(std::move(call)),
        stream(current_stream(this->group->device())) {}
  NcclWork(const NcclWork&) = delete;
  NcclWork& operator=(const NcclWork&) = delete;
  ~NcclWork() override {
    if (!ordered) keep_in_use(call, *group);
  }
  void wait() override {
    const Stream waiting = current_stream(group->device());
    end.wait(waiting);
    ordered = waiting.handle == stream.handle;
  }
  bool test() override { return end.reached(); }
  std::shared_ptr<NcclGroup> group;
  Event end;
  CollectiveCall call;
  Stream stream;
  bool ordered = false;
};

class NcclCommunicator final : public CheckedCommunicator {
 public:
  NcclCommunicator(std::shared_ptr<Communicator> host, std::shared_ptr<NcclGroup> group)
      : CheckedCommunicator(host->rank(), host->size(), host->name()),
        host_(std::move(host)),
        group_(std::move(group)) {}

  bool carries(Device device) const override { return device.type == DeviceType::cpu || queues(device); }
  bool queues(Device device) const override { return device == group_->device(); }
  void barrier() override { host_->barrier(); }
  Tensor shared_zeros(const Shape& shape, DType dtype, Device device) override {
    return host_->shared_zeros(shape, dtype, device);
  }
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override;

 protected:
  Work start(CollectiveCall call) override;

 private:
  void check_call(const CollectiveCall& call);

  std::shared_ptr<Communicator> host_;
  std::shared_ptr<NcclGroup> group_;
};

void NcclCommunicator::check_call(const CollectiveCall& call) {
  if (collective_checks_enabled()) {
    compare_calls({size(), name(), group_->num_calls(),
                   [this](CollectiveCall gather) { return forward_call(*host_, gather); }},
                  call);
  }
  if (call.signature.kind != CollectiveKind::all_to_all) return;
  const auto me = static_cast<size_t>(rank());
  SHOAL_CHECK(call.send_rows[me] == call.recv_rows[me], "all_to_all [", name(), ", rank ", rank(), " of ",
              size(), "]: sends ", call.send_rows[me], " rows to itself but expects ", call.recv_rows[me]);
}

Work NcclCommunicator::start(CollectiveCall call) {
  if (call.on_cpu()) return forward_call(*host_, call);
  check_call(call);
  group_->begin(call.signature);
  Event ready, end;
  ready.record(current_stream(group_->device()));
  ready.wait(group_->stream());
  try {
    const StreamScope scope(group_->stream());  // of kernels, copies and scratch memory
    NcclCall(*group_, call, rank(), size()).issue();
    end.record(group_->stream());
  } catch (...) {
    keep_in_use(call, *group_);
    throw;
  }
  group_->end();
  return Work(std::make_unique<NcclWork>(group_, std::move(end), std::move(call)));
}

/// Names this rank's device for all hosts of a job.
std::string device_name(Device device) {
  const std::string where = str("nccl, device ", device);
  Event touch;  // makes the backend choose the thread's device
  touch.record(current_stream(device));
  int number = 0;
  check_cuda(cudaGetDevice(&number), "cudaGetDevice", where);
  std::array<char, 32> bus{};
  check_cuda(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), number), "cudaDeviceGetPCIBusId",
             where);
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return str("the device at ", bus.data(), " of ", host.data());
}

std::shared_ptr<Communicator> NcclCommunicator::split(int color, int key, const std::string& name) {
  // Ranks with a device each have one in any part of the group too.
  std::string why;
  return make_nccl_group(host_->split(color, key, name), group_->device(), group_->options(), &why);
}

[[maybe_unused]] const bool registered = register_device_groups(
    DeviceType::cuda, [](const std::shared_ptr<Communicator>& host, Device device, std::string* why) {
      return make_nccl_group(host, device, NcclOptions{}, why);
    });

}  // namespace

bool ordered_sums_named(const char* name) {
  const std::string_view value = name == nullptr ? "" : name;
  if (value.empty() || value == "ordered") return true;
  if (value == "nccl") return false;
  throw UsageError(str("SHOAL_NCCL_SUMS: expected ordered or nccl, got '", value, "'"));
}

bool ordered_sums_wanted() {
  return ordered_sums_named(std::getenv("SHOAL_NCCL_SUMS"));
}

std::shared_ptr<Communicator> make_nccl_group(const std::shared_ptr<Communicator>& host, Device device,
                                              const NcclOptions& options, std::string* why) {
  if (host->size() == 1) return host;  // copies locally
  std::vector<std::string> names = host->gather_strings(device_name(device));
  for (size_t r = 0; r < names.size(); r++) {
    const auto first = std::find(names.begin(), names.end(), names[r]);
    if (first == names.begin() + static_cast<std::ptrdiff_t>(r)) continue;
    *why = str("ranks ", first - names.begin(), " and ", r, " share ", names[r],
               ", and NCCL wants a device for each rank; start as many ranks per host as it has devices");
    return nullptr;
  }
  return std::make_shared<NcclCommunicator>(host, std::make_shared<NcclGroup>(host, device, options));
}

}  // namespace shoal
