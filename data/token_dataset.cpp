#include "data/token_dataset.h"

#include <algorithm>
#include <cmath>

#include "core/base/error.h"
#include "core/base/random.h"

namespace shoal {

namespace {

constexpr double kMinAutoDocuments = 4;
constexpr uint64_t kSplitSeed = 0;  // fixed: the split must be the same whatever the training seed

bool split_by_documents(const SplitOptions& options, int64_t num_documents) {
  if (options.split == "documents") return true;
  if (options.split == "tail") return false;
  return options.val_documents > 0 ||
         options.val_fraction * static_cast<double>(num_documents) >= kMinAutoDocuments;
}

}  // namespace

TokenDataset::TokenDataset(std::shared_ptr<const IndexedDataset> source, const SplitOptions& options,
                           Split part)
    : source_(std::move(source)) {
  const int64_t tokens = source_->num_tokens();
  const bool no_validation = options.val_fraction == 0 && options.val_documents == 0;
  if (part == Split::all || (part == Split::train && no_validation)) {
    add_segment(0, tokens);
  } else if (no_validation) {
    throw UsageError(
        str("dataset ", source_->prefix(), ": no validation data: val_fraction and val_documents are 0"));
  } else if (split_by_documents(options, source_->num_documents())) {
    add_documents(options, part);
  } else {
    if (options.val_documents > 0) {
      throw UsageError(str("dataset ", source_->prefix(), ": val_documents (", options.val_documents,
                           ") has no meaning with split: tail; set val_fraction"));
    }
    const auto train =
        static_cast<int64_t>(std::floor(static_cast<double>(tokens) * (1 - options.val_fraction)));
    part == Split::train ? add_segment(0, train) : add_segment(train, tokens);
  }
  if (num_tokens_ == 0) {
    throw UsageError(str("dataset ", source_->prefix(), ": the ",
                         part == Split::validation ? "validation" : "training", " part has no tokens (",
                         tokens, " tokens, ", source_->num_documents(), " documents, split ", options.split,
                         ", val_fraction ", options.val_fraction, "); add text, or change data.split"));
  }
}

void TokenDataset::add_segment(int64_t token_begin, int64_t token_end) {
  if (token_end <= token_begin) return;
  if (!segments_.empty() && segments_.back().token_begin + segments_.back().size == token_begin) {
    segments_.back().size += token_end - token_begin;
  } else {
    segments_.push_back({num_tokens_, token_begin, token_end - token_begin});
  }
  num_tokens_ += token_end - token_begin;
}

void TokenDataset::add_documents(const SplitOptions& options, Split part) {
  const int64_t documents = source_->num_documents();
  int64_t held_out = options.val_documents;
  if (held_out == 0) {
    held_out = std::max<int64_t>(1, std::llround(options.val_fraction * static_cast<double>(documents)));
  }
  if (held_out >= documents) {
    throw UsageError(str("dataset ", source_->prefix(), ": cannot hold out ", held_out, " of ", documents,
                         " documents for validation; at least one must stay for training"));
  }
  std::vector<int64_t> validation;
  for (int64_t i = 0; i < held_out; i++) {
    validation.push_back(
        static_cast<int64_t>(permute_index(static_cast<uint64_t>(i), static_cast<uint64_t>(documents),
                                           kSplitSeed, stream_id("validation split"))));
  }
  std::sort(validation.begin(), validation.end());
  if (part == Split::validation) {
    for (const int64_t d : validation)
      add_segment(source_->document_begin(d), source_->document_begin(d + 1));
    return;
  }
  int64_t begin = 0;
  for (const int64_t d : validation) {
    add_segment(begin, source_->document_begin(d));
    begin = source_->document_begin(d + 1);
  }
  add_segment(begin, source_->num_tokens());
}

void TokenDataset::read(int64_t position, std::span<int32_t> tokens, std::span<uint8_t> starts,
                        int64_t vocab_size) const {
  const auto count = static_cast<int64_t>(tokens.size());
  SHOAL_CHECK(position >= 0 && position <= num_tokens_ && count <= num_tokens_ - position, "dataset ",
              source_->prefix(), ": expected a range within ", num_tokens_, " tokens, got ", count, " from ",
              position);
  SHOAL_CHECK(starts.empty() || starts.size() == tokens.size(), "dataset read: expected ", tokens.size(),
              " start flags, got ", starts.size());
  std::fill(starts.begin(), starts.end(), uint8_t{0});
  auto segment = std::upper_bound(segments_.begin(), segments_.end(), position,
                                  [](int64_t p, const Segment& s) { return p < s.stream_begin; });
  for (int64_t done = 0; done < count; segment++) {
    const Segment& part = *std::prev(segment);
    const int64_t skip = position + done - part.stream_begin;
    const int64_t size = std::min(count - done, part.size - skip), begin = part.token_begin + skip;
    source_->read(begin, tokens.subspan(static_cast<size_t>(done), static_cast<size_t>(size)), vocab_size);
    if (!starts.empty()) {
      int64_t document = source_->document_at(begin);
      if (source_->document_begin(document) < begin) document++;
      for (; document < source_->num_documents(); document++) {
        const int64_t at = source_->document_begin(document) - begin;
        if (at >= size) break;
        starts[static_cast<size_t>(done + at)] = 1;
      }
    }
    done += size;
  }
}

uint64_t TokenDataset::fingerprint() const {
  uint64_t hash = source_->fingerprint();
  const auto mix = [&hash](int64_t value) {
    const auto block = philox(hash, static_cast<uint64_t>(value), 0);
    hash = uint64_t{block[1]} << 32 | block[0];
  };
  mix(num_tokens_);
  for (const auto& segment : segments_) {
    mix(segment.token_begin);
    mix(segment.size);
  }
  return hash;
}

}  // namespace shoal
