// TokenDataset: the train or the validation part of one token source as one concatenated stream of tokens
// with known document boundaries. The loader cuts its windows from it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/base/config.h"
#include "data/indexed_dataset.h"

namespace shoal {

enum class Split { train, validation, all };

/// How a source is cut into training and validation parts. The choice does not depend on any training seed.
///   documents: round(val_fraction * documents), at least 1, or val_documents of them, chosen
///   pseudo-randomly. tail:      the last val_fraction of the token stream, wherever that falls; train keeps
///              floor(tokens * (1 - val_fraction)) tokens.
///   auto:      documents if val_documents is set or val_fraction * documents >= 4, else tail.
struct SplitOptions {
  std::string split = "auto";
  double val_fraction = 0.05;
  int64_t val_documents = 0;
  void fields(FieldVisitor& v) {
    v("split", split, "how validation data is held out: whole documents, or the tail of the token stream",
      one_of({"auto", "documents", "tail"}));
    v("val_fraction", val_fraction, "share of the data held out for validation", in_range(0, 0.9));
    v("val_documents", val_documents, "number of documents held out; 0: use val_fraction",
      in_range(0, kMaxCount));
  }
};

class TokenDataset {
 public:
  /// UsageError when the split leaves one of the two parts without tokens although it was asked for (never a
  /// silent fallback to the other part).
  TokenDataset(std::shared_ptr<const IndexedDataset> source, const SplitOptions& options, Split part);

  const IndexedDataset& source() const { return *source_; }
  int64_t num_tokens() const { return num_tokens_; }

  /// Copies stream tokens [position, position + tokens.size()); ids are checked when vocab_size > 0. With a
  /// non-empty `starts` (same size) starts[i] = 1 where stream token i is the first of a document, else 0.
  void read(int64_t position, std::span<int32_t> tokens, std::span<uint8_t> starts, int64_t vocab_size) const;
  /// The source's fingerprint combined with the split.
  uint64_t fingerprint() const;

 private:
  struct Segment {
    int64_t stream_begin, token_begin, size;  // in tokens
  };
  void add_segment(int64_t token_begin, int64_t token_end);
  void add_documents(const SplitOptions& options, Split part);

  std::shared_ptr<const IndexedDataset> source_;
  std::vector<Segment> segments_;  // contiguous parts of the source, in stream order, none empty
  int64_t num_tokens_ = 0;
};

}  // namespace shoal
