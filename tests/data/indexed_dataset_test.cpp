#include "data/indexed_dataset.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <numeric>

#include "core/base/error.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using testing::error_of;
using testing::slurp;
using testing::TempFolder;
using testing::write_documents;

std::vector<int32_t> read_all(const IndexedDataset& dataset) {
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.num_tokens()));
  dataset.read(0, tokens, 0);
  return tokens;
}

TEST(IndexedDataset, WrittenBytesAreMegatronsFormat) {
  const TempFolder folder;
  write_documents(folder / "t", {{7, 300, 2}, {65534}}, 65000 + 499 + 36);
  // vocab 65535 >= 65500: i32
  EXPECT_EQ(slurp(folder / "t.bin"), std::string("\x07\0\0\0\x2C\x01\0\0\x02\0\0\0\xFE\xFF\0\0", 16));
  std::string expected("MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x04\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0", 34);
  expected += std::string("\x03\0\0\0\x01\0\0\0", 8);                                   // lengths
  expected += std::string("\0\0\0\0\0\0\0\0\x0C\0\0\0\0\0\0\0", 16);                    // byte offsets
  expected += std::string("\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0", 24);  // documents
  EXPECT_EQ(slurp(folder / "t.idx"), expected);
  write_documents(folder / "n", {{7, 300}}, 65499);
  EXPECT_EQ(slurp(folder / "n.bin"), std::string("\x07\0\x2C\x01", 4));
  EXPECT_EQ(slurp(folder / "n.idx")[17], 8);
}

TEST(IndexedDataset, ReadsBackDocumentsAndFindsTheDocumentOfAToken) {
  const TempFolder folder;
  for (const int64_t vocab : {500, 100000}) {
    write_documents(folder / "t", {{}, {1, 2, 3}, {}, {}, {4}, {5, 499}, {}}, vocab);
    const IndexedDataset dataset(folder / "t");
    EXPECT_EQ(read_all(dataset), (std::vector<int32_t>{1, 2, 3, 4, 5, 499}));
    EXPECT_EQ(dataset.num_documents(), 7);
    const std::vector<int64_t> begins = {0, 0, 3, 3, 3, 4, 6, 6};
    for (int64_t d = 0; d < 8; d++) EXPECT_EQ(dataset.document_begin(d), begins[static_cast<size_t>(d)]);
    const std::vector<int64_t> documents = {1, 1, 1, 4, 5, 5};
    for (int64_t p = 0; p < 6; p++) EXPECT_EQ(dataset.document_at(p), documents[static_cast<size_t>(p)]) << p;
    EXPECT_THROW(dataset.document_begin(8), Error);
    EXPECT_THROW(dataset.document_at(6), Error);
    std::vector<int32_t> two(2);
    dataset.read(4, two, vocab);
    EXPECT_EQ(two[1], 499);
    EXPECT_THROW(dataset.read(5, two, vocab), Error);
    EXPECT_THROW(dataset.read(-1, two, vocab), Error);
  }
}

TEST(IndexedDataset, AnEmptyDatasetOpens) {
  const TempFolder folder;
  write_documents(folder / "t", {}, 100);
  const IndexedDataset dataset(folder / "t");
  EXPECT_EQ(dataset.num_tokens(), 0);
  EXPECT_EQ(dataset.num_documents(), 0);
  dataset.verify(100);
}

TEST(IndexedDataset, IdsOutsideTheVocabularyAreNamed) {
  const TempFolder folder;
  write_documents(folder / "t", {{1, 2, 77, 3}}, 100);
  const IndexedDataset dataset(folder / "t");
  dataset.verify(78);
  const std::string error = error_of<Error>([&] { dataset.verify(50); });
  EXPECT_NE(error.find("t.bin: token 2: expected an id in 0..49, got 77 (vocabulary size 50)"),
            std::string::npos)
      << error;
  IndexedDatasetWriter writer(folder / "w", 10);
  const std::vector<int32_t> bad = {1, 10};
  EXPECT_NE(error_of<Error>([&] { writer.add_tokens(bad); }).find("0..9, got 10 for token 1"),
            std::string::npos);
}

TEST(IndexedDataset, EveryDamageOfTheIndexIsRefusedWithFileAndOffset) {
  const TempFolder folder;
  write_documents(folder / "good", {{1, 2, 3}, {4, 5}}, 100);
  const std::string idx = slurp(folder / "good.idx"), bin = slurp(folder / "good.bin");
  const auto error = [&](const std::string& damaged_idx, const std::string& damaged_bin) {
    folder.write("t.idx", damaged_idx);
    folder.write("t.bin", damaged_bin);
    return error_of<Error>([&] { IndexedDataset dataset(folder / "t"); });
  };
  const auto with_byte = [&](size_t at, char value) {
    std::string damaged = idx;
    damaged[at] = value;
    return damaged;
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << "expected '" << part << "' in '" << text << "'";
  };
  EXPECT_EQ(error(idx, bin), "");
  contains(error(with_byte(0, 'X'), bin), "t.idx: byte 0: expected the magic");
  contains(error(with_byte(9, 2), bin), "t.idx: byte 9: expected version 1, got 2");
  contains(error(with_byte(17, 6), bin), "byte 17: expected an integer dtype code");
  contains(error(with_byte(18, 3), bin), "bytes for 3 sequences");
  contains(error(with_byte(25, '\x7F'), bin), "byte 18: expected counts that fit");
  contains(error(with_byte(26, 0), bin), "byte 18: expected counts that fit");
  contains(error(with_byte(37, '\x80'), bin), "byte 34: sequence 0: expected a length >= 0");
  contains(error(with_byte(34, 2), bin), "byte 50: sequence 1: expected offset 4");
  contains(error(with_byte(50, 4), bin), "byte 50: sequence 1: expected offset 6");
  contains(error(with_byte(58, 1), bin), "byte 58: document boundary 0: expected 0");
  contains(error(with_byte(66, 5), bin), "byte 66: document boundary 1");
  contains(error(with_byte(74, 1), bin), "byte 74: expected the last document boundary to be 2");
  contains(error(idx, bin.substr(0, 9)), "t.bin: expected at least 10 bytes for sequence 1, got 9");
  contains(error(idx, bin + "x"), "t.bin: expected 10 bytes according to the index, got 11");
  for (size_t size = 0; size < idx.size(); size++) EXPECT_NE(error(idx.substr(0, size), bin), "") << size;
  EXPECT_EQ(error(idx + std::string(2, 0), bin), "");  // with modes
  EXPECT_NE(error(idx + std::string(3, 0), bin), "");
  contains(error_of<Error>([&] { IndexedDataset dataset(folder / "absent"); }), "absent.idx: cannot open");
}

TEST(IndexedDataset, ReadsOtherIntegerTypesAndRefusesIdsBeyondInt32) {
  const TempFolder folder;
  write_documents(folder / "t", {{1, 2}}, 100);
  std::string idx = slurp(folder / "t.idx");
  idx[17] = 5;  // i64
  folder.write("w.idx", idx);
  std::string bin(16, 0);
  bin[0] = 9;
  bin[12] = 1;  // second id: 2^32
  folder.write("w.bin", bin);
  const IndexedDataset dataset(folder / "w");
  std::vector<int32_t> one(1), two(2);
  dataset.read(0, one, 0);
  EXPECT_EQ(one[0], 9);
  EXPECT_NE(error_of<Error>([&] {
              dataset.read(0, two, 0);
            }).find("token 1: expected an id in 0..2147483647, got 4294967296"),
            std::string::npos);
}

TEST(IndexedDataset, FingerprintFollowsContentAndNotThePath) {
  const TempFolder folder;
  write_documents(folder / "a", {{1, 2, 3}}, 100);
  write_documents(folder / "b", {{1, 2, 3}}, 100);
  write_documents(folder / "c", {{1, 2, 4}}, 100);
  write_documents(folder / "d", {{1, 2}, {3}}, 100);
  const auto print = [&](const char* name) { return IndexedDataset(folder / name).fingerprint(); };
  EXPECT_EQ(print("a"), print("b"));
  EXPECT_NE(print("a"), print("c"));
  EXPECT_NE(print("a"), print("d"));
}

TEST(IndexedDatasetWriter, NothingIsLeftWithoutFinish) {
  const TempFolder folder;
  {
    IndexedDatasetWriter writer(folder / "t", 100);
    const std::vector<int32_t> tokens = {1, 2};
    writer.add_tokens(tokens);
    EXPECT_NE(error_of<Error>([&] { writer.finish(); }).find("open document of 2 tokens"), std::string::npos);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(IndexedDatasetWriter, AFullDiskIsAClearErrorAndKeepsTheOldFiles) {
  const TempFolder folder;
  write_documents(folder / "t", {{1, 2, 3}}, 100);
  const std::string before = slurp(folder / "t.bin");
  // A file size limit fails like a full disk, in the middle of the data.
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit small{3 << 20, old_limit.rlim_max};
  auto* old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string error =
      error_of<Error>([&] { write_documents(folder / "t", {std::vector<int32_t>(4'000'000, 1)}, 100); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_NE(error.find("after 3145728 bytes"), std::string::npos) << error;
  EXPECT_NE(error.find("free space or choose another output folder"), std::string::npos) << error;
  EXPECT_EQ(slurp(folder / "t.bin"), before);
  EXPECT_EQ(IndexedDataset(folder / "t").num_tokens(), 3);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

// A sparse token file of 2^31 + 4096 u16 ids in three sequences, with a few real ids at the end.
std::string sparse_dataset(const TempFolder& folder, const std::vector<uint16_t>& tail) {
  const int64_t tokens = (int64_t{1} << 31) + 4096, bytes = 2 * tokens;
  folder.write("big.bin", "");
  std::filesystem::resize_file(folder / "big.bin", static_cast<uintmax_t>(bytes));
  std::fstream bin(folder / "big.bin", std::ios::binary | std::ios::in | std::ios::out);
  bin.seekp(bytes - static_cast<int64_t>(2 * tail.size()));
  bin.write(reinterpret_cast<const char*>(tail.data()), static_cast<std::streamsize>(2 * tail.size()));
  std::string idx("MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0", 34);
  const auto put = [&idx](auto value) { idx.append(reinterpret_cast<const char*>(&value), sizeof value); };
  const int32_t lengths[] = {1 << 30, 1 << 30, 4096};
  for (const int32_t length : lengths) put(length);
  for (int64_t s = 0; s < 3; s++) put(s << 31);
  put(int64_t{0});
  put(int64_t{3});
  folder.write("big.idx", idx);
  return folder / "big";
}

TEST(IndexedDataset, DT_07_ReadsTokensBeyondTwoToTheThirtyFirst) {
  const TempFolder folder;
  const IndexedDataset dataset(sparse_dataset(folder, {11, 22, 33}));
  EXPECT_EQ(dataset.num_tokens(), 2147487744);
  EXPECT_EQ(dataset.num_documents(), 1);
  std::vector<int32_t> last(4);
  dataset.read(dataset.num_tokens() - 4, last, 100);
  EXPECT_EQ(last, (std::vector<int32_t>{0, 11, 22, 33}));
  EXPECT_EQ(dataset.document_at(dataset.num_tokens() - 1), 0);
}

}  // namespace
}  // namespace shoal
