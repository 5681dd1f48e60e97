#include "data/batch_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

#include "core/base/error.h"
#include "data/prefetching_loader.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using testing::counting_dataset;
using testing::error_of;
using testing::TempFolder;

std::shared_ptr<const TokenDataset> whole(std::shared_ptr<const IndexedDataset> source) {
  return std::make_shared<const TokenDataset>(std::move(source), SplitOptions{}, Split::all);
}

LoaderOptions loader_options(const std::string& sampling, int64_t seed = 1, bool mask_documents = false) {
  LoaderOptions o;
  o.sampling = sampling;
  o.seed = seed;
  o.mask_documents = mask_documents;
  return o;
}

/// First token of each of `count` samples: with counting_dataset it tells the window.
std::vector<int32_t> first_tokens(const BatchLoader& loader, int64_t first, int64_t count) {
  std::vector<int32_t> out;
  const Batch batch = loader.batch(first, count);
  for (int64_t row = 0; row < count; row++)
    out.push_back(batch.tokens_BS[static_cast<size_t>(row * batch.S)]);
  return out;
}

TEST(BatchLoader, SequentialWindowsOverlapByTheLabelOnly) {
  const TempFolder folder;
  const BatchLoader loader(loader_options("sequential"), {{whole(counting_dataset(folder / "t", 20)), 1}}, 6,
                           0);
  EXPECT_EQ(loader.num_windows(0), 3);  // 19 labels
  const Batch batch = loader.batch(1, 2);
  EXPECT_EQ(batch.B, 2);
  EXPECT_EQ(batch.S, 6);
  EXPECT_EQ(batch.first_sample, 1);
  EXPECT_EQ(batch.tokens_BS, (std::vector<int32_t>{6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(batch.labels_BS, (std::vector<int32_t>{7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}));
  EXPECT_EQ(batch.positions_BS, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(batch.document_BS, std::vector<int32_t>(12, 0));
  EXPECT_EQ(loader.batch(0, 0).tokens_BS.size(), 0U);
}

TEST(BatchLoader, DT_05_RS_05_EpochsArePermutationsInDifferentOrdersAndRanksShareThem) {
  const TempFolder folder;
  const BatchLoader loader(loader_options("shuffle"),
                           {{whole(counting_dataset(folder / "t", 12 * 4 + 1)), 1}}, 4, 0);
  std::set<std::vector<int32_t>> orders;
  for (int64_t epoch = 0; epoch < 3; epoch++) {
    const auto order = first_tokens(loader, 12 * epoch, 12);
    orders.insert(order);
    // Two ranks, micro-batches of 2: each takes its slice of every global batch of 4.
    std::vector<int32_t> by_ranks;
    for (int64_t step = 0; step < 3; step++) {
      for (int64_t rank = 0; rank < 2; rank++) {
        const auto part = first_tokens(loader, 12 * epoch + 4 * step + 2 * rank, 2);
        by_ranks.insert(by_ranks.end(), part.begin(), part.end());
      }
    }
    EXPECT_EQ(by_ranks, order);
    std::sort(by_ranks.begin(), by_ranks.end());
    for (int32_t w = 0; w < 12; w++) EXPECT_EQ(by_ranks[static_cast<size_t>(w)], 4 * w);
  }
  EXPECT_EQ(orders.size(), 3U);
}

TEST(BatchLoader, SeedsGiveOtherOrdersAndEqualSeedsTheSame) {
  const TempFolder folder;
  const auto data = whole(counting_dataset(folder / "t", 401));
  const auto order = [&](int64_t seed) {
    return first_tokens({loader_options("shuffle", seed), {{data, 1}}, 4, 0}, 0, 100);
  };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST(BatchLoader, DT_03_BatchesRunOverTheEndOfAnEpochAndAreNeverShort) {
  const TempFolder folder;
  const BatchLoader loader(loader_options("shuffle"),
                           {{whole(counting_dataset(folder / "t", 10 * 4 + 3)), 1}}, 4, 0);
  EXPECT_EQ(loader.samples_per_epoch(), 10);  // the last 2 tokens are dropped
  for (int64_t step = 0; step < 5; step++) EXPECT_EQ(loader.batch(4 * step, 4).tokens_BS.size(), 16U);
  EXPECT_DOUBLE_EQ(loader.epochs_of(0, 25), 2.5);
}

TEST(BatchLoader, DT_03_DataSmallerThanOneSampleIsRefusedWithNumbers) {
  const TempFolder folder;
  const auto data = whole(counting_dataset(folder / "t", 8));
  const std::string error = error_of<UsageError>([&] { BatchLoader({}, {{data, 1}}, 8, 0); });
  EXPECT_NE(error.find("needs 9 tokens"), std::string::npos) << error;
  EXPECT_NE(error.find("has 8"), std::string::npos) << error;
  EXPECT_EQ(BatchLoader({}, {{data, 1}}, 7, 0).num_windows(0), 1);
  EXPECT_NE(error_of<UsageError>([&] {
              BatchLoader(loader_options("random"), {{data, 1}}, 4, 0);
            }).find("got 'random'"),
            std::string::npos);
}

TEST(BatchLoader, RandomOffsetsCoverEveryOffsetAndDependOnTheSampleOnly) {
  const TempFolder folder;
  const BatchLoader loader(loader_options("random_offset"), {{whole(counting_dataset(folder / "t", 24)), 1}},
                           4, 0);
  const auto offsets = first_tokens(loader, 0, 2000);
  const std::set<int32_t> distinct(offsets.begin(), offsets.end());
  EXPECT_EQ(distinct.size(), 20U);  // 0 .. 19: the label of offset 19 is token 23
  EXPECT_EQ(*distinct.rbegin(), 19);
  EXPECT_EQ(first_tokens(loader, 1234, 1)[0], offsets[1234]);
}

TEST(BatchLoader, DocumentMaskingResetsPositionsAndIgnoresCrossingLabels) {
  const TempFolder folder;
  // End-of-document id 0; a document of one token; an empty document; the id 0 inside a document (DT_13).
  testing::write_documents(folder / "t", {{1, 2, 0}, {0}, {}, {3, 0, 4, 0}, {5, 6, 7}}, 100);
  const auto data = whole(std::make_shared<const IndexedDataset>(folder / "t"));
  const Batch masked = BatchLoader(loader_options("sequential", 1, true), {{data, 1}}, 10, 100).batch(0, 1);
  EXPECT_EQ(masked.tokens_BS, (std::vector<int32_t>{1, 2, 0, 0, 3, 0, 4, 0, 5, 6}));
  EXPECT_EQ(masked.labels_BS, (std::vector<int32_t>{2, 0, -1, -1, 0, 4, 0, -1, 6, 7}));
  EXPECT_EQ(masked.document_BS, (std::vector<int32_t>{0, 0, 0, 1, 2, 2, 2, 2, 3, 3}));
  EXPECT_EQ(masked.positions_BS, (std::vector<int32_t>{0, 1, 2, 0, 0, 1, 2, 3, 0, 1}));
  const Batch plain = BatchLoader(loader_options("sequential"), {{data, 1}}, 10, 100).batch(0, 1);
  EXPECT_EQ(plain.tokens_BS, masked.tokens_BS);
  EXPECT_EQ(plain.labels_BS, (std::vector<int32_t>{2, 0, 0, 3, 0, 4, 0, 5, 6, 7}));
  EXPECT_EQ(plain.positions_BS.back(), 9);
}

TEST(BatchLoader, AWindowThatBeginsInsideADocumentStartsAtPositionZero) {
  const TempFolder folder;
  testing::write_documents(folder / "t", {{1, 2, 3, 4, 5}, {6, 7}}, 100);
  const auto data = whole(std::make_shared<const IndexedDataset>(folder / "t"));
  const Batch batch = BatchLoader(loader_options("sequential", 1, true), {{data, 1}}, 3, 0).batch(1, 1);
  EXPECT_EQ(batch.tokens_BS, (std::vector<int32_t>{4, 5, 6}));
  EXPECT_EQ(batch.labels_BS, (std::vector<int32_t>{5, -1, 7}));
  EXPECT_EQ(batch.document_BS, (std::vector<int32_t>{0, 0, 1}));
  EXPECT_EQ(batch.positions_BS, (std::vector<int32_t>{0, 1, 0}));
}

TEST(BatchLoader, DT_11_BlendsTakeExactSharesAndRepeatSmallSources) {
  const TempFolder folder;
  const auto a = whole(counting_dataset(folder / "a", 10 * 4 + 1)),
             b = whole(counting_dataset(folder / "b", 2 * 4 + 1));
  const auto unused = whole(counting_dataset(folder / "c", 2));  // too small, but its weight is 0
  const BatchLoader loader(loader_options("shuffle"), {{a, 4.995}, {unused, 0}, {b, 0.005}}, 4, 0);
  EXPECT_EQ(loader.samples_per_epoch(), 12);
  EXPECT_DOUBLE_EQ(loader.epochs_of(0, 1000), 99.9);
  EXPECT_DOUBLE_EQ(loader.epochs_of(1, 1000), 0);
  EXPECT_DOUBLE_EQ(loader.epochs_of(2, 1000), 0.5);
  // Source b has no window that begins beyond token 4, so more of these than a's share is what b gave.
  const auto few =
      first_tokens(BatchLoader(loader_options("sequential"), {{a, 0.1}, {b, 0.9}}, 4, 0), 0, 1000);
  EXPECT_EQ(std::ranges::count_if(few, [](int32_t token) { return token > 4; }), 80);
  EXPECT_EQ(loader.batch(0, 1000).tokens_BS.size(), 4000U);
}

TEST(BatchLoader, IdsOutsideTheVocabularyNameFilePositionIdAndSize) {
  const TempFolder folder;
  const BatchLoader loader(loader_options("sequential"), {{whole(counting_dataset(folder / "t", 20)), 1}}, 6,
                           15);
  EXPECT_EQ(loader.batch(0, 2).tokens_BS.size(), 12U);
  const std::string error = error_of<Error>([&] { loader.batch(2, 1); });
  EXPECT_NE(error.find("t.bin: token 15: expected an id in 0..14, got 15"), std::string::npos) << error;
}

TEST(BatchLoader, DT_07_SampleNumbersTimesSequenceMayPassTwoToTheThirtyFirst) {
  const TempFolder folder;
  const auto data = whole(counting_dataset(folder / "t", 4097));
  const int64_t far = (int64_t{7} << 31) + 3;  // window 3 of 4; cut to 32 bits it would be another one
  for (const char* sampling : {"shuffle", "random_offset", "sequential"}) {
    const BatchLoader loader(loader_options(sampling), {{data, 1}}, 1024, 0);
    const Batch batch = loader.batch(far, 2);
    EXPECT_EQ(batch.labels_BS[0], batch.tokens_BS[0] + 1);
    EXPECT_EQ(batch.first_sample, far);
  }
  EXPECT_EQ(first_tokens(BatchLoader(loader_options("sequential"), {{data, 1}}, 1024, 0), far, 2),
            (std::vector<int32_t>{3 * 1024, 0}));
}

TEST(BatchLoader, DT_07_ReadsTheLastWindowOfAHugeSparseFile) {
  const TempFolder folder;
  const int64_t tokens = (int64_t{1} << 31) + 4097;
  folder.write("t.bin", "");
  std::filesystem::resize_file(folder / "t.bin", static_cast<uintmax_t>(2 * tokens));
  std::fstream bin(folder / "t.bin", std::ios::binary | std::ios::in | std::ios::out);
  bin.seekp(2 * (tokens - 2));
  bin.write("\x07\0\x09\0", 4);
  bin.close();
  std::string idx("MMIDIDX\0\0\x01\0\0\0\0\0\0\0\x08\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0", 34);
  const auto put = [&idx](auto value) { idx.append(reinterpret_cast<const char*>(&value), sizeof value); };
  for (const int32_t length : {1 << 30, 1 << 30, 4097}) put(length);
  for (int64_t s = 0; s < 3; s++) put(s << 31);
  put(int64_t{0});
  put(int64_t{3});
  folder.write("t.idx", idx);
  const auto data = whole(std::make_shared<const IndexedDataset>(folder / "t"));
  const BatchLoader loader(loader_options("sequential", 1, true), {{data, 1}}, 1024, 100);
  EXPECT_EQ(loader.num_windows(0), (tokens - 1) / 1024);
  const Batch last = loader.batch(loader.num_windows(0) - 1, 1);
  EXPECT_EQ(last.tokens_BS[1023], 7);
  EXPECT_EQ(last.labels_BS[1023], 9);
}

TEST(BatchLoader, FingerprintFollowsEverythingThatChangesTheSamples) {
  const TempFolder folder;
  const auto a = whole(counting_dataset(folder / "a", 100)), b = whole(counting_dataset(folder / "b", 90));
  const auto print = [&](const LoaderOptions& o, double weight, int64_t seq_len) {
    return BatchLoader(o, {{a, 1}, {b, weight}}, seq_len, 0).fingerprint();
  };
  const uint64_t base = print(loader_options("shuffle"), 1, 8);
  EXPECT_EQ(print(loader_options("shuffle"), 1, 8), base);
  EXPECT_NE(print(loader_options("sequential"), 1, 8), base);
  EXPECT_NE(print(loader_options("shuffle", 2), 1, 8), base);
  EXPECT_NE(print(loader_options("shuffle", 1, true), 1, 8), base);
  EXPECT_NE(print(loader_options("shuffle"), 2, 8), base);
  EXPECT_NE(print(loader_options("shuffle"), 1, 9), base);
}

TEST(PrefetchingLoader, GivesTheSameBatchesInOrder) {
  const TempFolder folder;
  const auto loader = std::make_shared<const BatchLoader>(
      loader_options("shuffle"),
      std::vector<WeightedDataset>{{whole(counting_dataset(folder / "t", 401)), 1}}, 4, 0);
  PrefetchingLoader prefetching(loader, [](int64_t call) {
    return PrefetchingLoader::Range{100 + 6 * call, 3};
  });
  for (int64_t call = 0; call < 50; call++) {
    Batch batch = prefetching.next();
    EXPECT_EQ(batch.first_sample, 100 + 6 * call);
    EXPECT_EQ(batch.tokens_BS, loader->batch(100 + 6 * call, 3).tokens_BS);
    if (call % 2 == 0) prefetching.recycle(std::move(batch));
  }
}

TEST(PrefetchingLoader, ErrorsReachTheCallerAfterTheGoodBatches) {
  const TempFolder folder;
  const auto loader = std::make_shared<const BatchLoader>(
      loader_options("sequential"),
      std::vector<WeightedDataset>{{whole(counting_dataset(folder / "t", 20)), 1}}, 6, 15);
  PrefetchingLoader prefetching(loader, [](int64_t call) { return PrefetchingLoader::Range{call, 1}; });
  EXPECT_EQ(prefetching.next().first_sample, 0);
  EXPECT_EQ(prefetching.next().first_sample, 1);
  EXPECT_THROW(prefetching.next(), Error);
  EXPECT_THROW(prefetching.next(), Error);
}

TEST(PrefetchingLoader, CanBeDestroyedAtAnyTime) {
  const TempFolder folder;
  const auto loader = std::make_shared<const BatchLoader>(
      loader_options("shuffle"),
      std::vector<WeightedDataset>{{whole(counting_dataset(folder / "t", 401)), 1}}, 4, 0);
  for (int taken = 0; taken < 20; taken++) {
    PrefetchingLoader prefetching(
        loader,
        [](int64_t call) {
          return PrefetchingLoader::Range{call, 2};
        },
        1 + taken % 3);
    for (int i = 0; i < taken % 5; i++) prefetching.next();
  }
}

}  // namespace
}  // namespace shoal
