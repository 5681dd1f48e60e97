#include "launch/replica_check.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <sstream>

#include "core/base/text.h"
#include "launch/checkpoint_box.h"
#include "launch/crc32c.h"

namespace shoal {

namespace {

constexpr size_t kMostNamed = 8;

/// What a rank says of one tensor: which piece it is, and its checksum.
struct Entry {
  uint64_t key = 0;
  uint64_t checksum = 0;
};

std::string piece_name(const StateTensor& tensor) {
  std::string name = tensor.name;
  for (const Box& box : tensor.is_flat ? tensor.boxes : std::vector{tensor.box})
    if (!(box == Box::whole(tensor.global_shape))) name += str(' ', box_text(box));
  return name;
}

Entry entry_of(const StateTensor& tensor) {
  const Tensor on_host = tensor.value.to(Device{});
  const auto bytes = static_cast<size_t>(on_host.numel()) * dtype_size(on_host.dtype());
  return {std::hash<std::string>{}(piece_name(tensor)), crc32c(on_host.bytes(), bytes)};
}

using Holders = std::map<uint64_t, std::vector<int>>;  // checksum -> ranks

/// Pieces of which not all holders have the same bits.
std::map<uint64_t, Holders> different(const std::vector<std::string>& said) {
  std::map<uint64_t, Holders> pieces;
  for (int rank = 0; rank < std::ssize(said); rank++) {
    const std::string& bytes = said[static_cast<size_t>(rank)];
    for (size_t at = 0; at < bytes.size(); at += sizeof(Entry)) {
      Entry entry;
      std::memcpy(&entry, bytes.data() + at, sizeof entry);
      pieces[entry.key][entry.checksum].push_back(rank);
    }
  }
  std::erase_if(pieces, [](const auto& piece) { return piece.second.size() == 1; });
  return pieces;
}

std::string hexadecimal(uint64_t checksum) {
  char text[17];
  std::snprintf(text, sizeof text, "%08lx", static_cast<unsigned long>(checksum));
  return text;
}

std::string holders_text(const Holders& holders) {
  std::vector<std::string> parts;
  for (const auto& [checksum, ranks] : holders) {
    parts.push_back(str(rank_list(ranks), ranks.size() == 1 ? " holds " : " hold ", hexadecimal(checksum)));
  }
  return join(parts, ", ");
}

}  // namespace

std::string replica_problem(const std::vector<StateTensor>& state, Communicator& world) {
  std::vector<Entry> mine;
  mine.reserve(state.size());
  for (const StateTensor& tensor : state)
    if (tensor.replica_count > 1 && tensor.value.numel() > 0) mine.push_back(entry_of(tensor));
  const std::string bytes(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Entry));
  const std::map<uint64_t, Holders> pieces = different(world.gather_strings(bytes));
  if (pieces.empty()) return "";
  std::vector<std::string> lines;  // a rank knows the names of what it holds only
  for (const StateTensor& tensor : state) {
    const auto found = pieces.find(std::hash<std::string>{}(piece_name(tensor)));
    if (found != pieces.end() && lines.size() < kMostNamed)
      lines.push_back(str(piece_name(tensor), ": ", holders_text(found->second)));
  }
  std::vector<std::string> all;
  for (const std::string& of_rank : world.gather_strings(join(lines, "\n"))) {
    std::istringstream text(of_rank);
    for (std::string line; std::getline(text, line);)
      if (all.size() < kMostNamed && std::ranges::find(all, line) == all.end()) all.push_back(line);
  }
  const std::string more =
      pieces.size() > all.size() ? str("; and ", pieces.size() - all.size(), " more") : "";
  return join(all, "; ") + more;
}

}  // namespace shoal
