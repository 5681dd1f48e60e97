// The part of the stand-in of NCCL that runs in streams: ranks meet, and the last one moves the bytes.
#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "core/tensor/types.h"
#include "tests/cuda/standin/nccl_world.h"
#include "tests/cuda/standin/streams.h"

namespace shoal::standin {

namespace {

template <class T>
T combined(ncclRedOp_t op, T a, T b) {
  if (op == ncclSum) return static_cast<T>(a + b);
  return op == ncclMax ? std::max(a, b) : std::min(a, b);
}
BFloat16 combined(ncclRedOp_t op, BFloat16 a, BFloat16 b) {
  return BFloat16(combined(op, static_cast<float>(a), static_cast<float>(b)));
}

/// out[i] = of all ranks' in[begin + i], the last rank first.
template <class T>
void reduce(const std::vector<NcclCallRecord>& calls, size_t begin, size_t count,
            std::vector<std::byte>& out) {
  out.resize(count * sizeof(T));
  T* to = reinterpret_cast<T*>(out.data());
  for (size_t i = 0; i < count; i++) {
    T sum = static_cast<const T*>(calls.back().in)[begin + i];
    for (size_t r = calls.size() - 1; r-- > 0;)
      sum = combined(calls[0].reduction, sum, static_cast<const T*>(calls[r].in)[begin + i]);
    to[i] = sum;
  }
}

void reduce_any(const std::vector<NcclCallRecord>& calls, size_t begin, size_t count,
                std::vector<std::byte>& out) {
  switch (calls[0].type) {
    case ncclFloat32:
      return reduce<float>(calls, begin, count, out);
    case ncclBfloat16:
      return reduce<BFloat16>(calls, begin, count, out);
    case ncclFloat64:
      return reduce<double>(calls, begin, count, out);
    case ncclInt32:
      return reduce<int32_t>(calls, begin, count, out);
    case ncclInt64:
      return reduce<int64_t>(calls, begin, count, out);
    case ncclUint8:
      return reduce<uint8_t>(calls, begin, count, out);
    default:
      SHOAL_CHECK(false, "stand-in of NCCL: no sums of type ", static_cast<int>(calls[0].type));
  }
}

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

/// The work that rank `rank` has in a stream and not begun; false when there is none. Locked.
bool next_launch(const NcclWorld& world, int rank, NcclLaunch& launch) {
  const auto& launched = world.launched[static_cast<size_t>(rank)];
  if (launched.empty()) return false;
  launch = launched.front();
  return true;
}

/// One piece of work of a rank.
class Turn {
 public:
  Turn(ncclComm_t comm, std::vector<NcclCallRecord> calls, uint64_t sequence, uint64_t collective)
      : world_(comm->world),
        rank_(comm->rank),
        calls_(std::move(calls)),
        sequence_(sequence),
        collective_(collective) {}

  bool begun() const { return begun_; }  // locked
  /// As standin::enqueue_attempts wants it. Work of a communicator that this rank aborts ends as it is; that
  /// of the other ranks never does, as NCCL's would not.
  bool attempt(std::vector<Need>& needs) {
    const NcclLock lock;
    if (world_->aborted[static_cast<size_t>(rank_)]) return true;
    const bool messages = calls_[0].op == NcclOp::send || calls_[0].op == NcclOp::receive;
    if (!begun_) {
      begin();
      messages ? send_messages() : arrive();
    }
    if (world_->broken && !done(messages)) return false;
    if (!done(messages)) {
      for (int r = 0; r < world_->size; r++) {
        NcclLaunch launch;
        if (r != rank_ && waits_for(r, messages) && next_launch(*world_, r, launch))
          needs.push_back({launch.stream, launch.number});
      }
      return false;
    }
    acquire(messages ? order_.get() : &meeting_->order);
    return true;
  }

 private:
  // All of these locked.
  void begin() {
    auto& launched = world_->launched[static_cast<size_t>(rank_)];
    std::erase_if(launched, [&](const NcclLaunch& l) { return l.sequence <= sequence_; });
    begun_ = true;
    for (const NcclCallRecord& call : calls_) touch(call);
  }
  bool done(bool messages) const {
    if (!messages) return meeting_->done;
    return std::all_of(messages_done_.begin(), messages_done_.end(), [](const auto& d) { return *d; });
  }
  bool waits_for(int r, bool messages) const {
    if (!messages) return !meeting_->arrived[static_cast<size_t>(r)];
    for (size_t i = 0; i < calls_.size(); i++) {
      if (calls_[i].peer == r && !*messages_done_[i]) return true;
    }
    return false;
  }
  void touch(const NcclCallRecord& c) const {
    const size_t bytes = c.count * nccl_type_bytes(c.type), all = bytes * static_cast<size_t>(world_->size);
    const bool reads = c.op != NcclOp::receive && !(c.op == NcclOp::broadcast && c.peer != rank_);
    if (reads) will_read(c.in, c.op == NcclOp::reduce_scatter ? all : bytes);
    if (c.op != NcclOp::send) will_write(c.out, c.op == NcclOp::all_gather ? all : bytes);
  }

  void arrive() {
    meeting_ = world_->meetings.at(collective_);
    release(&meeting_->order);
    meeting_->arrived[static_cast<size_t>(rank_)] = true;
    if (++meeting_->num_arrived < world_->size || world_->broken) return;
    acquire(&meeting_->order);
    carry_out(meeting_->calls);
    release(&meeting_->order);
    meeting_->done = true;
    world_->meetings.erase(collective_);
  }

  void send_messages() {
    release(order_.get());
    for (const NcclCallRecord& call : calls_) {
      messages_done_.push_back(std::make_shared<bool>(false));
      const bool is_send = call.op == NcclOp::send;
      const std::pair<int, int> way = is_send ? std::pair(rank_, call.peer) : std::pair(call.peer, rank_);
      (is_send ? world_->sends : world_->receives)[way].push_back({call, messages_done_.back(), order_});
      if (!world_->broken) match(way);
    }
  }

  /// Copies what has both its ends.
  void match(const std::pair<int, int>& way) {
    auto &sends = world_->sends[way], &receives = world_->receives[way];
    while (!sends.empty() && !receives.empty()) {
      const NcclMessage from = sends.front(), to = receives.front();
      sends.pop_front();
      receives.pop_front();
      SHOAL_CHECK(from.call.count == to.call.count && from.call.type == to.call.type,
                  "stand-in of NCCL: rank ", way.first, " sends ", from.call.count, " elements to rank ",
                  way.second, ", which expects ", to.call.count);
      acquire(from.order.get());
      acquire(to.order.get());
      copy_bytes(to.call.out, from.call.in, from.call.count * nccl_type_bytes(from.call.type));
      release(from.order.get());
      release(to.order.get());
      *from.done = *to.done = true;
    }
  }

  std::shared_ptr<NcclWorld> world_;
  int rank_;
  std::vector<NcclCallRecord> calls_;
  uint64_t sequence_, collective_;
  bool begun_ = false;
  std::shared_ptr<NcclMeeting> meeting_;              // of a collective
  std::vector<std::shared_ptr<bool>> messages_done_;  // of each call
  std::shared_ptr<char> order_ = std::make_shared<char>();
};

}  // namespace

void carry_out(const std::vector<NcclCallRecord>& calls) {
  const NcclCallRecord& first = calls[0];
  const size_t bytes = first.count * nccl_type_bytes(first.type);
  std::vector<std::byte> sum;
  switch (first.op) {
    case NcclOp::all_reduce:
      reduce_any(calls, 0, first.count, sum);
      for (const auto& c : calls) copy_bytes(c.out, sum.data(), bytes);
      return;
    case NcclOp::reduce_scatter: {
      std::vector<std::vector<std::byte>> parts(calls.size());  // outputs may lie in inputs
      for (size_t r = 0; r < calls.size(); r++) reduce_any(calls, r * first.count, first.count, parts[r]);
      for (size_t r = 0; r < calls.size(); r++) copy_bytes(calls[r].out, parts[r].data(), bytes);
      return;
    }
    case NcclOp::all_gather:
      for (const auto& to : calls) {
        for (size_t r = 0; r < calls.size(); r++)
          copy_bytes(static_cast<std::byte*>(to.out) + r * bytes, calls[r].in, bytes);
      }
      return;
    case NcclOp::broadcast:
      for (const auto& to : calls) copy_bytes(to.out, calls[static_cast<size_t>(first.peer)].in, bytes);
      return;
    case NcclOp::send:
    case NcclOp::receive:
      break;
  }
}

void launch_nccl(ncclComm_t comm, std::vector<NcclCallRecord> calls) {
  const cudaStream_t stream = calls[0].stream;
  const uint64_t sequence = comm->num_launches++;
  uint64_t collective = 0;
  const auto rank = static_cast<size_t>(comm->rank);
  if (calls[0].op != NcclOp::send && calls[0].op != NcclOp::receive) {
    collective = comm->num_collectives++;
    const NcclLock lock;
    std::shared_ptr<NcclMeeting>& meeting = comm->world->meetings[collective];
    if (!meeting) {
      meeting = std::make_shared<NcclMeeting>();
      meeting->calls.resize(static_cast<size_t>(comm->world->size));
      meeting->arrived.resize(meeting->calls.size());
      meeting->calls.assign(meeting->calls.size(), calls[0]);
    }
    const NcclCallRecord& other = meeting->calls[rank];
    SHOAL_CHECK(other.op == calls[0].op && other.count == calls[0].count && other.type == calls[0].type &&
                    other.reduction == calls[0].reduction && other.peer == calls[0].peer,
                "stand-in of NCCL: rank ", comm->rank, " calls ", nccl_op_name(calls[0].op), " of ",
                calls[0].count, " elements, another rank ", nccl_op_name(other.op), " of ", other.count);
    meeting->calls[rank] = calls[0];
  }
  auto turn = std::make_shared<Turn>(comm, std::move(calls), sequence, collective);
  const uint64_t number =
      enqueue_attempts(stream, "nccl", [turn](std::vector<Need>& needs) { return turn->attempt(needs); });
  const NcclLock lock;
  if (!turn->begun()) comm->world->launched[rank].push_back({stream, number, sequence});
}

}  // namespace shoal::standin
