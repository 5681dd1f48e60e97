// BatchLoader: global sample index -> one row of tokens and labels, over a weighted blend of token streams.
// A batch is a pure function of the sample index, so resuming on any number of ranks needs only the number of
// consumed samples; each rank asks for its own slice of the global batch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/config.h"
#include "data/blend.h"
#include "data/token_dataset.h"

namespace shoal {

/// B rows of S tokens, row-major.
struct Batch {
  int64_t B = 0, S = 0;
  int64_t first_sample = 0;  // global index of row 0
  std::vector<int32_t> tokens_BS;
  std::vector<int32_t> labels_BS;     // the next token; -1: ignored
  std::vector<int32_t> positions_BS;  // 0 .. S-1; with document masking restarting at 0 in each document
  std::vector<int32_t> document_BS;   // with document masking 0, 1, ... within the row; else all 0
};

struct LoaderOptions {
  std::string sampling = "shuffle";
  bool mask_documents = false;
  int64_t seed = 1;
  void fields(FieldVisitor& v) {
    v("sampling", sampling,
      "shuffle: every window once per epoch in a new order; sequential: in order; random_offset: each sample "
      "begins "
      "at a random token",
      one_of({"shuffle", "sequential", "random_offset"}));
    v("mask_documents", mask_documents,
      "documents packed in one row do not see each other; positions restart");
    v("seed", seed, "of the sample order", at_least(0));
  }
};

/// One stream of the blend. Weights are relative (they are normalised); 0 leaves the stream out.
struct WeightedDataset {
  std::shared_ptr<const TokenDataset> dataset;
  double weight = 1;
};

class BatchLoader {
 public:
  /// vocab_size > 0: ids outside it are an Error when read. UsageError when a stream with a positive weight
  /// has fewer than seq_len + 1 tokens, or when there is no such stream.
  BatchLoader(LoaderOptions options, std::vector<WeightedDataset> datasets, int64_t seq_len,
              int64_t vocab_size);

  /// Samples [first_sample, first_sample + count). Any non-negative index is valid: a stream that is used up
  /// starts its next epoch (with a new order), so no batch is ever short. The last tokens of a stream that do
  /// not fill a window of seq_len + 1 are dropped. Every token but the row's first is a label once,
  /// end-of-document tokens too. With document masking the label of a document's last token would be the next
  /// document's first one: ignored.
  Batch batch(int64_t first_sample, int64_t count) const;
  /// The same into an existing batch, whose memory is reused.
  void fill(int64_t first_sample, int64_t count, Batch& out) const;

  int64_t seq_len() const { return seq_len_; }
  /// Windows of dataset i; with random_offset the number of windows its tokens would fill.
  int64_t num_windows(size_t dataset) const { return num_windows_[dataset]; }
  /// Windows of all streams with a positive weight: one pass over the data.
  int64_t samples_per_epoch() const;
  /// How often dataset i has been started over when `samples` samples have been used: samples taken /
  /// windows.
  double epochs_of(size_t dataset, int64_t samples) const;
  /// Hash of everything that decides which tokens sample n holds. Compare at resume.
  uint64_t fingerprint() const;

 private:
  void fill_row(int64_t sample, int64_t row, Batch& out) const;

  LoaderOptions options_;
  std::vector<WeightedDataset> datasets_;
  std::vector<int64_t> num_windows_;
  int64_t seq_len_, vocab_size_;
  Blend blend_;
};

}  // namespace shoal
