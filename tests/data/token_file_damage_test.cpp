// Damaged and inconsistent token files, our own and Megatron's: refused with file and place, or read rightly.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <filesystem>

#include "core/base/error.h"
#include "core/base/random.h"
#include "data/batch_loader.h"
#include "data/prepare.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using testing::error_of;
using testing::slurp;
using testing::TempFolder;

/// The tables of an index; nothing is checked here.
struct Index {
  uint64_t version = 1;
  uint8_t dtype = 8;
  std::vector<int32_t> lengths;
  std::vector<int64_t> offsets, documents;
  std::string tail;  // modes
  std::optional<uint64_t> num_sequences, num_documents;

  std::string bytes() const {
    std::string out("MMIDIDX\0\0", 9);
    const auto put = [&out](auto value) { out.append(reinterpret_cast<const char*>(&value), sizeof value); };
    put(version);
    put(dtype);
    put(num_sequences.value_or(lengths.size()));
    put(num_documents.value_or(documents.size()));
    for (const auto length : lengths) put(length);
    for (const auto offset : offsets) put(offset);
    for (const auto document : documents) put(document);
    return out + tail;
  }
};

/// Two documents of two sequences: 5 + 3 and 0 + 4 tokens of u16.
Index small_index() {
  return {1, 8, {5, 3, 0, 4}, {0, 10, 16, 16}, {0, 2, 4}, "", {}, {}};
}

/// Opens the files and uses everything of them; the tokens.
std::vector<int32_t> use(const std::string& prefix, int64_t vocab_size) {
  const IndexedDataset dataset(prefix);
  int64_t before = 0;
  for (int64_t d = 0; d <= dataset.num_documents(); d++) {
    EXPECT_GE(dataset.document_begin(d), before);
    before = dataset.document_begin(d);
  }
  EXPECT_LE(before, dataset.num_tokens());
  for (int64_t p = 0; p < dataset.num_tokens(); p += 1 + dataset.num_tokens() / 50) {
    const int64_t d = dataset.document_at(p);
    EXPECT_TRUE(d >= 0 && d < dataset.num_documents());
  }
  dataset.fingerprint();
  dataset.verify(vocab_size);
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.num_tokens()));
  dataset.read(0, tokens, vocab_size);
  return tokens;
}

std::string with_bit(std::string bytes, uint64_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  return bytes;
}

TEST(TokenFileDamage, InconsistentIndicesAreRefusedWithFileAndByte) {
  const TempFolder folder;
  const std::string bin(24, '\1');
  using Change = std::function<void(Index&)>;
  const int64_t least = INT64_MIN, most = INT64_MAX;
  const std::vector<std::pair<Change, std::string>> cases = {
      {[](Index& i) { i.version = 0; }, "t.idx: byte 9: expected version 1, got 0"},
      {[](Index& i) { i.version = 1ULL << 63; }, "t.idx: byte 9: expected version 1"},
      {[](Index& i) { i.dtype = 0; }, "t.idx: byte 17: expected an integer dtype code"},
      {[](Index& i) { i.dtype = 6; }, "byte 17: expected an integer dtype code"},
      {[](Index& i) { i.dtype = 7; }, "byte 17: expected an integer dtype code"},
      {[](Index& i) { i.dtype = 255; }, "byte 17: expected an integer dtype code"},
      {[](Index& i) { i.dtype = 4; }, "t.idx: byte 58: sequence 1: expected offset 20"},  // i32 of u16 data
      {[](Index& i) { i.dtype = 1; }, "t.idx: byte 58: sequence 1: expected offset 5"},
      {[](Index& i) { i.num_sequences = UINT64_MAX; }, "t.idx: byte 18: expected counts that fit"},
      {[](Index& i) { i.num_sequences = 1ULL << 61; }, "t.idx: byte 18: expected counts that fit"},
      {[](Index& i) { i.num_documents = UINT64_MAX / 8; }, "t.idx: byte 18: expected counts that fit"},
      {[](Index& i) { i.num_documents = 0; }, "t.idx: byte 18: expected counts that fit"},
      {[](Index& i) { i.num_sequences = 3; }, "bytes for 3 sequences"},
      {[](Index& i) { i.num_documents = 2; }, "4 sequences and 1 documents"},
      {[](Index& i) { i.lengths[1] = -1; }, "t.idx: byte 38: sequence 1: expected a length >= 0, got -1"},
      {[](Index& i) { i.lengths[3] = INT32_MAX; }, "t.bin: expected at least 4294967310 bytes"},
      {[](Index& i) { i.lengths[0] = INT32_MIN; }, "byte 34: sequence 0: expected a length >= 0"},
      {[](Index& i) { i.lengths[3] = 3; }, "t.bin: expected 22 bytes according to the index, got 24"},
      {[](Index& i) { i.offsets[0] = -2; }, "t.idx: byte 50: sequence 0: expected offset 0"},
      {[=](Index& i) { i.offsets[1] = least; }, "t.idx: byte 58: sequence 1: expected offset 10"},
      {[=](Index& i) { i.offsets[3] = most; }, "t.idx: byte 74: sequence 3: expected offset 16"},
      {[](Index& i) { std::swap(i.offsets[0], i.offsets[1]); }, "byte 50: sequence 0: expected offset 0"},
      {[](Index& i) { i.documents[0] = 1; }, "t.idx: byte 82: document boundary 0: expected 0"},
      {[](Index& i) { i.documents[1] = -1; }, "t.idx: byte 90: document boundary 1: expected an ascending"},
      {[](Index& i) { i.documents[1] = 5; }, "t.idx: byte 90: document boundary 1: expected an ascending"},
      {[=](Index& i) { i.documents[1] = most; }, "byte 90: document boundary 1: expected an ascending"},
      {[=](Index& i) { i.documents[2] = least; }, "byte 98: document boundary 2: expected an ascending"},
      {[](Index& i) { i.documents[2] = 3; }, "byte 98: expected the last document boundary to be 4"},
      {[](Index& i) { i.tail = "abc"; }, "or 110 with modes), got 109"},
  };
  folder.write("t.bin", bin);
  for (const auto& [change, expected] : cases) {
    Index index = small_index();
    change(index);
    folder.write("t.idx", index.bytes());
    const std::string error = error_of<Error>([&] { use(folder / "t", 0); });
    EXPECT_NE(error.find(expected), std::string::npos)
        << "expected '" << expected << "' in '" << error << "'";
  }
  folder.write("t.idx", small_index().bytes());
  EXPECT_EQ(use(folder / "t", 258), std::vector<int32_t>(12, 257));
  Index nothing = small_index();
  nothing.lengths.clear();
  nothing.offsets.clear();
  nothing.documents = {0, 0, 0};
  folder.write("n.idx", nothing.bytes());
  folder.write("n.bin", "");
  EXPECT_TRUE(use(folder / "n", 10).empty());  // two documents without tokens
  const auto source = std::make_shared<const IndexedDataset>(folder / "n");
  EXPECT_NE(error_of<UsageError>([&] { TokenDataset(source, {}, Split::train); }).find("has no tokens"),
            std::string::npos);
}

TEST(TokenFileDamage, MutantsOfAMegatronIndexAreRefusedOrReadWithinBounds) {
  // Both files fill whole pages, so that a byte too far is a fault and not a zero.
  const TempFolder folder;
  Index index;
  index.lengths = {1000, 0, 24, 1000, 24, 0};
  index.offsets = {0, 2000, 2000, 2048, 4048, 4096};
  for (int64_t d = 0; d < 498; d++) index.documents.push_back(std::min<int64_t>(d, 6));
  index.tail = std::string(6, '\0');
  const std::string idx = index.bytes();
  ASSERT_EQ(idx.size(), 4096U);
  std::string bin;
  for (int i = 0; i < 2048; i++) bin += {static_cast<char>(i % 100), '\0'};
  folder.write("t.idx", idx);
  folder.write("t.bin", bin);
  const std::vector<int32_t> good = use(folder / "t", 100);
  const RandomStream random(21, "token files");
  uint64_t draw = 0;
  int refused = 0, read = 0;
  const auto attempt = [&](const std::string& what) {
    std::vector<int32_t> tokens;
    try {
      tokens = use(folder / "t", 100);
      read++;
    } catch (const Error& error) {
      refused++;
      const std::string text = error.what();
      EXPECT_TRUE(text.find("t.idx: ") != std::string::npos || text.find("t.bin: ") != std::string::npos)
          << text;
      EXPECT_NE(text.find("expected"), std::string::npos) << text;
      return;
    }
    EXPECT_EQ(tokens, good) << what;
  };
  for (int trial = 0; trial < 400; trial++) {
    // The header and the tables of sequences, every second time; the many boundaries otherwise.
    const uint64_t bits = trial % 2 == 0 ? (34 + 12 * 6) * 8 : idx.size() * 8;
    const uint64_t bit = random.below(draw++, bits);
    folder.write("t.idx", with_bit(idx, bit));
    attempt(str("bit ", bit));
  }
  const int flips = refused;
  for (uint64_t size = 0; size < 34 + 12 * 6 + 16; size++) {
    folder.write("t.idx", idx.substr(0, size));
    attempt(str("cut to ", size));
  }
  for (int trial = 0; trial < 100; trial++) {
    const uint64_t size = random.below(draw++, idx.size());
    folder.write("t.idx", idx.substr(0, size));
    attempt(str("cut to ", size));
  }
  folder.write("t.idx", idx);
  for (const size_t size : {0U, 1U, 1999U, 2000U, 2048U, 4047U, 4048U, 4095U}) {
    folder.write("t.bin", bin.substr(0, size));
    attempt(str("tokens cut to ", size));
  }
  std::printf("seed 21: 400 bit flips of an index: %d refused, %d read rightly; 230 cuts: %d refused\n",
              flips, read, refused - flips);
  EXPECT_EQ(refused - flips, 230);
  EXPECT_GT(flips, 200);
}

TEST(TokenFileDamage, VocabulariesLargerAndSmallerThanTheDatas) {
  const TempFolder folder;
  testing::write_documents(folder / "t", {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}, 10);
  EXPECT_EQ(use(folder / "t", 10).size(), 10U);
  EXPECT_EQ(use(folder / "t", 100000).size(), 10U);
  EXPECT_NE(
      error_of<Error>([&] { use(folder / "t", 9); }).find("t.bin: token 9: expected an id in 0..8, got 9"),
      std::string::npos);
  const auto source = std::make_shared<const IndexedDataset>(folder / "t");
  const auto all = std::make_shared<const TokenDataset>(source, SplitOptions{}, Split::all);
  LoaderOptions sequential;
  sequential.sampling = "sequential";
  const BatchLoader loader(sequential, {{all, 1}}, 4, 7);
  EXPECT_EQ(loader.batch(0, 1).tokens_BS.size(), 4U);
  EXPECT_NE(
      error_of<Error>([&] { loader.batch(1, 1); }).find("t.bin: token 7: expected an id in 0..6, got 7"),
      std::string::npos);
}

/// A folder made by prepare_dataset.
struct Prepared {
  TempFolder folder;
  PrepareOptions options;
  std::map<std::string, std::string> files;

  explicit Prepared(const std::string& kind = "byte") {
    options.text = {
        folder.write("in.jsonl", "{\"text\": \"one two\"}\n{\"text\": \"three\"}\n{\"text\": \"four\"}\n")};
    options.output = folder / "out";
    options.tokenizer.kind = kind;
    prepare_dataset(options);
    for (const char* name : {"tokens.bin", "tokens.idx", "tokenizer.json", "dataset.json"})
      files[name] = slurp(folder / "out/" + name);
  }
  void put(const std::string& name, const std::string& bytes) const { folder.write("out/" + name, bytes); }
  void restore() const {
    for (const auto& [name, bytes] : files) put(name, bytes);
  }
  /// What opening the folder for training says.
  std::string problem() const {
    return error_of<Error>([&] {
      const IndexedDataset dataset(folder / "out/tokens");
      check_prepared(folder / "out", dataset, *load_tokenizer(folder / "out"));
    });
  }
};

TEST(TokenFileDamage, AnyChangeOfASmallPreparedFolderIsNoticedAndPreparedAnew) {
  const Prepared prepared;
  ASSERT_EQ(prepared.problem(), "");
  int flips = 0, cuts = 0;
  for (const std::string name : {"tokens.bin", "tokens.idx"}) {
    const std::string& good = prepared.files.at(name);
    for (uint64_t bit = 0; bit < good.size() * 8; bit++, flips++) {
      prepared.put(name, with_bit(good, bit));
      EXPECT_NE(prepared.problem().find("tokens."), std::string::npos) << name << " bit " << bit;
    }
    for (size_t size = 0; size < good.size(); size++, cuts++) {
      prepared.put(name, good.substr(0, size));
      EXPECT_NE(prepared.problem().find("tokens."), std::string::npos) << name << " cut to " << size;
    }
    EXPECT_FALSE(prepare_dataset(prepared.options).up_to_date);
    EXPECT_EQ(slurp(prepared.folder / "out/" + name), good);
    prepared.restore();
  }
  for (size_t size = 0; size + 1 < prepared.files.at("dataset.json").size(); size += 7, cuts++) {
    prepared.put("dataset.json", prepared.files.at("dataset.json").substr(0, size));
    EXPECT_NE(prepared.problem().find("dataset.json"), std::string::npos) << size;
  }
  EXPECT_FALSE(prepare_dataset(prepared.options).up_to_date);
  EXPECT_EQ(prepared.problem(), "");
  std::printf("prepared folder: %d bit flips and %d cuts: all noticed\n", flips, cuts);
}

TEST(TokenFileDamage, FilesOfAnotherPreparedFolderAreNoticed) {
  const Prepared prepared("char"), same("char");
  PrepareOptions other = prepared.options;
  other.output = prepared.folder / "other";
  other.text = {
      prepared.folder.write("other.jsonl",  // as many tokens, sequences and characters
                            "{\"text\": \"one twv\"}\n{\"text\": \"th\"}\n{\"text\": \"reefoor\"}\n")};
  prepare_dataset(other);
  for (const std::string name : {"tokens.bin", "tokens.idx", "tokenizer.json", "dataset.json"}) {
    prepared.put(name, slurp(prepared.folder / "other/" + name));
    const std::string problem = prepared.problem();
    EXPECT_NE(problem.find("prepare the data again"), std::string::npos) << name << ": " << problem;
    prepared.restore();
  }
  EXPECT_EQ(prepared.problem(), "");
}

TEST(TokenFileDamage, PipesAndFoldersInThePlaceOfFilesDoNotBlock) {
  const TempFolder folder;
  testing::write_documents(folder / "t", {{1, 2, 3}}, 10);
  for (const std::string name : {"t.bin", "t.idx"}) {
    const std::string good = slurp(folder / name);
    std::filesystem::remove(folder / name);
    ASSERT_EQ(::mkfifo((folder / name).c_str(), 0600), 0);
    EXPECT_NE(error_of<Error>([&] { use(folder / "t", 0); }).find(name + ": expected a regular file"),
              std::string::npos);
    std::filesystem::remove(folder / name);
    std::filesystem::create_directory(folder / name);
    EXPECT_NE(error_of<Error>([&] { use(folder / "t", 0); }).find(name + ": "), std::string::npos);
    std::filesystem::remove(folder / name);
    folder.write(name, good);
  }
  ASSERT_EQ(::mkfifo((folder / "tokenizer.json").c_str(), 0600), 0);
  EXPECT_NE(
      error_of<Error>([&] { load_tokenizer(folder.path()); }).find("tokenizer.json: expected a regular file"),
      std::string::npos);
}

}  // namespace
}  // namespace shoal
