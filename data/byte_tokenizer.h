// ByteTokenizer: ids 0..255 are the bytes, 256 ends a document. Nothing is learnt.
#pragma once

#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace shoal {

class ByteTokenizer final : public Tokenizer {
 public:
  using Tokenizer::encode;
  std::string name() const override { return "byte"; }
  int64_t vocab_size() const override { return 257; }
  void encode(std::string_view text, std::vector<int32_t>& out) const override;
  std::string_view token_bytes(int32_t id) const override;
  std::optional<int32_t> token_id(std::string_view text) const override;
  std::optional<int32_t> end_of_document() const override { return 256; }
  std::vector<SpecialToken> special_tokens() const override { return {{kEndOfDocumentText, 256}}; }
  std::string to_json() const override;
};

}  // namespace shoal
