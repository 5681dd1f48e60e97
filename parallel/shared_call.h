// SharedCall: one call of a SharedGroup, with what shared_group.cpp and shared_transfer.cpp know of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "parallel/collective_call.h"
#include "parallel/shared_group.h"

namespace shoal {

/// How the bytes of a call travel.
enum class Way : uint8_t {
  slots,        // through the slots, chunk by chunk
  everything,   // all_reduce: everyone reads and sums all of it
  single_copy,  // large parts directly from the memory of the other process
  in_place,     // of a tensor that all ranks have mapped
};

/// Beside the slot of the first chunk of a call; the counts of an all_to_all follow it.
struct SharedHeader {
  CollectiveSignature signature;
  const std::byte* data;   // for single_copy: in the address space of its rank
  int64_t region, offset;  // for in_place: which shared tensor, and where in it; -1
};

/// A range of bytes.
struct Piece {
  int64_t begin, bytes;
};

struct SharedCall final : AwaitedCall {
  SharedCall(const SharedGroup& group, CollectiveCall call, uint64_t number)
      : group(&group), call(std::move(call)), number(number) {}
  bool done() const override { return is_done; }
  std::string text() const override;
  std::string missing() const override { return group->missing(); }

  CollectiveKind kind() const { return call.signature.kind; }
  /// Of the tensor or of one rank's part.
  int64_t bytes() const { return call.signature.count * dtype_size(call.signature.dtype); }
  std::byte* in(int64_t offset) const { return call.in.bytes() + offset; }
  std::byte* out(int64_t offset) const { return call.out.bytes() + offset; }
  /// What chunk `index` of this call carries of `total` bytes.
  Piece chunk(int64_t total, int64_t index) const {
    const int64_t begin = std::min(total, index * chunk_bytes);
    return {begin, std::min(total - begin, chunk_bytes)};
  }
  /// Ranks share the work of summing a chunk, so results come back by another stage.
  bool sums_pieces() const {
    return kind() == CollectiveKind::all_reduce && (way == Way::slots || way == Way::in_place);
  }

  const SharedGroup* group;
  CollectiveCall call;
  uint64_t number;
  Way way = Way::slots;
  int64_t chunk_bytes = 0;   // at most, of what one rank has for one other or for all
  int64_t num_chunks = 1;    // -1: known when all ranks have written the first
  uint64_t first_chunk = 0;  // once has_begun
  bool has_begun = false;
  bool is_exposed = false;  // others read this rank's tensor, not its slot
  bool is_done = false;
  int64_t region = -1, offset = -1;       // in_place
  std::vector<int64_t> send_at, recv_at;  // all_to_all: first byte for and from each rank
};

}  // namespace shoal
