#include "data/bpe_trainer.h"

#include <algorithm>
#include <array>

#include "core/base/threads.h"
#include "data/bpe_merger.h"
#include "data/tokenizer_json.h"

namespace shoal {

namespace {

const bool registered = TokenizerTrainerRegistry::add<BpeOptions>(
    "bpe", "byte-level byte-pair encoding",
    [](const BpeOptions& options) { return std::make_unique<BpeTrainer>(options); });

}  // namespace

namespace {

/// With <|endoftext|>, which every vocabulary has.
std::vector<std::string> with_end_of_document(std::vector<std::string> special) {
  if (std::find(special.begin(), special.end(), kEndOfDocumentText) == special.end()) {
    special.insert(special.begin(), kEndOfDocumentText);
  }
  return special;
}

}  // namespace

std::string BpeOptions::conflict() const {
  const std::vector<std::string> special = with_end_of_document(special_tokens);
  auto sorted = special;
  std::sort(sorted.begin(), sorted.end());
  if (sorted.front().empty()) return "special_tokens: expected texts that are not empty, got \"\"";
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) return str("special_tokens: '", *twice, "' is listed twice");
  for (const auto& text : special) {
    if (valid_utf8_prefix(text) != text.size() || text.find('\0') != std::string::npos)
      return str("special_tokens: expected valid UTF-8 without NUL, got '", text, "'");
  }
  const auto least = static_cast<int64_t>(special.size()) + 256;
  if (vocab_size >= least) return "";
  return str("vocab_size: expected at least ", least, " (", special.size(),
             " special tokens + 256 bytes), got ", vocab_size);
}

BpeTrainer::BpeTrainer(const BpeOptions& options)
    : options_(options), regex_(regex_from_name(options.regex)) {
  const std::string problem = options.conflict();
  if (!problem.empty()) throw UsageError("bpe " + problem);
  options_.special_tokens = with_end_of_document(std::move(options_.special_tokens));
}

void BpeTrainer::add(std::span<const std::string_view> texts) {
  const auto threads = static_cast<size_t>(std::max(1, num_threads()));
  if (counts_.size() < threads) counts_.resize(threads);
  const auto n = static_cast<int64_t>(texts.size());
  // One task per table; which table a text lands in does not matter, the tables are summed.
  parallel_tasks(static_cast<int64_t>(threads), [&](int64_t task) {
    auto& counts = counts_[static_cast<size_t>(task)];
    for (int64_t i = task; i < n; i += static_cast<int64_t>(threads)) {
      for_each_pre_token(regex_, texts[static_cast<size_t>(i)], [&](std::string_view piece) {
        const auto found = counts.find(piece);
        if (found != counts.end()) {
          found->second++;
        } else {
          counts.emplace(piece, 1);
        }
      });
    }
  });
}

TrainedTokenizer BpeTrainer::train() {
  Counts total;
  for (auto& counts : counts_) {
    if (total.empty()) {
      total = std::move(counts);
    } else {
      for (const auto& [piece, count] : counts) total[piece] += count;
    }
  }
  counts_.clear();

  BpeModel model;
  model.regex = regex_;
  for (const auto& text : options_.special_tokens) {
    model.added.push_back({text, static_cast<int32_t>(model.tokens.size()), true});
    model.tokens.push_back(text);
  }
  // The bytes in the order of the characters that stand for them in tokenizer.json.
  std::array<int32_t, 256> byte_ids{};
  for (const uint8_t byte : bytes_in_character_order()) {
    byte_ids[byte] = static_cast<int32_t>(model.tokens.size());
    model.tokens.emplace_back(1, static_cast<char>(byte));
  }
  BpeMerger merger(byte_ids);
  for (const auto& [piece, count] : total) merger.add_word(piece, count);
  total.clear();
  merger.run(options_.vocab_size, options_.min_frequency, model);

  TrainedTokenizer result;
  const auto size = static_cast<int64_t>(model.tokens.size());
  if (size < options_.vocab_size) {
    result.note = str("bpe: the vocabulary has ", size, " tokens instead of ", options_.vocab_size,
                      options_.min_frequency <= 1 ? str(": the text has no more pairs of tokens to merge")
                                                  : str(": no other pair of tokens occurs at least ",
                                                        options_.min_frequency, " times in the text"));
  }
  result.tokenizer = std::make_unique<BpeTokenizer>(std::move(model));
  return result;
}

}  // namespace shoal
