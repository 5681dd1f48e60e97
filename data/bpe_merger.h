// BpeMerger: the merge loop of BPE training on counted words.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/bpe_tokenizer.h"

namespace shoal {

class BpeMerger {
 public:
  explicit BpeMerger(const std::array<int32_t, 256>& byte_ids) : byte_ids_(byte_ids) {}

  /// Words are distinct. Their order does not matter for the result.
  void add_word(std::string_view bytes, int64_t count);

  /// Merges the most frequent pair (ties: smaller left id, then smaller right id) until model.tokens has
  /// vocab_size entries or the best pair occurs less than max(1, min_frequency) times. Appends to
  /// model.tokens and sets model.merges. A merge whose bytes already are a token reuses its id.
  void run(int64_t vocab_size, int64_t min_frequency, BpeModel& model);

 private:
  struct Word {
    int64_t begin;  // into symbols_
    int32_t size;   // current number of symbols
    int64_t count;
  };
  struct Candidate {
    int64_t count;
    uint64_t pair;                                  // left id << 32 | right id
    std::vector<int64_t> words;                     // that (may) contain the pair, ascending
    bool operator<(const Candidate& other) const {  // heap order: the best is the largest
      return count != other.count ? count < other.count : pair > other.pair;
    }
  };
  struct PairHash {
    size_t operator()(uint64_t pair) const {
      pair *= 0x9E3779B97F4A7C15ULL;
      return pair ^ pair >> 29;
    }
  };
  using PairWords = std::unordered_map<uint64_t, std::vector<int64_t>, PairHash>;

  static uint64_t pair_of(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  void count_pairs();
  void merge_in_word(int64_t word, int32_t left, int32_t right, int32_t result);
  void change(int32_t left, int32_t right, int64_t delta, int64_t word);
  void push_touched();

  std::array<int32_t, 256> byte_ids_;
  std::vector<int32_t> symbols_;  // of all words
  std::vector<Word> words_;
  std::unordered_map<uint64_t, int64_t, PairHash> pair_counts_;
  PairWords touched_;  // pairs that gained occurrences in the current merge
  std::vector<Candidate> heap_;
};

}  // namespace shoal
