#include "data/tokenizer.h"

#include <algorithm>
#include <filesystem>

#include "data/added_tokens.h"
#include "data/bpe_tokenizer.h"
#include "data/char_tokenizer.h"
#include "data/file_io.h"
#include "data/tokenizer_json.h"

namespace shoal {

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += token_bytes(id);
  return text;
}

void encode_with_special_tokens(const Tokenizer& tokenizer, std::string_view text,
                                std::vector<int32_t>& out) {
  AddedTokenMatcher matcher;
  for (const auto& token : tokenizer.special_tokens()) matcher.add(token.text, token.id);
  matcher.for_each_piece(
      text, [&](std::string_view piece) { tokenizer.encode(piece, out); },
      [&](int32_t id) { out.push_back(id); });
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
  const bool folder = std::filesystem::is_directory(path);
  const std::string file = folder ? (std::filesystem::path(path) / "tokenizer.json").string() : path;
  if (!std::filesystem::exists(file)) {
    throw UsageError(
        str("tokenizer ", path, ": ", folder ? "the folder has no tokenizer.json" : "no such file"));
  }
  return tokenizer_from_json(read_file(file, kMaxTokenizerFileBytes), file);
}

void save_tokenizer(const Tokenizer& tokenizer, const std::string& path) {
  write_file(path, tokenizer.to_json());
}

namespace {

/// Kind `file`: nothing to learn.
class FileTrainer final : public TokenizerTrainer {
 public:
  explicit FileTrainer(const TokenizerFileOptions& options) : path_(options.path) {
    if (path_.empty()) throw UsageError("tokenizer kind file: set path to a tokenizer.json");
  }
  bool needs_text() const override { return false; }
  void add(std::span<const std::string_view>) override {}
  TrainedTokenizer train() override { return {load_tokenizer(path_), ""}; }

 private:
  std::string path_;
};

const bool registered = TokenizerTrainerRegistry::add<TokenizerFileOptions>(
    "file", "an existing tokenizer.json",
    [](const TokenizerFileOptions& options) { return std::make_unique<FileTrainer>(options); });

}  // namespace

}  // namespace shoal
