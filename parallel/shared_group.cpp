#include "parallel/shared_group.h"

#include <algorithm>
#include <new>
#include <numeric>

#include "core/tensor/device_runtime.h"
#include "parallel/shared_call.h"

namespace shoal {

namespace {

constexpr int64_t kSmallestSlot = int64_t{16} << 10;

int64_t header_bytes(int size) {
  return round_up(static_cast<int64_t>(sizeof(SharedHeader) + sizeof(int64_t) * static_cast<size_t>(size)),
                  kLine);
}

}  // namespace

SharedLimits& shared_limits() {
  static SharedLimits limits;
  return limits;
}

std::string SharedCall::text() const {
  return str(group->where(call.signature.text()), ", call ", number);
}

int64_t SharedGroup::plan_part(int size, SharedLimits& limits) {
  while (limits.slot_bytes / 2 >= std::max(kSmallestSlot, kLine * size) &&
         limits.slot_bytes * limits.num_slots * size > limits.group_bytes)
    limits.slot_bytes /= 2;
  limits.slot_bytes = std::max(limits.slot_bytes, kLine * size);
  return kLine + limits.num_slots * (header_bytes(size) + limits.slot_bytes);
}

SharedGroup::SharedGroup(SharedGroupFacts facts, std::shared_ptr<SharedSegment> segment)
    : facts_(std::move(facts)), segment_(std::move(segment)) {
  for (int r = 0; r < facts_.size; r++)
    counters_.push_back(std::launder(reinterpret_cast<Counters*>(segment_->part(r))));
}

SharedGroup::~SharedGroup() = default;

std::string SharedGroup::where(const std::string& call) const {
  return str(call, " [", facts_.name, ", rank ", facts_.rank, " of ", facts_.size, "]");
}

// A part: counters, headers of all slots, slots.
SharedHeader& SharedGroup::header(int rank, uint64_t chunk) const {
  const auto index = static_cast<int64_t>(chunk % static_cast<uint64_t>(facts_.limits.num_slots));
  return *reinterpret_cast<SharedHeader*>(segment_->part(rank) + kLine + index * header_bytes(facts_.size));
}

int64_t* SharedGroup::sent_rows(int rank, uint64_t chunk) const {
  return reinterpret_cast<int64_t*>(&header(rank, chunk) + 1);
}

std::byte* SharedGroup::slot(int rank, uint64_t chunk) const {
  const SharedLimits& limits = facts_.limits;
  const auto index = static_cast<int64_t>(chunk % static_cast<uint64_t>(limits.num_slots));
  return segment_->part(rank) + kLine + limits.num_slots * header_bytes(facts_.size) +
         index * limits.slot_bytes;
}

/// What one chunk carries from one rank to one other.
int64_t SharedGroup::pair_bytes() const {
  return facts_.limits.slot_bytes / facts_.size / kLine * kLine;
}

std::shared_ptr<AwaitedCall> SharedGroup::start(CollectiveCall call) {
  auto started = std::make_shared<SharedCall>(*this, std::move(call), num_calls_++);
  plan(*started);
  calls_.push_back(started);
  progress();
  return started;
}

/// Way and number of chunks: from what is equal on all ranks.
void SharedGroup::plan(SharedCall& call) const {
  const SharedLimits& limits = facts_.limits;
  const CollectiveKind kind = call.kind();
  const int64_t bytes = call.bytes();
  call.chunk_bytes = limits.slot_bytes;
  if (kind == CollectiveKind::all_to_all) return plan_exchange(call);
  if (kind != CollectiveKind::broadcast && find_region(call)) {
    call.way = Way::in_place;
    call.is_exposed = kind != CollectiveKind::all_reduce;  // that has a stage of its own for it
    return;
  }
  if (kind == CollectiveKind::all_reduce && bytes <= limits.slot_bytes &&
      facts_.size * bytes <= limits.small_reduce_bytes) {
    call.way = Way::everything;
    return;
  }
  if ((kind == CollectiveKind::all_gather || kind == CollectiveKind::broadcast) && limits.single_copy &&
      bytes >= limits.single_copy_bytes) {
    call.way = Way::single_copy;
    call.is_exposed = kind == CollectiveKind::all_gather || call.call.signature.root == facts_.rank;
    return;
  }
  if (kind == CollectiveKind::reduce_scatter) call.chunk_bytes = pair_bytes();
  call.num_chunks = std::max<int64_t>(1, (bytes + call.chunk_bytes - 1) / call.chunk_bytes);
}

void SharedGroup::plan_exchange(SharedCall& call) const {
  const auto me = static_cast<size_t>(facts_.rank);
  const std::vector<int64_t>&send = call.call.send_rows, &recv = call.call.recv_rows;
  SHOAL_CHECK(send[me] == recv[me], call.text(), ": sends ", send[me], " rows to itself but expects ",
              recv[me]);
  const int64_t row_bytes = call.call.row_bytes();
  auto starts = [&](const std::vector<int64_t>& rows) {
    std::vector<int64_t> at(rows.size());
    std::exclusive_scan(rows.begin(), rows.end(), at.begin(), int64_t{0});
    for (int64_t& row : at) row *= row_bytes;
    return at;
  };
  call.send_at = starts(send);
  call.recv_at = starts(recv);
  call.chunk_bytes = pair_bytes();
  call.way = facts_.limits.single_copy ? Way::single_copy : Way::slots;
  if (call.way == Way::slots) call.num_chunks = -1;
  for (size_t to = 0; to < send.size(); to++)
    call.is_exposed |= call.way == Way::single_copy && to != me && send[to] * row_bytes > call.chunk_bytes;
}

/// Where the tensor that all ranks have mapped lies: the one with the parts of all ranks, if there are such.
bool SharedGroup::find_region(SharedCall& call) const {
  const bool scatters = call.kind() == CollectiveKind::reduce_scatter;
  const bool has_parts = scatters || call.kind() == CollectiveKind::all_gather;
  const int64_t bytes = call.bytes() * (has_parts ? facts_.size : 1);
  if (bytes == 0) return false;
  for (size_t i = 0; i < regions_.size(); i++) {
    const std::shared_ptr<SharedSegment> memory = regions_[i].lock();
    if (!memory) continue;
    const int64_t offset = (scatters ? call.in(0) : call.out(0)) - memory->part(facts_.rank);
    if (offset < 0 || offset + bytes > memory->part_bytes()) continue;
    // An all_gather reads what the others have in their own parts of it.
    if (call.kind() == CollectiveKind::all_gather && call.in(0) != call.out(facts_.rank * call.bytes()))
      continue;
    call.region = static_cast<int64_t>(i);
    call.offset = offset;
    return true;
  }
  return false;
}

void SharedGroup::progress() {
  // The chunk that has come furthest first: its bytes are still in the cache, and its slot is needed.
  while (finish_next() || read_next() || reduce_next() || write_next()) {
  }
}

/// Whether every rank has taken `chunk` through the stage.
bool SharedGroup::all_past(Stage stage, uint64_t chunk) {
  uint64_t& seen = seen_[stage];
  if (seen > chunk) return true;
  uint64_t least = UINT64_MAX;
  for (const Counters* counters : counters_)
    least = std::min(least, counters->chunks[stage].load(std::memory_order_acquire));
  seen = least;
  return seen > chunk;
}

void SharedGroup::publish(Stage stage) {
  const SharedCall& call = *calls_[at_[stage]];
  counters_[static_cast<size_t>(facts_.rank)]->chunks[stage].store(++next_[stage], std::memory_order_release);
  if (next_[stage] == call.first_chunk + static_cast<uint64_t>(call.num_chunks)) at_[stage]++;
}

bool SharedGroup::write_next() {
  if (at_[kWritten] == calls_.size()) return false;
  SharedCall& call = *calls_[at_[kWritten]];
  if (call.has_begun && call.num_chunks < 0) return false;
  const uint64_t chunk = next_[kWritten];
  const auto slots = static_cast<uint64_t>(facts_.limits.num_slots);
  if (chunk >= slots && !all_past(kRead, chunk - slots)) return false;
  if (!call.has_begun) {
    call.has_begun = true;
    call.first_chunk = chunk;
    header(facts_.rank, chunk) = {call.call.signature, call.call.in.defined() ? call.in(0) : nullptr,
                                  call.region, call.offset};
    std::copy(call.call.send_rows.begin(), call.call.send_rows.end(), sent_rows(facts_.rank, chunk));
  }
  write(call, chunk);
  publish(kWritten);
  return true;
}

bool SharedGroup::reduce_next() {
  const uint64_t chunk = next_[kReduced];
  if (chunk == next_[kWritten] || !all_past(kWritten, chunk)) return false;
  SharedCall& call = *calls_[at_[kReduced]];
  if (chunk == call.first_chunk) {
    const bool waited_for_length = call.num_chunks < 0;
    check_headers(call);
    if (waited_for_length && call.num_chunks == 1) at_[kWritten]++;
  }
  if (call.sums_pieces()) reduce(call, chunk);
  publish(kReduced);
  return true;
}

bool SharedGroup::read_next() {
  const uint64_t chunk = next_[kRead];
  if (chunk == next_[kReduced]) return false;
  const SharedCall& call = *calls_[at_[kRead]];
  if (call.sums_pieces() && !all_past(kReduced, chunk)) return false;
  read(call, chunk);
  publish(kRead);
  return true;
}

bool SharedGroup::finish_next() {
  if (at_[kRead] == 0) return false;
  SharedCall& call = *calls_.front();
  const uint64_t last = call.first_chunk + static_cast<uint64_t>(call.num_chunks) - 1;
  if (call.is_exposed && !all_past(kRead, last)) return false;
  call.is_done = true;
  call.call.in = call.call.out = {};  // an operation that is done keeps no tensor alive
  calls_.pop_front();
  for (size_t& at : at_) at--;
  return true;
}

/// All ranks have written the first chunk of the call.
void SharedGroup::check_headers(SharedCall& call) const {
  const uint64_t chunk = call.first_chunk;
  int64_t longest = 0;
  for (int r = 0; r < facts_.size; r++) {
    const SharedHeader& other = header(r, chunk);
    if (!(other.signature == call.call.signature)) {
      throw Error(
          mismatch_message(facts_.name, call.number, facts_.rank, call.call.signature, r, other.signature));
    }
    SHOAL_CHECK(other.region == call.region && other.offset == call.offset, call.text(), ": rank ", r,
                " passes another part of the shared tensors of this group than this rank, or a tensor that "
                "is not shared; all ranks must pass the same part");
    if (call.kind() != CollectiveKind::all_to_all) continue;
    const int64_t* rows = sent_rows(r, chunk);
    const int64_t wanted = call.call.recv_rows[static_cast<size_t>(r)];
    if (rows[facts_.rank] != wanted) {
      throw Error(row_mismatch_message(facts_.name, call.number, r, rows[facts_.rank], facts_.rank, wanted));
    }
    for (int to = 0; to < facts_.size; to++)
      if (to != r) longest = std::max(longest, rows[to] * call.call.row_bytes());
  }
  if (call.num_chunks > 0) return;
  call.num_chunks = std::max<int64_t>(1, (longest + call.chunk_bytes - 1) / call.chunk_bytes);
}

std::string SharedGroup::missing() const {
  auto lagging = [&](Stage stage, uint64_t chunk) {
    MissingRanks missing;
    for (size_t r = 0; r < counters_.size(); r++) {
      if (counters_[r]->chunks[stage].load(std::memory_order_acquire) <= chunk)
        missing.add(facts_.world_ranks[r]);
    }
    return missing.text();
  };
  std::string text;
  if (next_[kReduced] < next_[kWritten]) text = lagging(kWritten, next_[kReduced]);
  if (text.empty() && next_[kRead] < next_[kReduced]) text = lagging(kReduced, next_[kRead]);
  // What remains: others still read from this rank, or have not freed a slot.
  if (text.empty() && next_[kRead] > 0) text = lagging(kRead, next_[kRead] - 1);
  return text;
}

}  // namespace shoal
