#include "parallel/mpi_communicator.h"

#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#if __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <thread>

#include "core/nn/placement.h"
#include "core/ops/reduce_rows.h"
#include "core/tensor/stream.h"
#include "parallel/checked_communicator.h"
#include "parallel/collective_check.h"
#include "parallel/open_calls.h"
#include "parallel/reduce_parts.h"

namespace shoal {

namespace {

constexpr int kMaxTag = 32767;  // what MPI guarantees

/// The MPI communicator and what is common to all calls on it.
struct MpiGroup {
  MpiGroup() = default;
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;
  ~MpiGroup() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // While an exception unwinds the peers may be gone, and the job is about to be aborted.
    if (comm != MPI_COMM_NULL && finalized == 0 && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm);
  }
  std::string where(const std::string& call) const {
    return str(call, " [", name, ", rank ", rank, " of ", size, "]");
  }
  void check(int code, const char* function, const std::string& call) const {
    if (code == MPI_SUCCESS) return;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(code, text.data(), &length);
    throw Error(str(where(call), ": ", function, " failed: ", text.data()));
  }

  MPI_Comm comm = MPI_COMM_NULL;
  int rank = 0, size = 1;
  std::string name;
  std::vector<int> world_ranks;  // of every rank of the group
  uint64_t num_calls = 0;
  std::thread::id thread = std::this_thread::get_id();
};

/// One call in flight: up to three stages, each a set of messages; between them the arithmetic.
class MpiCall final : public AwaitedCall, public OpenCalls {
 public:
  MpiCall(std::shared_ptr<MpiGroup> group, CollectiveCall call)
      : group_(std::move(group)), call_(std::move(call)), number_(group_->num_calls++) {
    tag_ = static_cast<int>(number_ % kMaxTag);
  }
  /// Posts the first messages.
  void begin() {
    if (on_device()) wait_for_device();
    next_stage();
    progress();
  }
  void progress() override;
  size_t num_open() const override { return done_ ? 0 : 1; }
  bool done() const override { return done_; }
  std::string text() const override { return str(group_->where(call_.signature.text()), ", call ", number_); }
  std::string missing() const override;

 private:
  const CollectiveSignature& signature() const { return call_.signature; }
  int rank() const { return group_->rank; }
  int size() const { return group_->size; }
  int64_t part_bytes() const { return signature().count * dtype_size(signature().dtype); }
  Device device() const { return call_.in.device(); }
  bool on_device() const { return call_.in.defined() && !call_.on_cpu(); }
  std::byte* in(int64_t offset) const { return call_.in.bytes() + offset; }
  std::byte* out(int64_t offset) const { return call_.out.bytes() + offset; }

  void copy(std::byte* to, const std::byte* from, int64_t bytes) const;
  void wait_for_device() const;
  void send(const std::byte* data, int64_t bytes, int peer);
  void receive(std::byte* data, int64_t bytes, int peer);
  void check_received(int code);
  void next_stage();
  void start_all_reduce();
  void piece_of(int r, int64_t* begin_bytes, int64_t* bytes) const;
  void exchange_parts_to_scratch(int64_t own_bytes, const std::vector<int64_t>& offsets,
                                 const std::vector<int64_t>& bytes);
  void reduce_scratch(const std::byte* own, std::byte* to, int64_t bytes);
  std::byte* scratch_part(int from, int64_t bytes) const;
  void reduce_on_device(const std::byte* own, std::byte* to, int64_t bytes) const;
  void gather_pieces();
  void start_all_gather();
  void start_all_to_all();
  void start_barrier_round();
  void start_broadcast();
  void send_to_children();

  std::shared_ptr<MpiGroup> group_;
  CollectiveCall call_;
  uint64_t number_;
  int tag_ = 0, stage_ = 0;
  bool done_ = false;
  Tensor scratch_;
  std::vector<MPI_Request> requests_;
  struct Expected {
    int peer;
    int bytes;  // of a receive; -1 for a send
  };
  std::vector<Expected> expected_;
  std::vector<MPI_Status> statuses_;
};

/// MPI knows nothing of streams: what it reads must be there, and what it writes must not be in use.
void MpiCall::wait_for_device() const {
  Event so_far;
  so_far.record(current_stream(device()));
  so_far.host_wait();
}

void MpiCall::copy(std::byte* to, const std::byte* from, int64_t bytes) const {
  if (bytes == 0 || to == from) return;
  device_runtime(device().type).copy(to, device(), from, device(), bytes);
  if (on_device()) wait_for_device();
}

void MpiCall::send(const std::byte* data, int64_t bytes, int peer) {
  for (int64_t done = 0; done < bytes; done += mpi_limits().chunk_bytes) {
    const int count = static_cast<int>(std::min(bytes - done, mpi_limits().chunk_bytes));
    requests_.push_back(MPI_REQUEST_NULL);
    expected_.push_back({peer, -1});
    group_->check(MPI_Isend(data + done, count, MPI_BYTE, peer, tag_, group_->comm, &requests_.back()),
                  "MPI_Isend", signature().text());
  }
}

void MpiCall::receive(std::byte* data, int64_t bytes, int peer) {
  for (int64_t done = 0; done < bytes; done += mpi_limits().chunk_bytes) {
    const int count = static_cast<int>(std::min(bytes - done, mpi_limits().chunk_bytes));
    requests_.push_back(MPI_REQUEST_NULL);
    expected_.push_back({peer, count});
    group_->check(MPI_Irecv(data + done, count, MPI_BYTE, peer, tag_, group_->comm, &requests_.back()),
                  "MPI_Irecv", signature().text());
  }
}

void MpiCall::check_received(int code) {
  if (code != MPI_ERR_IN_STATUS) group_->check(code, "MPI_Testall", text());
  for (size_t i = 0; i < requests_.size(); i++) {
    const bool is_send = expected_[i].bytes < 0;
    if (code == MPI_ERR_IN_STATUS) {
      const int error = statuses_[i].MPI_ERROR;
      if (error == MPI_ERR_PENDING) continue;  // this one is not complete: another failed
      group_->check(error, is_send ? "a send" : "a receive", str(text(), ", peer ", expected_[i].peer));
    }
    if (is_send) continue;
    int got = 0;
    MPI_Get_count(&statuses_[i], MPI_BYTE, &got);
    SHOAL_CHECK(got == expected_[i].bytes, text(), ": rank ", expected_[i].peer, " sent ", got,
                " bytes, expected ", expected_[i].bytes,
                "; run with SHOAL_CHECK_COLLECTIVES=1 to see which calls differ");
  }
}

void MpiCall::progress() {
  while (!done_) {
    if (!requests_.empty()) {
      int complete = 0;
      statuses_.resize(requests_.size());
      const int code =
          MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete, statuses_.data());
      if (code == MPI_SUCCESS && complete == 0) return;
      check_received(code);
      requests_.clear();
      expected_.clear();
    }
    next_stage();
  }
}

std::string MpiCall::missing() const {
  std::set<int> peers;
  for (size_t i = 0; i < requests_.size(); i++) {
    int complete = 0;
    MPI_Request_get_status(requests_[i], &complete, MPI_STATUS_IGNORE);
    if (complete == 0) peers.insert(expected_[i].peer);
  }
  MissingRanks missing;
  for (const int peer : peers) missing.add(group_->world_ranks.at(static_cast<size_t>(peer)));
  return missing.text();
}

void MpiCall::next_stage() {
  const int stage = stage_++;
  const CollectiveKind kind = signature().kind;
  if (kind == CollectiveKind::all_reduce && stage == 0) return start_all_reduce();
  if (kind == CollectiveKind::all_reduce && stage == 1) return gather_pieces();
  if (kind == CollectiveKind::all_gather && stage == 0) return start_all_gather();
  if (kind == CollectiveKind::all_to_all && stage == 0) return start_all_to_all();
  if (kind == CollectiveKind::broadcast && stage == 0) return start_broadcast();
  if (kind == CollectiveKind::broadcast && stage == 1) return send_to_children();
  if (kind == CollectiveKind::barrier && 1 << stage < size()) return start_barrier_round();
  if (kind == CollectiveKind::reduce_scatter) {
    if (stage == 0) {
      std::vector<int64_t> offsets, bytes(static_cast<size_t>(size()), part_bytes());
      for (int r = 0; r < size(); r++) offsets.push_back(r * part_bytes());
      return exchange_parts_to_scratch(part_bytes(), offsets, bytes);
    }
    reduce_scratch(in(rank() * part_bytes()), out(0), part_bytes());
  }
  done_ = true;
  scratch_ = {};
  call_.in = call_.out = {};  // an operation that is done keeps no tensor alive
}

/// Piece r of the tensor is reduced by rank r.
void MpiCall::piece_of(int r, int64_t* begin_bytes, int64_t* bytes) const {
  const ShardRange range = shard_range(signature().count, {r, size()});
  *begin_bytes = range.begin * dtype_size(signature().dtype);
  *bytes = (range.end - range.begin) * dtype_size(signature().dtype);
}

/// Sends part r of `in` to rank r and receives the own part of every other rank into scratch.
void MpiCall::exchange_parts_to_scratch(int64_t own_bytes, const std::vector<int64_t>& offsets,
                                        const std::vector<int64_t>& bytes) {
  const int64_t element = dtype_size(signature().dtype);
  scratch_ = on_device() ? Tensor::empty({size(), own_bytes / element}, signature().dtype, device())
                         : Tensor::empty({(size() - 1) * own_bytes}, DType::u8);
  for (int i = 1; i < size(); i++) {
    const int from = (rank() + i) % size();
    receive(scratch_part(from, own_bytes), own_bytes, from);
  }
  for (int i = 1; i < size(); i++) {
    const int to = (rank() + size() - i) % size();
    send(in(offsets[static_cast<size_t>(to)]), bytes[static_cast<size_t>(to)], to);
  }
}

/// Where the part of another rank lies: on the host behind that of the rank before it, counted from this one;
/// on a device in the order of sums, with a place for the own one.
std::byte* MpiCall::scratch_part(int from, int64_t bytes) const {
  return scratch_.bytes() + (on_device() ? from : (from + size() - rank()) % size() - 1) * bytes;
}

void MpiCall::reduce_on_device(const std::byte* own, std::byte* to, int64_t bytes) const {
  copy(scratch_part(rank(), bytes), own, bytes);
  const int64_t element = dtype_size(signature().dtype);
  const Tensor out = call_.out.flat((to - call_.out.bytes()) / element, bytes / element);
  reduce_rows(device(), scratch_, static_cast<RowReduction>(signature().op), out);
  wait_for_device();
}

/// Sums the own part and the received ones in rank order.
void MpiCall::reduce_scratch(const std::byte* own, std::byte* to, int64_t bytes) {
  if (on_device()) return reduce_on_device(own, to, bytes);
  std::vector<const std::byte*> parts(static_cast<size_t>(size()), own);
  for (int from = 0; from < size(); from++) {
    if (from != rank()) parts[static_cast<size_t>(from)] = scratch_part(from, bytes);
  }
  reduce_parts(signature().dtype, signature().op, parts, to, bytes / dtype_size(signature().dtype));
}

/// Small tensors: everyone gets everything and sums it (one round). Large ones: rank r sums piece r, then the
/// pieces are gathered (two rounds, each of the size of the tensor).
void MpiCall::start_all_reduce() {
  if (size() * part_bytes() <= mpi_limits().small_reduce_bytes) {
    const auto n = static_cast<size_t>(size());
    return exchange_parts_to_scratch(part_bytes(), std::vector<int64_t>(n, 0),
                                     std::vector<int64_t>(n, part_bytes()));
  }
  std::vector<int64_t> offsets(static_cast<size_t>(size())), bytes(offsets.size());
  for (int r = 0; r < size(); r++)
    piece_of(r, &offsets[static_cast<size_t>(r)], &bytes[static_cast<size_t>(r)]);
  exchange_parts_to_scratch(bytes[static_cast<size_t>(rank())], offsets, bytes);
}

void MpiCall::gather_pieces() {
  if (size() * part_bytes() <= mpi_limits().small_reduce_bytes)
    return reduce_scratch(in(0), out(0), part_bytes());
  int64_t begin = 0, bytes = 0;
  piece_of(rank(), &begin, &bytes);
  reduce_scratch(in(begin), out(begin), bytes);
  for (int i = 1; i < size(); i++) {
    const int from = (rank() + i) % size();
    int64_t from_begin = 0, from_bytes = 0;
    piece_of(from, &from_begin, &from_bytes);
    receive(out(from_begin), from_bytes, from);
  }
  for (int i = 1; i < size(); i++) send(out(begin), bytes, (rank() + size() - i) % size());
}

void MpiCall::start_all_gather() {
  for (int i = 1; i < size(); i++) {
    const int from = (rank() + i) % size();
    receive(out(from * part_bytes()), part_bytes(), from);
  }
  for (int i = 1; i < size(); i++) send(in(0), part_bytes(), (rank() + size() - i) % size());
  copy(out(rank() * part_bytes()), in(0), part_bytes());
}

void MpiCall::start_all_to_all() {
  const auto n = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  const int64_t row_bytes = call_.row_bytes();
  std::vector<int64_t> send_at(n), recv_at(n);
  std::exclusive_scan(call_.send_rows.begin(), call_.send_rows.end(), send_at.begin(), int64_t{0});
  std::exclusive_scan(call_.recv_rows.begin(), call_.recv_rows.end(), recv_at.begin(), int64_t{0});
  SHOAL_CHECK(call_.send_rows[me] == call_.recv_rows[me], text(), ": sends ", call_.send_rows[me],
              " rows to itself but expects ", call_.recv_rows[me]);
  for (size_t i = 1; i < n; i++) {
    const size_t from = (me + i) % n;
    receive(out(recv_at[from] * row_bytes), call_.recv_rows[from] * row_bytes, static_cast<int>(from));
  }
  for (size_t i = 1; i < n; i++) {
    const size_t to = (me + n - i) % n;
    send(in(send_at[to] * row_bytes), call_.send_rows[to] * row_bytes, static_cast<int>(to));
  }
  copy(out(recv_at[me] * row_bytes), in(send_at[me] * row_bytes), call_.send_rows[me] * row_bytes);
}

/// Dissemination: in round i every rank signals the one 2^i further on.
void MpiCall::start_barrier_round() {
  if (!scratch_.defined()) scratch_ = Tensor::zeros({2}, DType::u8);
  const int distance = 1 << (stage_ - 1);
  receive(scratch_.bytes(), 1, (rank() + size() - distance) % size());
  send(scratch_.bytes() + 1, 1, (rank() + distance) % size());
}

/// Binomial tree, ranks counted from the root: the parent of v is v without its lowest bit.
void MpiCall::start_broadcast() {
  const int v = (rank() + size() - signature().root) % size();
  if (v != 0) receive(out(0), part_bytes(), ((v & (v - 1)) + signature().root) % size());
}

void MpiCall::send_to_children() {
  const int v = (rank() + size() - signature().root) % size();
  int lowest = v == 0 ? size() : v & -v;
  for (int bit = 1; bit < lowest && v + bit < size(); bit <<= 1)
    send(out(0), part_bytes(), (v + bit + signature().root) % size());
}

class MpiCommunicator final : public CheckedCommunicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<MpiGroup> group)
      : CheckedCommunicator(group->rank, group->size, group->name), group_(std::move(group)) {}

  bool carries(Device device) const override {
    return device.type == DeviceType::cpu || mpi_limits().device_tensors;
  }
  void barrier() override {
    if (size() > 1) start(CollectiveCall{}).wait();
  }
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name) override;

 protected:
  Work start(CollectiveCall call) override {
    if (collective_checks_enabled()) compare(call);
    return begin(std::move(call));
  }

 private:
  Work begin(CollectiveCall call) {
    // MPI is started with MPI_THREAD_FUNNELED; a second thread in it would crash rarely and far from here.
    SHOAL_CHECK(std::this_thread::get_id() == group_->thread, group_->where(call.signature.text()),
                ": expected the thread that started MPI, got another one; collect in that thread what others "
                "have to send");
    auto started = std::make_shared<MpiCall>(group_, std::move(call));
    started->begin();
    add_open_calls(started);
    return work_for(started);
  }
  void compare(const CollectiveCall& call) {
    compare_calls({size(), name(), group_->num_calls / 2,
                   [this](CollectiveCall gather) { return begin(std::move(gather)); }},
                  call);
  }

  std::shared_ptr<MpiGroup> group_;
};

std::shared_ptr<MpiGroup> adopt(MPI_Comm comm, const std::string& name) {
  auto group = std::make_shared<MpiGroup>();
  group->comm = comm;
  group->name = name;
  group->check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", name);
  group->check(MPI_Comm_rank(comm, &group->rank), "MPI_Comm_rank", name);
  group->check(MPI_Comm_size(comm, &group->size), "MPI_Comm_size", name);
  std::vector<int> ranks(static_cast<size_t>(group->size));
  std::iota(ranks.begin(), ranks.end(), 0);
  group->world_ranks = ranks;
  MPI_Group here = MPI_GROUP_NULL, world = MPI_GROUP_NULL;
  MPI_Comm_group(comm, &here);
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  MPI_Group_translate_ranks(here, group->size, ranks.data(), world, group->world_ranks.data());
  MPI_Group_free(&here);
  MPI_Group_free(&world);
  return group;
}

std::shared_ptr<Communicator> MpiCommunicator::split(int color, int key, const std::string& name) {
  // MPI_Comm_split blocks without moving our calls in flight: enter it only when all ranks are about to.
  if (size() > 1) {
    CollectiveCall call;
    call.signature.kind = CollectiveKind::split;
    if (collective_checks_enabled()) compare(call);
    call.signature.kind = CollectiveKind::barrier;
    begin(std::move(call)).wait();
  }
  SHOAL_CHECK(color >= 0, "split [", this->name(), "]: expected color >= 0, got ", color);
  MPI_Comm part = MPI_COMM_NULL;
  group_->check(MPI_Comm_split(group_->comm, color, key, &part), "MPI_Comm_split", "split()");
  return std::make_shared<MpiCommunicator>(adopt(part, name));
}

}  // namespace

bool mpi_knows_cuda() {
#ifdef MPIX_CUDA_AWARE_SUPPORT  // the function is there; what it says is of this run
  return MPIX_Query_cuda_support() == 1;
#else
  return false;
#endif
}

MpiLimits& mpi_limits() {
  static MpiLimits limits;
  return limits;
}

std::shared_ptr<Communicator> make_mpi_world() {
  MPI_Comm world = MPI_COMM_NULL;
  const int code = MPI_Comm_dup(MPI_COMM_WORLD, &world);
  SHOAL_CHECK(code == MPI_SUCCESS, "MPI_Comm_dup of MPI_COMM_WORLD failed with code ", code);
  return std::make_shared<MpiCommunicator>(adopt(world, "world"));
}

}  // namespace shoal
