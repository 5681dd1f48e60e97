#include "data/byte_tokenizer.h"

#include <array>

#include <nlohmann/json.hpp>

namespace shoal {

namespace {

constexpr int32_t kEnd = 256;

// All 256 bytes in order, so that token_bytes can return a view of one.
const std::array<char, 256>& all_bytes() {
  static const auto bytes = [] {
    std::array<char, 256> table{};
    for (size_t i = 0; i < 256; i++) table[i] = static_cast<char>(i);
    return table;
  }();
  return bytes;
}

class ByteTrainer final : public TokenizerTrainer {
 public:
  bool needs_text() const override { return false; }
  void add(std::span<const std::string_view>) override {}
  TrainedTokenizer train() override { return {std::make_unique<ByteTokenizer>(), ""}; }
};

const bool registered = TokenizerTrainerRegistry::add<NoOptions>(
    "byte", "one token per byte, and an end-of-document token",
    [](const NoOptions&) { return std::make_unique<ByteTrainer>(); });

}  // namespace

void ByteTokenizer::encode(std::string_view text, std::vector<int32_t>& out) const {
  out.reserve(out.size() + text.size());
  for (const char c : text) out.push_back(static_cast<unsigned char>(c));
}

std::string_view ByteTokenizer::token_bytes(int32_t id) const {
  SHOAL_CHECK(id >= 0 && id <= kEnd, "byte tokenizer: expected a token id in 0..256, got ", id);
  if (id == kEnd) return kEndOfDocumentText;
  return {&all_bytes()[static_cast<size_t>(id)], 1};
}

std::optional<int32_t> ByteTokenizer::token_id(std::string_view text) const {
  if (text == kEndOfDocumentText) return kEnd;
  if (text.size() == 1) return static_cast<unsigned char>(text[0]);
  return std::nullopt;
}

std::string ByteTokenizer::to_json() const {
  return nlohmann::ordered_json{{"shoal_tokenizer", "byte"}, {"version", 1}}.dump(2) + "\n";
}

}  // namespace shoal
