#include "data/batch_loader.h"

#include <algorithm>

#include "core/base/error.h"
#include "core/base/random.h"
#include "core/base/text.h"

namespace shoal {

namespace {

std::vector<double> weights_of(const std::vector<WeightedDataset>& datasets) {
  std::vector<double> weights;
  for (const auto& d : datasets) weights.push_back(d.weight);
  return weights;
}

// The stream of random numbers of dataset `dataset` in epoch `epoch`.
uint64_t order_stream(int64_t dataset, int64_t epoch) {
  const auto block =
      philox(stream_id("sample order"), static_cast<uint64_t>(dataset), static_cast<uint64_t>(epoch));
  return uint64_t{block[1]} << 32 | block[0];
}

}  // namespace

BatchLoader::BatchLoader(LoaderOptions options, std::vector<WeightedDataset> datasets, int64_t seq_len,
                         int64_t vocab_size)
    : options_(std::move(options)),
      datasets_(std::move(datasets)),
      seq_len_(seq_len),
      vocab_size_(vocab_size),
      blend_(weights_of(datasets_)) {
  SHOAL_CHECK(seq_len >= 1, "loader: expected a sequence length >= 1, got ", seq_len);
  const std::vector<std::string> known = {"shuffle", "sequential", "random_offset"};
  if (std::find(known.begin(), known.end(), options_.sampling) == known.end()) {
    throw UsageError(
        str("loader sampling: expected one of ", join(known, " | "), ", got '", options_.sampling, "'"));
  }
  for (const auto& [dataset, weight] : datasets_) {
    const int64_t tokens = dataset->num_tokens();
    num_windows_.push_back((tokens - 1) / seq_len);
    if (weight > 0 && num_windows_.back() < 1) {
      throw UsageError(str("dataset ", dataset->source().prefix(), ": one sample needs ", seq_len + 1,
                           " tokens (sequence length ", seq_len, " + 1), but this part of the data has ",
                           tokens, "; use more text, a shorter sequence or another validation share"));
    }
  }
}

Batch BatchLoader::batch(int64_t first_sample, int64_t count) const {
  Batch out;
  fill(first_sample, count, out);
  return out;
}

void BatchLoader::fill(int64_t first_sample, int64_t count, Batch& out) const {
  SHOAL_CHECK(first_sample >= 0 && count >= 0, "loader: expected samples >= 0, got ", count, " from ",
              first_sample);
  out.B = count;
  out.S = seq_len_;
  out.first_sample = first_sample;
  const auto size = static_cast<size_t>(count * seq_len_);
  for (auto* values : {&out.tokens_BS, &out.labels_BS, &out.positions_BS, &out.document_BS})
    values->resize(size);
  for (int64_t row = 0; row < count; row++) fill_row(first_sample + row, row, out);
}

void BatchLoader::fill_row(int64_t sample, int64_t row, Batch& out) const {
  const auto [stream, number] = blend_.at(sample);
  const TokenDataset& dataset = *datasets_[static_cast<size_t>(stream)].dataset;
  const int64_t windows = num_windows_[static_cast<size_t>(stream)];
  const auto seed = static_cast<uint64_t>(options_.seed);
  int64_t begin = 0;
  if (options_.sampling == "random_offset") {
    const RandomStream random(seed, order_stream(stream, -1));
    begin = static_cast<int64_t>(
        random.below(static_cast<uint64_t>(number), static_cast<uint64_t>(dataset.num_tokens() - seq_len_)));
  } else {
    int64_t window = number % windows;
    if (options_.sampling == "shuffle") {
      window =
          static_cast<int64_t>(permute_index(static_cast<uint64_t>(window), static_cast<uint64_t>(windows),
                                             seed, order_stream(stream, number / windows)));
    }
    begin = window * seq_len_;
  }

  thread_local std::vector<int32_t> tokens;
  thread_local std::vector<uint8_t> starts;
  const auto S = static_cast<size_t>(seq_len_);
  tokens.resize(S + 1);
  starts.resize(options_.mask_documents ? S + 1 : 0);
  dataset.read(begin, tokens, starts, vocab_size_);

  const size_t at = static_cast<size_t>(row) * S;
  std::copy_n(tokens.begin(), S, out.tokens_BS.begin() + static_cast<ptrdiff_t>(at));
  std::copy_n(tokens.begin() + 1, S, out.labels_BS.begin() + static_cast<ptrdiff_t>(at));
  int32_t document = 0, position = 0;
  for (size_t i = 0; i < S; i++) {
    if (options_.mask_documents) {
      if (i > 0 && starts[i] != 0) {
        document++;
        position = 0;
      }
      if (starts[i + 1] != 0) out.labels_BS[at + i] = -1;
    }
    out.document_BS[at + i] = document;
    out.positions_BS[at + i] = position++;
  }
}

int64_t BatchLoader::samples_per_epoch() const {
  int64_t samples = 0;
  for (size_t i = 0; i < datasets_.size(); i++) {
    if (datasets_[i].weight > 0) samples += num_windows_[i];
  }
  return samples;
}

double BatchLoader::epochs_of(size_t dataset, int64_t samples) const {
  const auto taken = static_cast<double>(blend_.taken(static_cast<int64_t>(dataset), samples));
  return taken == 0 ? 0 : taken / static_cast<double>(num_windows_[dataset]);
}

uint64_t BatchLoader::fingerprint() const {
  uint64_t hash = stream_id(options_.sampling);
  const auto mix = [&hash](uint64_t value) {
    const auto block = philox(hash, value, 0);
    hash = uint64_t{block[1]} << 32 | block[0];
  };
  mix(static_cast<uint64_t>(options_.seed));
  mix(options_.mask_documents ? 1 : 0);
  mix(static_cast<uint64_t>(seq_len_));
  for (size_t i = 0; i < datasets_.size(); i++) {
    mix(datasets_[i].dataset->fingerprint());
    mix(static_cast<uint64_t>(blend_.taken(static_cast<int64_t>(i), blend_.period())));
  }
  return hash;
}

}  // namespace shoal
