// BpeTrainer: learns a byte-level BPE vocabulary as the Hugging Face trainer does, so the same text gives the
// same tokenizer. Ids: <|endoftext|> and other special tokens, the 256 bytes, then one token per merge.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/bpe_tokenizer.h"

namespace shoal {

class BpeTrainer final : public TokenizerTrainer {
 public:
  /// UsageError when vocab_size does not hold the special tokens and the bytes, or special tokens are not
  /// distinct.
  explicit BpeTrainer(const BpeOptions& options);

  bool needs_text() const override { return true; }
  /// Counts pre-tokens with num_threads() threads.
  void add(std::span<const std::string_view> texts) override;
  /// Stops early, with a note, when no pair is left that occurs often enough.
  TrainedTokenizer train() override;

 private:
  struct StringHash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>{}(s); }
  };
  using Counts = std::unordered_map<std::string, int64_t, StringHash, std::equal_to<>>;

  BpeOptions options_;
  PreTokenRegex regex_;
  std::vector<Counts> counts_;  // per thread
};

}  // namespace shoal
