// How a SharedGroup moves and sums the bytes of one chunk. The order of the sums is that of reduce_parts.
#include <cerrno>
#include <chrono>
#include <cstring>

#include "core/ops/reduce.h"
#include "parallel/reduce_parts.h"
#include "parallel/shared_call.h"
#include "parallel/waiting.h"

namespace shoal {

namespace {

using Clock = std::chrono::steady_clock;

/// What rank r sums of `bytes`: whole lines, so that ranks do not write to the same one.
Piece piece_of(int64_t bytes, int r, int size) {
  const int64_t lines = (bytes + kLine - 1) / kLine;
  const int64_t begin = std::min(bytes, lines * r / size * kLine);
  return {begin, std::min(bytes, lines * (r + 1) / size * kLine) - begin};
}

void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

int64_t index_of(const SharedCall& call, uint64_t chunk) {
  return static_cast<int64_t>(chunk - call.first_chunk);
}

void sum(const SharedCall& call, std::span<const std::byte* const> parts, std::span<std::byte* const> outs,
         size_t num_streamed, int64_t bytes) {
  const CollectiveSignature& s = call.call.signature;
  reduce_parts(s.dtype, s.op, parts, outs, num_streamed, bytes / dtype_size(s.dtype));
}

}  // namespace

/// Into a slot, for another core to read.
void SharedGroup::give(std::byte* to, const std::byte* from, int64_t bytes) {
  const auto begin = Clock::now();
  if (copies_.streams()) {
    stream_bytes(Device{}, to, from, bytes);
  } else {
    copy_bytes(to, from, bytes);
  }
  copies_.note(bytes, Clock::now() - begin);
}

/// A sum of which the first `num_for_others` outputs are for other cores to read.
void SharedGroup::sum_for_others(const SharedCall& call, std::span<const std::byte* const> parts,
                                 std::span<std::byte* const> outs, size_t num_for_others, int64_t bytes) {
  const auto begin = Clock::now();
  sum(call, parts, outs, sums_.streams() ? num_for_others : 0, bytes);
  sums_.note(bytes * (std::ssize(outs) - 1), Clock::now() - begin);  // one output is this rank's own
}

/// Puts into this rank's slot what others need of it.
void SharedGroup::write(const SharedCall& call, uint64_t chunk) {
  std::byte* to = slot(facts_.rank, chunk);
  const int64_t index = index_of(call, chunk), bytes = call.bytes();
  const Piece piece = call.chunk(bytes, index);
  const CollectiveKind kind = call.kind();
  if (kind == CollectiveKind::all_to_all) {
    for (int r = 0; r < facts_.size; r++) {
      const auto i = static_cast<size_t>(r);
      const int64_t total = call.call.send_rows[i] * call.call.row_bytes();
      if (r == facts_.rank || (call.way == Way::single_copy && total > call.chunk_bytes)) continue;
      const Piece part = call.chunk(total, index);
      give(to + r * pair_bytes(), call.in(call.send_at[i] + part.begin), part.bytes);
    }
    return;
  }
  if (call.way == Way::single_copy || call.way == Way::in_place) return;
  const bool gives = kind == CollectiveKind::all_gather || call.way == Way::everything ||
                     (kind == CollectiveKind::broadcast && call.call.signature.root == facts_.rank);
  if (gives) return give(to, call.in(piece.begin), piece.bytes);
  for (int r = 0; r < facts_.size; r++) {
    if (r == facts_.rank) continue;
    if (kind == CollectiveKind::reduce_scatter)
      give(to + r * pair_bytes(), call.in(r * bytes + piece.begin), piece.bytes);
    if (kind != CollectiveKind::all_reduce) continue;
    const Piece part = piece_of(piece.bytes, r, facts_.size);
    give(to + part.begin, call.in(piece.begin + part.begin), part.bytes);
  }
}

/// all_reduce: this rank's piece of the chunk, into its slot for the others and into its own tensor.
void SharedGroup::reduce(const SharedCall& call, uint64_t chunk) {
  if (call.way == Way::in_place) return reduce_in_place(call);
  const Piece range = call.chunk(call.bytes(), index_of(call, chunk));
  const Piece mine = piece_of(range.bytes, facts_.rank, facts_.size);
  std::vector<const std::byte*> parts(static_cast<size_t>(facts_.size));
  for (int r = 0; r < facts_.size; r++) {
    parts[static_cast<size_t>(r)] =
        r == facts_.rank ? call.in(range.begin + mine.begin) : slot(r, chunk) + mine.begin;
  }
  std::byte* const outs[] = {slot(facts_.rank, chunk) + mine.begin, call.out(range.begin + mine.begin)};
  sum_for_others(call, parts, outs, 1, mine.bytes);
}

/// The same for a tensor that all ranks have mapped: from all tensors into all tensors.
void SharedGroup::reduce_in_place(const SharedCall& call) {
  const std::shared_ptr<SharedSegment> memory = regions_[static_cast<size_t>(call.region)].lock();
  const Piece mine = piece_of(call.bytes(), facts_.rank, facts_.size);
  std::vector<std::byte*> tensors;
  for (int r = 0; r < facts_.size; r++) tensors.push_back(memory->part(r) + call.offset + mine.begin);
  const std::vector<const std::byte*> parts(tensors.begin(), tensors.end());
  sum_for_others(call, parts, tensors, tensors.size(), mine.bytes);
}

/// reduce_scatter: this rank's part of all tensors.
void SharedGroup::scatter_in_place(const SharedCall& call) const {
  const std::shared_ptr<SharedSegment> memory = regions_[static_cast<size_t>(call.region)].lock();
  std::vector<const std::byte*> parts;
  for (int r = 0; r < facts_.size; r++)
    parts.push_back(memory->part(r) + call.offset + facts_.rank * call.bytes());
  std::byte* const outs[] = {call.out(0)};
  sum(call, parts, outs, 0, call.bytes());
}

/// Takes from the other ranks what this one needs.
void SharedGroup::read(const SharedCall& call, uint64_t chunk) const {
  switch (call.kind()) {
    case CollectiveKind::all_reduce:
    case CollectiveKind::reduce_scatter:
      return read_sum(call, chunk);
    case CollectiveKind::all_gather:
    case CollectiveKind::broadcast:
      return read_parts(call, chunk);
    case CollectiveKind::all_to_all:
      return read_exchange(call, chunk);
    case CollectiveKind::barrier:
    case CollectiveKind::split:
      return;
  }
}

void SharedGroup::read_sum(const SharedCall& call, uint64_t chunk) const {
  if (call.way == Way::in_place) return call.sums_pieces() ? void() : scatter_in_place(call);
  const int64_t bytes = call.bytes();
  const Piece range = call.chunk(bytes, index_of(call, chunk));
  if (call.sums_pieces()) {
    for (int r = 0; r < facts_.size; r++) {
      const Piece part = piece_of(range.bytes, r, facts_.size);
      if (r != facts_.rank)
        copy_bytes(call.out(range.begin + part.begin), slot(r, chunk) + part.begin, part.bytes);
    }
    return;
  }
  // reduce_scatter, or a small all_reduce: the sum itself is made here.
  const bool scatters = call.kind() == CollectiveKind::reduce_scatter;
  std::vector<const std::byte*> parts(static_cast<size_t>(facts_.size));
  for (int r = 0; r < facts_.size; r++)
    parts[static_cast<size_t>(r)] = slot(r, chunk) + (scatters ? facts_.rank * pair_bytes() : 0);
  parts[static_cast<size_t>(facts_.rank)] = call.in((scatters ? facts_.rank * bytes : 0) + range.begin);
  std::byte* const outs[] = {call.out(range.begin)};
  sum(call, parts, outs, 0, range.bytes);
}

void SharedGroup::read_parts(const SharedCall& call, uint64_t chunk) const {
  const int64_t bytes = call.bytes();
  const bool gathers = call.kind() == CollectiveKind::all_gather, in_place = call.way == Way::in_place,
             whole = in_place || call.way == Way::single_copy;
  const std::shared_ptr<SharedSegment> memory =
      in_place ? regions_[static_cast<size_t>(call.region)].lock() : nullptr;
  const Piece range = whole ? Piece{0, bytes} : call.chunk(bytes, index_of(call, chunk));
  for (int i = 0; i < facts_.size; i++) {
    // From different ranks at any one time.
    const int r = (facts_.rank + i) % facts_.size;
    if (!gathers && (r != call.call.signature.root || r == facts_.rank)) continue;
    std::byte* to = call.out((gathers ? r * bytes : 0) + range.begin);
    if (r == facts_.rank) {
      copy_bytes(to, call.in(range.begin), range.bytes);
    } else if (in_place) {
      copy_bytes(to, memory->part(r) + call.offset + r * bytes, bytes);
    } else if (whole) {
      read_peer(call, r, to, header(r, chunk).data, bytes);
    } else {
      copy_bytes(to, slot(r, chunk), range.bytes);
    }
  }
}

void SharedGroup::read_exchange(const SharedCall& call, uint64_t chunk) const {
  const int64_t row_bytes = call.call.row_bytes(), index = index_of(call, chunk);
  for (int i = 0; i < facts_.size; i++) {
    const int from = (facts_.rank + i) % facts_.size;
    const auto f = static_cast<size_t>(from);
    const int64_t total = call.call.recv_rows[f] * row_bytes;
    std::byte* to = call.out(call.recv_at[f]);
    if (from == facts_.rank) {
      if (index == 0) copy_bytes(to, call.in(call.send_at[f]), total);
    } else if (call.way == Way::single_copy && total > call.chunk_bytes) {
      const int64_t* rows = sent_rows(from, chunk);
      int64_t before = 0;
      for (int r = 0; r < facts_.rank; r++) before += rows[r] * row_bytes;
      read_peer(call, from, to, header(from, chunk).data + before, total);
    } else {
      const Piece part = call.chunk(total, index);
      copy_bytes(to + part.begin, slot(from, chunk) + facts_.rank * pair_bytes(), part.bytes);
    }
  }
}

void SharedGroup::read_peer(const SharedCall& call, int from, std::byte* to, const std::byte* data,
                            int64_t bytes) const {
  const auto r = static_cast<size_t>(from);
  if (facts_.peers[r].read(to, data, bytes)) return;
  throw Error(str(call.text(), ": cannot read the memory of ", describe_rank(facts_.world_ranks[r]), ": ",
                  std::strerror(errno), "; SHOAL_COLLECTIVES=mpi does without"));
}

}  // namespace shoal
