#include "data/bpe_merger.h"

#include <algorithm>
#include <string>

namespace shoal {

void BpeMerger::add_word(std::string_view bytes, int64_t count) {
  SHOAL_CHECK(bytes.size() < (size_t{1} << 31), "bpe training: one piece without a word boundary has ",
              bytes.size(), " bytes; expected less than 2 GiB");
  if (bytes.size() < 2) return;  // no pairs
  words_.push_back({static_cast<int64_t>(symbols_.size()), static_cast<int32_t>(bytes.size()), count});
  for (const char c : bytes) symbols_.push_back(byte_ids_[static_cast<unsigned char>(c)]);
}

void BpeMerger::count_pairs() {
  for (size_t w = 0; w < words_.size(); w++) {
    const int32_t* symbols = symbols_.data() + words_[w].begin;
    for (int32_t i = 0; i + 1 < words_[w].size; i++) {
      change(symbols[i], symbols[i + 1], words_[w].count, static_cast<int64_t>(w));
    }
  }
  push_touched();
}

void BpeMerger::change(int32_t left, int32_t right, int64_t delta, int64_t word) {
  const uint64_t pair = pair_of(left, right);
  pair_counts_[pair] += delta;
  if (delta <= 0) return;
  auto& words = touched_[pair];
  if (words.empty() || words.back() != word) words.push_back(word);
}

void BpeMerger::push_touched() {
  for (auto& [pair, words] : touched_) {
    const int64_t count = pair_counts_[pair];
    if (count <= 0) continue;
    heap_.push_back({count, pair, std::move(words)});
    std::push_heap(heap_.begin(), heap_.end());
  }
  touched_.clear();
}

void BpeMerger::merge_in_word(int64_t w, int32_t left, int32_t right, int32_t result) {
  Word& word = words_[static_cast<size_t>(w)];
  int32_t* symbols = symbols_.data() + word.begin;
  int32_t kept = 0;
  for (int32_t i = 0; i < word.size; kept++) {
    if (symbols[i] != left || i + 1 == word.size || symbols[i + 1] != right) {
      symbols[kept] = symbols[i++];
      continue;
    }
    if (kept > 0) {
      change(symbols[kept - 1], left, -word.count, w);
      change(symbols[kept - 1], result, word.count, w);
    }
    if (i + 2 < word.size) {
      change(right, symbols[i + 2], -word.count, w);
      change(result, symbols[i + 2], word.count, w);
    }
    symbols[kept] = result;
    i += 2;
  }
  word.size = kept;
}

void BpeMerger::run(int64_t vocab_size, int64_t min_frequency, BpeModel& model) {
  std::unordered_map<std::string, int32_t> ids;
  for (size_t id = 0; id < model.tokens.size(); id++) ids.emplace(model.tokens[id], static_cast<int32_t>(id));
  count_pairs();

  std::vector<BpeMerge> merges;
  while (static_cast<int64_t>(model.tokens.size()) < vocab_size && !heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    Candidate top = std::move(heap_.back());
    heap_.pop_back();
    const int64_t current = pair_counts_[top.pair];
    if (current != top.count) {
      // Stale: the pair lost or gained occurrences since it was pushed.
      top.count = current;
      heap_.push_back(std::move(top));
      std::push_heap(heap_.begin(), heap_.end());
      continue;
    }
    if (top.count < std::max<int64_t>(1, min_frequency)) break;
    const auto left = static_cast<int32_t>(top.pair >> 32);
    const auto right = static_cast<int32_t>(top.pair & 0xFFFFFFFF);
    const std::string bytes =
        model.tokens[static_cast<size_t>(left)] + model.tokens[static_cast<size_t>(right)];
    const auto [place, fresh] = ids.emplace(bytes, static_cast<int32_t>(model.tokens.size()));
    if (fresh) model.tokens.push_back(bytes);
    merges.push_back({left, right, place->second});
    for (const int64_t w : top.words) merge_in_word(w, left, right, place->second);
    push_touched();
  }

  // A pair whose words came in several candidates may be listed more than once; its last place is its rank.
  std::unordered_map<uint64_t, size_t, PairHash> last;
  for (size_t i = 0; i < merges.size(); i++) last[pair_of(merges[i].left, merges[i].right)] = i;
  model.merges.clear();
  for (size_t i = 0; i < merges.size(); i++) {
    if (last[pair_of(merges[i].left, merges[i].right)] == i) model.merges.push_back(merges[i]);
  }
}

}  // namespace shoal
