#include "data/bpe_tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

#include "data/tokenizer_json.h"

namespace shoal {

namespace {

constexpr size_t kShortPiece = 64;  // up to this size a linear search for the best pair beats a heap

/// Maps recent short pieces to their ids: 2 MiB, two entries per set, the older one is replaced.
class PieceCache {
 public:
  static constexpr size_t kMaxBytes = 31, kMaxIds = 7;
  struct alignas(64) Slot {
    char bytes[kMaxBytes];
    uint8_t size;  // 0: empty
    int32_t ids[kMaxIds];
    int32_t num_ids;
  };
  static_assert(sizeof(Slot) == 64);

  PieceCache() : slots_(2 * kSets) {}

  /// The slot that holds `piece`, or null; `key` becomes the piece's key for insert().
  const Slot* find(std::string_view piece, Slot& key) const {
    std::memset(&key, 0, 32);
    std::memcpy(key.bytes, piece.data(), piece.size());
    key.size = static_cast<uint8_t>(piece.size());
    const Slot* set = &slots_[2 * set_of(key)];
    if (std::memcmp(set, &key, 32) == 0) return set;
    if (std::memcmp(set + 1, &key, 32) == 0) return set + 1;
    return nullptr;
  }
  void insert(Slot& key, const int32_t* ids, size_t num_ids) {
    Slot* set = &slots_[2 * set_of(key)];
    set[1] = set[0];
    std::copy_n(ids, num_ids, key.ids);
    key.num_ids = static_cast<int32_t>(num_ids);
    set[0] = key;
  }

 private:
  static constexpr size_t kSets = size_t{1} << 14;
  static size_t set_of(const Slot& key) {
    uint64_t words[4];
    std::memcpy(words, &key, 32);
    uint64_t h = words[0] * 0x9E3779B97F4A7C15ULL;
    for (int i = 1; i < 4; i++) h = (std::rotl(h, 29) ^ words[i]) * 0x9E3779B97F4A7C15ULL;
    return h >> 50;
  }
  std::vector<Slot> slots_;
};

constexpr const char* kEndNames[] = {kEndOfDocumentText, "<|end_of_text|>", "</s>", "<eos>", "<|end|>"};

}  // namespace

struct BpeTokenizer::Scratch {
  struct Candidate {  // heap entry of merge_long; smallest (rank, position) first
    uint32_t rank, position;
    int32_t left, right, result;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };
  PieceCache cache;
  std::vector<int32_t> ids;
  std::vector<MergeTable::Merge> pairs;
  std::vector<uint32_t> previous, next;
  std::vector<Candidate> heap;
};

MergeTable::MergeTable(const std::vector<BpeMerge>& merges)
    : slots_(std::bit_ceil(2 * merges.size() + 2)), mask_(slots_.size() - 1) {
  for (size_t rank = 0; rank < merges.size(); rank++) {
    const uint64_t key = key_of(merges[rank].left, merges[rank].right);
    uint64_t slot = hash(key) & mask_;
    while (slots_[slot].merge.rank != kNoRank) slot = (slot + 1) & mask_;
    slots_[slot] = {key, {static_cast<uint32_t>(rank), merges[rank].result}};
  }
}

BpeTokenizer::BpeTokenizer(BpeModel model) : model_(std::move(model)), merges_(model_.merges) {
  std::vector<bool> added(model_.tokens.size());
  for (const auto& token : model_.added) {
    added[static_cast<size_t>(token.id)] = true;
    if (!token.special) plain_added_.add(token.text, token.id);
  }
  byte_ids_.fill(-1);
  for (size_t id = 0; id < model_.tokens.size(); id++) {
    if (added[id]) continue;
    const std::string& bytes = model_.tokens[id];
    if (bytes.size() == 1) byte_ids_[static_cast<unsigned char>(bytes[0])] = static_cast<int32_t>(id);
    ids_.emplace(bytes, static_cast<int32_t>(id));
  }
  for (size_t byte = 0; byte < 256; byte++)
    SHOAL_CHECK(byte_ids_[byte] >= 0, "bpe model: no token for byte ", byte);
  for (const char* name : kEndNames) {
    const auto is_end = [&](const BpeModel::Added& token) { return token.special && token.text == name; };
    const auto found = std::find_if(model_.added.begin(), model_.added.end(), is_end);
    if (found == model_.added.end()) continue;
    end_ = found->id;
    break;
  }
}

BpeTokenizer::~BpeTokenizer() = default;

std::unique_ptr<BpeTokenizer::Scratch> BpeTokenizer::take_scratch() const {
  const std::lock_guard lock(scratch_mutex_);
  if (free_scratch_.empty()) return std::make_unique<Scratch>();
  auto scratch = std::move(free_scratch_.back());
  free_scratch_.pop_back();
  return scratch;
}

void BpeTokenizer::encode(std::string_view text, std::vector<int32_t>& out) const {
  SHOAL_CHECK(text.size() < (size_t{1} << 32), "bpe encode: expected less than 4 GiB of text at once, got ",
              text.size(), " bytes; cut it between words");
  auto scratch = take_scratch();
  const auto encode_text = [&](std::string_view part) {
    for_each_pre_token(model_.regex, part,
                       [&](std::string_view piece) { encode_piece(piece, *scratch, out); });
  };
  plain_added_.for_each_piece(text, encode_text, [&](int32_t id) { out.push_back(id); });
  const std::lock_guard lock(scratch_mutex_);
  free_scratch_.push_back(std::move(scratch));
}

void BpeTokenizer::encode_piece(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const {
  if (piece.size() == 1) {
    out.push_back(byte_ids_[static_cast<unsigned char>(piece[0])]);
    return;
  }
  PieceCache::Slot key;
  const bool cacheable = piece.size() <= PieceCache::kMaxBytes;
  if (cacheable) {
    if (const auto* hit = scratch.cache.find(piece, key)) {
      out.insert(out.end(), hit->ids, hit->ids + hit->num_ids);
      return;
    }
  }
  auto& ids = scratch.ids;
  ids.clear();
  if (model_.ignore_merges) {
    if (const auto whole = ids_.find(piece); whole != ids_.end()) ids.push_back(whole->second);
  }
  if (ids.empty()) {
    for (const char c : piece) ids.push_back(byte_ids_[static_cast<unsigned char>(c)]);
    piece.size() <= kShortPiece ? merge_short(ids, scratch) : merge_long(ids, scratch);
  }
  if (cacheable && ids.size() <= PieceCache::kMaxIds) scratch.cache.insert(key, ids.data(), ids.size());
  out.insert(out.end(), ids.begin(), ids.end());
}

void BpeTokenizer::merge_short(std::vector<int32_t>& ids, Scratch& scratch) const {
  auto& pairs = scratch.pairs;  // pairs[i]: the merge of ids[i] and ids[i + 1]
  pairs.clear();
  for (size_t i = 0; i + 1 < ids.size(); i++) pairs.push_back(merges_.find(ids[i], ids[i + 1]));
  while (!pairs.empty()) {
    const auto best = std::min_element(pairs.begin(), pairs.end(),
                                       [](const auto& a, const auto& b) { return a.rank < b.rank; });
    if (best->rank == MergeTable::kNoRank) break;
    const auto i = static_cast<size_t>(best - pairs.begin());
    ids[i] = best->result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(i) + 1);
    pairs.erase(best);
    if (i > 0) pairs[i - 1] = merges_.find(ids[i - 1], ids[i]);
    if (i < pairs.size()) pairs[i] = merges_.find(ids[i], ids[i + 1]);
  }
}

void BpeTokenizer::merge_long(std::vector<int32_t>& ids, Scratch& scratch) const {
  // Symbols form a linked list over their first positions; a merged-away symbol has id -1. O(n log n).
  const auto n = static_cast<uint32_t>(ids.size());
  auto& previous = scratch.previous;
  auto& next = scratch.next;
  auto& heap = scratch.heap;
  previous.resize(n);
  next.resize(n);
  heap.clear();
  const auto push = [&](uint32_t at) {
    const auto merge = merges_.find(ids[at], ids[next[at]]);
    if (merge.rank == MergeTable::kNoRank) return;
    heap.push_back({merge.rank, at, ids[at], ids[next[at]], merge.result});
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (uint32_t i = 0; i < n; i++) {
    previous[i] = i - 1;  // wraps at 0, never read there
    next[i] = i + 1;      // n: none
  }
  for (uint32_t i = 0; i + 1 < n; i++) push(i);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto top = heap.back();
    heap.pop_back();
    const uint32_t at = top.position, second = next[at];
    if (ids[at] != top.left || second == n || ids[second] != top.right) continue;  // stale
    ids[at] = top.result;
    ids[second] = -1;
    next[at] = next[second];
    if (next[at] < n) {
      previous[next[at]] = at;
      push(at);
    }
    if (at > 0) push(previous[at]);
  }
  std::erase(ids, -1);
}

std::string_view BpeTokenizer::token_bytes(int32_t id) const {
  SHOAL_CHECK(id >= 0 && id < vocab_size(), "bpe tokenizer: expected a token id in 0..", vocab_size() - 1,
              ", got ", id);
  return model_.tokens[static_cast<size_t>(id)];
}

std::optional<int32_t> BpeTokenizer::token_id(std::string_view text) const {
  for (const auto& token : model_.added) {
    if (token.text == text) return token.id;
  }
  const auto found = ids_.find(text);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

std::vector<SpecialToken> BpeTokenizer::special_tokens() const {
  std::vector<SpecialToken> special;
  for (const auto& token : model_.added) {
    if (token.special) special.push_back({token.text, token.id});
  }
  return special;
}

std::string BpeTokenizer::to_json() const {
  return model_.file.empty() ? bpe_to_json(model_) : model_.file;
}

}  // namespace shoal
