// Token files in Megatron's .bin/.idx format: the writer used by dataset preparation and the memory-mapped
// reader under the loader. .bin holds bare little-endian tokens, .idx the lengths and offsets of sequences
// and documents.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/file_io.h"

namespace shoal {

/// Streams documents into <prefix>.bin and <prefix>.idx. Nothing appears under the final names before
/// finish().
class IndexedDatasetWriter {
 public:
  /// Tokens are stored as u16 if vocab_size < 65500, else as i32.
  IndexedDatasetWriter(const std::string& prefix, int64_t vocab_size);

  /// Appends tokens to the open document. Error when an id is outside 0 .. vocab_size-1.
  void add_tokens(std::span<const int32_t> tokens);
  /// Closes the document (one without tokens is stored as an empty one).
  void end_document();
  /// Writes the index, syncs both files and renames them, .idx last; `before_commit` is called between the
  /// sync and the renames. The open document must be closed.
  void finish(const std::function<void()>& before_commit = {});

  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return static_cast<int64_t>(document_ends_.size()); }

 private:
  void close_sequence();

  std::string prefix_;
  int64_t vocab_size_;
  bool wide_;  // i32 instead of u16
  AtomicFile bin_;
  std::vector<uint16_t> narrow_buffer_;
  std::vector<int32_t> lengths_;  // per sequence; a document is one sequence unless it is longer than 2^30
  std::vector<int64_t> document_ends_;  // number of sequences up to and including the document
  int64_t num_tokens_ = 0, sequence_begin_ = 0, document_begin_ = 0;
};

/// A validated, memory-mapped dataset. Const functions may be called from several threads at once.
class IndexedDataset {
 public:
  /// Opens <prefix>.bin and <prefix>.idx and checks the whole index (magic, version, dtype, sizes, offsets,
  /// document boundaries). Token ids are checked when they are read. Error names the file and the byte
  /// offset.
  explicit IndexedDataset(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return num_documents_; }
  /// Token position where document d begins; d == num_documents(): num_tokens().
  int64_t document_begin(int64_t d) const;
  /// The document that holds token `position` (never an empty one).
  int64_t document_at(int64_t position) const;

  /// Copies tokens [position, position + out.size()). With vocab_size > 0 an id outside 0 .. vocab_size-1 is
  /// an Error naming the file, the position, the id and the vocabulary size.
  void read(int64_t position, std::span<int32_t> out, int64_t vocab_size) const;
  /// Reads every token once and checks it against vocab_size.
  void verify(int64_t vocab_size) const;
  /// A hash of the index, the size of the token file and sampled blocks of it; independent of path and time.
  uint64_t fingerprint() const;

 private:
  void validate_header();
  void validate_sequences();
  void validate_documents();

  std::string prefix_;
  MappedFile index_, bin_;
  int dtype_ = 0, item_bytes_ = 0;
  int64_t num_sequences_ = 0, num_documents_ = 0, num_tokens_ = 0;
};

/// The prefix meant by a user's path: a prepared folder, a prefix, or the .bin or .idx file itself.
std::string indexed_dataset_prefix(const std::string& path);

}  // namespace shoal
