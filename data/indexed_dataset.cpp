#include "data/indexed_dataset.h"

#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/base/error.h"

namespace shoal {

static_assert(std::endian::native == std::endian::little, "the token file format is little-endian");

namespace {

constexpr char kMagic[9] = {'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0};
constexpr int64_t kHeaderBytes = 34;
constexpr int64_t kMaxSequence = int64_t{1} << 30;  // lengths are i32
constexpr int64_t kNarrowVocab = 65500;
enum DTypeCode : int { kU8 = 1, kI8 = 2, kI16 = 3, kI32 = 4, kI64 = 5, kU16 = 8 };

// The index is unaligned from byte 34 on.
template <class T>
T load(const MappedFile& file, int64_t offset) {
  T value;
  std::memcpy(&value, file.data() + offset, sizeof value);
  return value;
}

// out[i] = token i of `bytes`; returns the first i whose value is outside 0 .. limit-1, or -1.
template <class T>
int64_t convert(const char* bytes, std::span<int32_t> out, int64_t limit) {
  bool bad = false;
  for (size_t i = 0; i < out.size(); i++) {
    T value;
    std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
    bad |= static_cast<int64_t>(value) < 0 || static_cast<int64_t>(value) >= limit;
    out[i] = static_cast<int32_t>(value);
  }
  if (!bad) return -1;
  for (size_t i = 0;; i++) {
    T value;
    std::memcpy(&value, bytes + i * sizeof(T), sizeof(T));
    if (static_cast<int64_t>(value) < 0 || static_cast<int64_t>(value) >= limit)
      return static_cast<int64_t>(i);
  }
}

int64_t convert_any(int dtype, const char* bytes, std::span<int32_t> out, int64_t limit) {
  switch (dtype) {
    case kU8:
      return convert<uint8_t>(bytes, out, limit);
    case kI8:
      return convert<int8_t>(bytes, out, limit);
    case kI16:
      return convert<int16_t>(bytes, out, limit);
    case kI32:
      return convert<int32_t>(bytes, out, limit);
    case kI64:
      return convert<int64_t>(bytes, out, limit);
    default:
      return convert<uint16_t>(bytes, out, limit);
  }
}

}  // namespace

IndexedDatasetWriter::IndexedDatasetWriter(const std::string& prefix, int64_t vocab_size)
    : prefix_(prefix), vocab_size_(vocab_size), wide_(vocab_size >= kNarrowVocab), bin_(prefix + ".bin") {}

void IndexedDatasetWriter::add_tokens(std::span<const int32_t> tokens) {
  for (size_t i = 0; i < tokens.size(); i++) {
    SHOAL_CHECK(tokens[i] >= 0 && tokens[i] < vocab_size_, prefix_, ".bin: expected token ids in 0..",
                vocab_size_ - 1, ", got ", tokens[i], " for token ", num_tokens_ + static_cast<int64_t>(i));
  }
  while (!tokens.empty()) {
    const int64_t room = kMaxSequence - (num_tokens_ - sequence_begin_);
    const auto part = tokens.first(std::min(tokens.size(), static_cast<size_t>(room)));
    if (wide_) {
      bin_.write(part.data(), part.size_bytes());
    } else {
      narrow_buffer_.assign(part.begin(), part.end());
      bin_.write(narrow_buffer_.data(), narrow_buffer_.size() * sizeof(uint16_t));
    }
    num_tokens_ += static_cast<int64_t>(part.size());
    tokens = tokens.subspan(part.size());
    if (num_tokens_ - sequence_begin_ == kMaxSequence) close_sequence();
  }
}

void IndexedDatasetWriter::close_sequence() {
  lengths_.push_back(static_cast<int32_t>(num_tokens_ - sequence_begin_));
  sequence_begin_ = num_tokens_;
}

void IndexedDatasetWriter::end_document() {
  if (num_tokens_ > sequence_begin_ || num_tokens_ == document_begin_) close_sequence();
  document_begin_ = num_tokens_;
  document_ends_.push_back(static_cast<int64_t>(lengths_.size()));
}

void IndexedDatasetWriter::finish(const std::function<void()>& before_commit) {
  SHOAL_CHECK(num_tokens_ == document_begin_, prefix_, ": finish() with an open document of ",
              num_tokens_ - document_begin_, " tokens; call end_document() first");
  const int64_t item_bytes = wide_ ? 4 : 2;
  AtomicFile index(prefix_ + ".idx");
  index.write(kMagic, sizeof kMagic);
  index.write_value(uint64_t{1});
  index.write_value(static_cast<uint8_t>(wide_ ? kI32 : kU16));
  index.write_value(static_cast<uint64_t>(lengths_.size()));
  index.write_value(static_cast<uint64_t>(document_ends_.size() + 1));
  index.write(lengths_.data(), lengths_.size() * sizeof(int32_t));
  int64_t offset = 0;
  for (const int32_t length : lengths_) {
    index.write_value(offset);
    offset += length * item_bytes;
  }
  index.write_value(int64_t{0});
  index.write(document_ends_.data(), document_ends_.size() * sizeof(int64_t));
  bin_.sync();
  index.sync();
  if (before_commit) before_commit();
  bin_.commit();
  index.commit();
}

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix), index_(prefix + ".idx"), bin_(prefix + ".bin") {
  validate_header();
  validate_sequences();
  validate_documents();
}

void IndexedDataset::validate_header() {
  const std::string& file = index_.path();
  SHOAL_CHECK(index_.size() >= kHeaderBytes, file, ": expected at least ", kHeaderBytes, " bytes, got ",
              index_.size(), "; the file is truncated");
  SHOAL_CHECK(std::memcmp(index_.data(), kMagic, sizeof kMagic) == 0, file,
              ": byte 0: expected the magic MMIDIDX; this is not an index of a token file");
  const auto version = load<uint64_t>(index_, 9);
  SHOAL_CHECK(version == 1, file, ": byte 9: expected version 1, got ", version);
  dtype_ = load<uint8_t>(index_, 17);
  switch (dtype_) {
    case kU8:
    case kI8:
      item_bytes_ = 1;
      break;
    case kI16:
    case kU16:
      item_bytes_ = 2;
      break;
    case kI32:
      item_bytes_ = 4;
      break;
    case kI64:
      item_bytes_ = 8;
      break;
    default:
      SHOAL_CHECK(false, file,
                  ": byte 17: expected an integer dtype code (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16), got ",
                  dtype_);
  }
  const auto sequences = load<uint64_t>(index_, 18), documents = load<uint64_t>(index_, 26);
  const auto limit = static_cast<uint64_t>(index_.size());  // also keeps the products below from overflowing
  SHOAL_CHECK(sequences <= limit && documents <= limit && documents >= 1, file,
              ": byte 18: expected counts that fit the file size ", index_.size(), ", got ", sequences,
              " sequences and ", documents, " document boundaries");
  num_sequences_ = static_cast<int64_t>(sequences);
  num_documents_ = static_cast<int64_t>(documents) - 1;
  const int64_t expected = kHeaderBytes + 12 * num_sequences_ + 8 * (num_documents_ + 1);
  SHOAL_CHECK(index_.size() == expected || index_.size() == expected + num_sequences_, file, ": expected ",
              expected, " bytes for ", num_sequences_, " sequences and ", num_documents_, " documents (or ",
              expected + num_sequences_, " with modes), got ", index_.size());
}

void IndexedDataset::validate_sequences() {
  const int64_t lengths = kHeaderBytes, offsets = lengths + 4 * num_sequences_;
  int64_t expected = 0;
  for (int64_t s = 0; s < num_sequences_; s++) {
    const auto length = load<int32_t>(index_, lengths + 4 * s);
    SHOAL_CHECK(length >= 0, index_.path(), ": byte ", lengths + 4 * s, ": sequence ", s,
                ": expected a length >= 0, got ", length);
    const auto offset = load<int64_t>(index_, offsets + 8 * s);
    SHOAL_CHECK(offset == expected, index_.path(), ": byte ", offsets + 8 * s, ": sequence ", s,
                ": expected offset ", expected, " (the sum of the lengths before), got ", offset);
    expected += int64_t{length} * item_bytes_;
    SHOAL_CHECK(expected <= bin_.size(), bin_.path(), ": expected at least ", expected,
                " bytes for sequence ", s, ", got ", bin_.size(),
                "; the file is truncated or belongs to another index");
  }
  SHOAL_CHECK(expected == bin_.size(), bin_.path(), ": expected ", expected,
              " bytes according to the index, got ", bin_.size());
  num_tokens_ = expected / item_bytes_;
}

void IndexedDataset::validate_documents() {
  const int64_t documents = kHeaderBytes + 12 * num_sequences_;
  int64_t previous = 0;
  for (int64_t d = 0; d <= num_documents_; d++) {
    const auto sequence = load<int64_t>(index_, documents + 8 * d);
    SHOAL_CHECK(d == 0 ? sequence == 0 : sequence >= previous && sequence <= num_sequences_, index_.path(),
                ": byte ", documents + 8 * d, ": document boundary ", d, ": expected ",
                d == 0 ? "0" : "an ascending number up to ", d == 0 ? "" : std::to_string(num_sequences_),
                ", got ", sequence);
    previous = sequence;
  }
  SHOAL_CHECK(previous == num_sequences_, index_.path(), ": byte ", documents + 8 * num_documents_,
              ": expected the last document boundary to be ", num_sequences_, " (all sequences), got ",
              previous);
}

int64_t IndexedDataset::document_begin(int64_t d) const {
  SHOAL_CHECK(d >= 0 && d <= num_documents_, prefix_, ": expected a document in 0..", num_documents_,
              ", got ", d);
  const auto sequence = load<int64_t>(index_, kHeaderBytes + 12 * num_sequences_ + 8 * d);
  if (sequence == num_sequences_) return num_tokens_;
  return load<int64_t>(index_, kHeaderBytes + 4 * num_sequences_ + 8 * sequence) / item_bytes_;
}

int64_t IndexedDataset::document_at(int64_t position) const {
  SHOAL_CHECK(position >= 0 && position < num_tokens_, prefix_, ": expected a token position in 0..",
              num_tokens_ - 1, ", got ", position);
  // The last document that begins at or before the position; empty ones before it begin there too.
  int64_t low = 0, high = num_documents_;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (document_begin(middle) <= position ? low : high) = middle;
  }
  return low;
}

void IndexedDataset::read(int64_t position, std::span<int32_t> out, int64_t vocab_size) const {
  const auto count = static_cast<int64_t>(out.size());
  SHOAL_CHECK(position >= 0 && position <= num_tokens_ && count <= num_tokens_ - position, bin_.path(),
              ": expected a range within ", num_tokens_, " tokens, got ", count, " tokens from ", position);
  if (count == 0) return;
  // Without a vocabulary ids must still fit an int32.
  const int64_t limit = vocab_size > 0 ? vocab_size : int64_t{std::numeric_limits<int32_t>::max()} + 1;
  const char* bytes = bin_.data() + position * item_bytes_;
  const int64_t bad = convert_any(dtype_, bytes, out, limit);
  if (bad < 0) return;
  throw UsageError(
      str(bin_.path(), ": token ", position + bad, ": expected an id in 0..", limit - 1, ", got ",
          dtype_ == kI64 ? load<int64_t>(bin_, (position + bad) * 8) : int64_t{out[static_cast<size_t>(bad)]},
          " (vocabulary size ", limit, "); was the data prepared with another tokenizer?"));
}

void IndexedDataset::verify(int64_t vocab_size) const {
  std::vector<int32_t> buffer(1 << 16);
  for (int64_t position = 0; position < num_tokens_; position += static_cast<int64_t>(buffer.size())) {
    const auto left = static_cast<size_t>(num_tokens_ - position);
    read(position, std::span(buffer).first(std::min(buffer.size(), left)), vocab_size);
  }
}

uint64_t IndexedDataset::fingerprint() const {
  constexpr int64_t kBlock = 4096, kBlocks = 64;
  uint64_t hash = XXH3_64bits_withSeed(index_.data(), static_cast<size_t>(index_.size()),
                                       static_cast<uint64_t>(bin_.size()));
  for (int64_t i = 0; i <= kBlocks; i++) {
    const int64_t last = std::max<int64_t>(0, bin_.size() - kBlock);
    const int64_t begin = static_cast<int64_t>(static_cast<double>(last) * static_cast<double>(i) / kBlocks);
    const int64_t size = std::min(kBlock, bin_.size() - begin);
    if (size > 0) hash = XXH3_64bits_withSeed(bin_.data() + begin, static_cast<size_t>(size), hash);
  }
  return hash;
}

std::string indexed_dataset_prefix(const std::string& path) {
  if (std::filesystem::is_directory(path)) return (std::filesystem::path(path) / "tokens").string();
  if (path.ends_with(".bin") || path.ends_with(".idx")) return path.substr(0, path.size() - 4);
  return path;
}

}  // namespace shoal
