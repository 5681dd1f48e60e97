#include "data/char_tokenizer.h"

#include <algorithm>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "data/utf8.h"

namespace shoal {

namespace {

constexpr size_t kCodePoints = 0x110000;

class CharTrainer final : public TokenizerTrainer {
 public:
  explicit CharTrainer(const CharOptions& options) : end_of_document_(options.end_of_document) {}
  bool needs_text() const override { return true; }

  void add(std::span<const std::string_view> texts) override {
    for (const auto text : texts) {
      const char* const end = text.data() + text.size();
      uint32_t code = 0;
      for (const char* p = text.data(); p < end;) {
        const int length = decode_utf8(p, end, code);
        if (length == 0) {
          throw UsageError(str("char tokenizer: the training text is not valid UTF-8 at byte ",
                               p - text.data(),
                               " of a document; use the byte or bpe tokenizer, or clean the text"));
        }
        seen_[code] = true;
        p += length;
      }
    }
  }

  TrainedTokenizer train() override {
    std::vector<uint32_t> code_points;
    for (uint32_t code = 0; code < kCodePoints; code++) {
      if (seen_[code]) code_points.push_back(code);
    }
    if (code_points.empty())
      throw UsageError("char tokenizer: the training text is empty; look at the files of data.text");
    return {std::make_unique<CharTokenizer>(std::move(code_points), end_of_document_), ""};
  }

 private:
  bool end_of_document_;
  std::vector<bool> seen_ = std::vector<bool>(kCodePoints);
};

const bool registered = TokenizerTrainerRegistry::add<CharOptions>(
    "char", "one token per distinct character of the text",
    [](const CharOptions& options) { return std::make_unique<CharTrainer>(options); });

}  // namespace

CharTokenizer::CharTokenizer(std::vector<uint32_t> code_points, bool end_of_document)
    : code_points_(std::move(code_points)), ascii_ids_(128, -1) {
  for (const uint32_t code : code_points_) {
    const auto id = static_cast<int32_t>(texts_.size());
    if (code < 128) ascii_ids_[code] = id;
    ids_.emplace(code, id);
    append_utf8(code, texts_.emplace_back());
  }
  if (end_of_document) {
    end_ = static_cast<int32_t>(texts_.size());
    texts_.emplace_back(kEndOfDocumentText);
  }
}

void CharTokenizer::refuse(std::string_view text, size_t offset, int length) {
  if (length == 0) throw UsageError(str("char tokenizer: the text is not valid UTF-8 at byte ", offset));
  uint32_t code = 0;
  decode_utf8(text.data() + offset, text.data() + text.size(), code);
  char name[16];
  std::snprintf(name, sizeof name, "U+%04X", static_cast<unsigned>(code));
  throw UsageError(
      str("char tokenizer: character ", name, " at byte ", offset,
          " was not in the training text, so it has no token; use only known characters, or the byte or "
          "bpe tokenizer"));
}

void CharTokenizer::encode(std::string_view text, std::vector<int32_t>& out) const {
  out.reserve(out.size() + text.size());
  const char* const end = text.data() + text.size();
  uint32_t code = 0;
  for (const char* p = text.data(); p < end;) {
    const int length = decode_utf8(p, end, code);
    int32_t id = -1;
    if (length == 1) {
      id = ascii_ids_[code];
    } else if (length > 1) {
      const auto found = ids_.find(code);
      if (found != ids_.end()) id = found->second;
    }
    if (id < 0) refuse(text, static_cast<size_t>(p - text.data()), length);
    out.push_back(id);
    p += length;
  }
}

std::string_view CharTokenizer::token_bytes(int32_t id) const {
  SHOAL_CHECK(id >= 0 && id < vocab_size(), "char tokenizer: expected a token id in 0..", vocab_size() - 1,
              ", got ", id);
  return texts_[static_cast<size_t>(id)];
}

std::optional<int32_t> CharTokenizer::token_id(std::string_view text) const {
  if (end_ && text == kEndOfDocumentText) return end_;
  uint32_t code = 0;
  if (text.empty()) return std::nullopt;
  if (decode_utf8(text.data(), text.data() + text.size(), code) != static_cast<int>(text.size()))
    return std::nullopt;
  const auto found = ids_.find(code);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

std::vector<SpecialToken> CharTokenizer::special_tokens() const {
  if (!end_) return {};
  return {{kEndOfDocumentText, *end_}};
}

std::string CharTokenizer::to_json() const {
  std::string characters;
  for (const uint32_t code : code_points_) append_utf8(code, characters);
  return nlohmann::ordered_json{{"shoal_tokenizer", "char"},
                                {"version", 1},
                                {"characters", characters},
                                {"end_of_document", end_.has_value()}}
             .dump(2) +
         "\n";
}

}  // namespace shoal
