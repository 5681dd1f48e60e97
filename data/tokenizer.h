// Tokenizer: text bytes <-> token ids, and how a new one is learnt from text. Kinds: `byte` (256 bytes + end
// of document), `char` (distinct Unicode code points of the training text) and `bpe` (byte-level BPE; its
// file is a Hugging Face tokenizer.json). Used by dataset preparation, generation and evaluation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/registry.h"

namespace shoal {

/// The text of the end-of-document token in tokenizers trained here.
inline constexpr const char* kEndOfDocumentText = "<|endoftext|>";

/// A token that stands for a sign and not for text.
struct SpecialToken {
  std::string text;
  int32_t id = 0;
};

/// All functions are const and may be called from several threads at once.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::string name() const = 0;    // "byte", "char" or "bpe"
  virtual int64_t vocab_size() const = 0;  // ids are 0 .. vocab_size()-1
  /// Appends the ids of `text` to `out`. Special tokens mentioned in the text are treated as ordinary text;
  /// see encode_with_special_tokens. byte and bpe accept any bytes, and decode(encode(text)) == text; char
  /// throws UsageError with the byte offset of a character that is not in its vocabulary.
  virtual void encode(std::string_view text, std::vector<int32_t>& out) const = 0;
  /// The bytes token `id` stands for (special tokens: their text). Error when id is outside the vocabulary.
  virtual std::string_view token_bytes(int32_t id) const = 0;
  /// The id of the token that stands for exactly this text, special tokens first.
  virtual std::optional<int32_t> token_id(std::string_view text) const = 0;
  /// Put after every document, if the tokenizer has such a token.
  virtual std::optional<int32_t> end_of_document() const { return std::nullopt; }
  /// Put before every document, only if the tokenizer file asks for it.
  virtual std::optional<int32_t> beginning_of_document() const { return std::nullopt; }
  virtual std::vector<SpecialToken> special_tokens() const { return {}; }
  /// Whether text cut between an ASCII letter and an ASCII space or newline encodes to the same ids piece by
  /// piece.
  virtual bool can_cut_between_words() const { return true; }
  /// The file content load_tokenizer reads back.
  virtual std::string to_json() const = 0;

  std::vector<int32_t> encode(std::string_view text) const;
  /// The bytes of the ids joined; not necessarily valid UTF-8 when the ids end within a character.
  std::string decode(std::span<const int32_t> ids) const;
};

/// Like encode, but occurrences of special tokens in the text become their ids (leftmost, then longest).
void encode_with_special_tokens(const Tokenizer& tokenizer, std::string_view text, std::vector<int32_t>& out);

/// Reads a file written by save_tokenizer or a Hugging Face tokenizer.json (byte-level BPE with the gpt2 or
/// llama3 regex; any other component is refused by name with UsageError).
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);
/// Writes the tokenizer's file through a temporary name, fsync and rename.
void save_tokenizer(const Tokenizer& tokenizer, const std::string& path);

/// What training gives: the tokenizer, and a sentence when it differs from what was asked (empty: it does
/// not).
struct TrainedTokenizer {
  std::unique_ptr<Tokenizer> tokenizer;
  std::string note;
};

/// Learns one kind of tokenizer. The result depends only on the multiset of texts, not on their order, on how
/// they are grouped into calls, or on the number of threads.
class TokenizerTrainer {
 public:
  virtual ~TokenizerTrainer() = default;
  /// False: train() may be called without texts (nothing is learnt from them).
  virtual bool needs_text() const = 0;
  /// Texts are documents, or pieces of documents cut between an ASCII letter and a space or newline.
  virtual void add(std::span<const std::string_view> texts) = 0;
  virtual TrainedTokenizer train() = 0;
};

/// Kinds: byte, char, bpe, and file (an existing tokenizer).
using TokenizerTrainerRegistry = Registry<TokenizerTrainer>;

struct CharOptions final : Options {
  bool end_of_document = false;
  void fields(FieldVisitor& v) override {
    v("end_of_document", end_of_document, "add an end-of-document token after the characters");
  }
};

struct BpeOptions final : Options {
  int64_t vocab_size = 8192;
  std::string regex = "gpt2";
  int64_t min_frequency = 0;
  std::vector<std::string> special_tokens;
  void fields(FieldVisitor& v) override {
    v("vocab_size", vocab_size, "number of tokens: special tokens + 256 bytes + merges",
      in_range(257, 1 << 24));
    v("regex", regex, "how text is cut before merging", one_of({"gpt2", "llama3"}));
    v("min_frequency", min_frequency, "pairs seen less often are not merged", in_range(0, kMaxCount));
    v("special_tokens", special_tokens, "special tokens after <|endoftext|>, which is always id 0",
      not_empty());
  }
  std::string conflict() const override;
};

struct TokenizerFileOptions final : Options {
  std::string path;
  void fields(FieldVisitor& v) override {
    v("path", path, "a tokenizer.json, or a folder that holds one", not_empty());
  }
};

}  // namespace shoal
