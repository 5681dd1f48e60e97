// CharTokenizer: one token per Unicode code point seen in the training text, ids in code point order,
// optionally an end-of-document token after them.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "data/tokenizer.h"

namespace shoal {

class CharTokenizer final : public Tokenizer {
 public:
  /// `code_points`: Unicode scalar values, strictly ascending.
  CharTokenizer(std::vector<uint32_t> code_points, bool end_of_document);

  using Tokenizer::encode;
  std::string name() const override { return "char"; }
  int64_t vocab_size() const override { return static_cast<int64_t>(texts_.size()); }
  void encode(std::string_view text, std::vector<int32_t>& out) const override;
  std::string_view token_bytes(int32_t id) const override;
  std::optional<int32_t> token_id(std::string_view text) const override;
  std::optional<int32_t> end_of_document() const override { return end_; }
  std::vector<SpecialToken> special_tokens() const override;
  std::string to_json() const override;

 private:
  [[noreturn]] static void refuse(std::string_view text, size_t offset, int length);

  std::vector<uint32_t> code_points_;
  std::vector<std::string> texts_;  // UTF-8 of each id
  std::vector<int32_t> ascii_ids_;  // [128], -1: not in the vocabulary
  std::unordered_map<uint32_t, int32_t> ids_;
  std::optional<int32_t> end_;
};

}  // namespace shoal
