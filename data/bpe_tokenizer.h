// BpeTokenizer: byte-level byte-pair encoding. Text is cut by a regex, and inside each piece the adjacent
// pair with the lowest merge rank is joined until none is left (leftmost first among equals).
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "data/added_tokens.h"
#include "data/pre_tokenizer.h"
#include "data/tokenizer.h"

namespace shoal {

struct BpeMerge {
  int32_t left = 0, right = 0, result = 0;
};

/// Plain data of a byte-level BPE tokenizer, made by the trainer or from a file; already validated.
struct BpeModel {
  struct Added {
    std::string text;
    int32_t id = 0;
    bool special = true;  // false: matched in ordinary text too, before the regex
  };
  std::vector<std::string> tokens;  // the bytes of each id; every single byte is a token
  std::vector<BpeMerge> merges;     // in rank order
  std::vector<Added> added;         // in id order
  PreTokenRegex regex = PreTokenRegex::gpt2;
  bool ignore_merges = false;  // a piece that is a token as a whole is not merged
  std::optional<int32_t> beginning_of_document;
  std::string file;  // of a loaded tokenizer: the file's text, saved again as it is
};

/// (left id, right id) -> rank and result; open addressing, read-only after construction.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank;
    int32_t result;
  };
  static constexpr uint32_t kNoRank = 0xFFFFFFFF;

  explicit MergeTable(const std::vector<BpeMerge>& merges);
  /// rank == kNoRank: the pair is not merged.
  Merge find(int32_t left, int32_t right) const {
    const uint64_t key = key_of(left, right);
    for (uint64_t slot = hash(key) & mask_;; slot = (slot + 1) & mask_) {
      if (slots_[slot].key == key) return slots_[slot].merge;
      if (slots_[slot].merge.rank == kNoRank) return slots_[slot].merge;
    }
  }

 private:
  struct Slot {
    uint64_t key = ~uint64_t{0};
    Merge merge{kNoRank, -1};
  };
  static uint64_t key_of(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  static uint64_t hash(uint64_t key) {
    key *= 0x9E3779B97F4A7C15ULL;
    return key ^ key >> 32;
  }
  std::vector<Slot> slots_;
  uint64_t mask_ = 0;
};

class BpeTokenizer final : public Tokenizer {
 public:
  explicit BpeTokenizer(BpeModel model);
  ~BpeTokenizer() override;

  using Tokenizer::encode;
  std::string name() const override { return "bpe"; }
  int64_t vocab_size() const override { return static_cast<int64_t>(model_.tokens.size()); }
  void encode(std::string_view text, std::vector<int32_t>& out) const override;
  std::string_view token_bytes(int32_t id) const override;
  std::optional<int32_t> token_id(std::string_view text) const override;
  /// The first of the usual end-of-document names among the special tokens.
  std::optional<int32_t> end_of_document() const override { return end_; }
  std::optional<int32_t> beginning_of_document() const override { return model_.beginning_of_document; }
  std::vector<SpecialToken> special_tokens() const override;
  bool can_cut_between_words() const override { return plain_added_.empty(); }
  std::string to_json() const override;
  const BpeModel& model() const { return model_; }

 private:
  struct Scratch;  // cache and buffers of one thread
  std::unique_ptr<Scratch> take_scratch() const;
  void encode_piece(std::string_view piece, Scratch& scratch, std::vector<int32_t>& out) const;
  void merge_short(std::vector<int32_t>& ids, Scratch& scratch) const;
  void merge_long(std::vector<int32_t>& ids, Scratch& scratch) const;

  BpeModel model_;
  MergeTable merges_;
  std::array<int32_t, 256> byte_ids_{};
  std::unordered_map<std::string_view, int32_t> ids_;  // keys view model_.tokens; without added tokens
  AddedTokenMatcher plain_added_;                      // added tokens that are not special
  std::optional<int32_t> end_;
  mutable std::mutex scratch_mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> free_scratch_;
};

}  // namespace shoal
