// prepare_dataset: text files -> <output>/tokens.{bin,idx}, tokenizer.json and dataset.json. Called by
// `shoal prepare` and before training; a second call with unchanged inputs returns at once.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "data/indexed_dataset.h"
#include "data/tokenizer.h"

namespace shoal {

struct PrepareOptions {
  std::vector<std::string> text;
  std::vector<std::string> extensions = {".txt", ".md", ".rst", ".jsonl"};
  std::string documents = "auto";
  std::string text_key = "text";
  Choice tokenizer = {"bpe", nullptr};
  std::string output;
  void fields(FieldVisitor& v) {
    v("text", text, "text files and folders (searched recursively, in sorted order)");
    v("extensions", extensions, "endings of the files taken from folders");
    v("documents", documents,
      "what one document is: a file, the lines between blank lines, or a JSONL line; auto: jsonl for "
      "*.jsonl, else file",
      one_of({"auto", "file", "blank_line", "jsonl"}));
    v("text_key", text_key, "key of the text in a JSONL line");
    v.choice("tokenizer", tokenizer, TokenizerTrainerRegistry::instance(), "trained on the text, or loaded");
    v("output", output, "folder of the prepared dataset");
  }
};

struct PrepareProgress {
  std::string phase;  // "wait for another" (process that prepares the same), "train tokenizer" or "encode"
  int64_t done_bytes = 0, total_bytes = 0;
};
using PrepareProgressFn = std::function<void(const PrepareProgress&)>;

inline constexpr const char* kDatasetFormat = "shoal-dataset";  // of dataset.json
inline constexpr int64_t kMaxDescriptionBytes = int64_t{1} << 30;

struct PrepareReport {
  bool up_to_date = false;  // nothing had to be done
  bool replaced = false;    // the folder held a dataset of other text or settings, or a damaged one
  int64_t files = 0, documents = 0, empty_documents = 0;
  int64_t tokens = 0;      // with begin/end-of-document tokens
  int64_t text_bytes = 0;  // of the documents
  int64_t vocab_size = 0;
  double encode_seconds = 0;                // reading, encoding and buffered writing, without the final sync
  std::string note;                         // what the tokenizer training has to say, or ""
  std::string fingerprint, tokenizer_hash;  // of a prepared folder: its token files and tokenizer ("": old)
  double bytes_per_token() const {
    return tokens > 0 ? static_cast<double>(text_bytes) / static_cast<double>(tokens) : 0;
  }
  /// A few lines for the console.
  std::string text() const;
};

/// Empty documents are skipped and counted. Uses num_threads() threads; the result does not depend on them.
/// Takes a lock in the output folder, so concurrent calls (ranks, jobs) wait and then find the work done.
/// The files of an older dataset are removed when the new tokens are safely on disk; dataset.json goes first
/// and is written last: where it exists the dataset is complete. A folder that cannot be written is used when
/// it is up to date. UsageError: no text found, not valid JSONL (file:line), unsuitable tokenizer; Error:
/// I/O.
PrepareReport prepare_dataset(const PrepareOptions& options, const PrepareProgressFn& progress = {});

/// UsageError when token files or tokenizer are not those that the folder's dataset.json describes
/// (exchanged, or damaged where it was sampled). A folder without dataset.json was made elsewhere and is not
/// checked.
void check_prepared(const std::string& folder, const IndexedDataset& dataset, const Tokenizer& tokenizer);

/// What dataset.json says about a complete prepared folder; empty when the folder holds none.
std::optional<PrepareReport> read_prepared(const std::string& folder);

}  // namespace shoal
