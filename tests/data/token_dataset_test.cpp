#include "data/token_dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "core/base/error.h"
#include "tests/data/temp_folder.h"

namespace shoal {
namespace {

using testing::counting_dataset;
using testing::error_of;
using testing::TempFolder;

/// Document d has d % 5 + 1 tokens, all of them d.
std::shared_ptr<const IndexedDataset> numbered_documents(const std::string& prefix, int32_t documents) {
  std::vector<std::vector<int32_t>> all;
  for (int32_t d = 0; d < documents; d++) all.emplace_back(static_cast<size_t>(d % 5 + 1), d);
  testing::write_documents(prefix, all, 1000);
  return std::make_shared<const IndexedDataset>(prefix);
}

std::vector<int32_t> tokens_of(const TokenDataset& dataset) {
  std::vector<int32_t> tokens(static_cast<size_t>(dataset.num_tokens()));
  dataset.read(0, tokens, {}, 0);
  return tokens;
}

SplitOptions options(const std::string& split, double val_fraction, int64_t val_documents = 0) {
  SplitOptions o;
  o.split = split;
  o.val_fraction = val_fraction;
  o.val_documents = val_documents;
  return o;
}

TEST(TokenDataset, DT_09_PartsAreDisjointCompleteAndTheSameEverywhere) {
  const TempFolder folder;
  const auto source = numbered_documents(folder / "t", 97);
  for (const auto& o : {options("auto", 0.1), options("documents", 0.02), options("auto", 0.5, 3)}) {
    const auto train = tokens_of({source, o, Split::train}), val = tokens_of({source, o, Split::validation});
    EXPECT_EQ(train, tokens_of({source, o, Split::train}));  // as another rank would see it
    const std::set<int32_t> train_documents(train.begin(), train.end()),
        val_documents(val.begin(), val.end());
    for (const int32_t d : val_documents) EXPECT_EQ(train_documents.count(d), 0U) << "document " << d;
    EXPECT_EQ(train_documents.size() + val_documents.size(), 97U);
    auto both = train;
    both.insert(both.end(), val.begin(), val.end());
    std::sort(both.begin(), both.end());
    EXPECT_EQ(both, tokens_of({source, o, Split::all}));
    EXPECT_TRUE(std::is_sorted(train.begin(), train.end()));
  }
  EXPECT_EQ(tokens_of({source, options("documents", 0.5, 3), Split::validation}).size(),
            tokens_of({source, options("auto", 0.0, 3), Split::validation}).size());
}

TEST(TokenDataset, HeldOutDocumentsAreSpreadOverTheSource) {
  const TempFolder folder;
  const auto source = numbered_documents(folder / "t", 100);
  const auto val = tokens_of({source, options("documents", 0.2), Split::validation});
  EXPECT_LT(val.front(), 30);
  EXPECT_GT(val.back(), 70);
}

TEST(TokenDataset, ASingleDocumentIsSplitAtTheTail) {
  const TempFolder folder;
  const auto source = counting_dataset(folder / "t", 1005);
  const auto train = tokens_of({source, options("auto", 0.1), Split::train});
  const auto val = tokens_of({source, options("auto", 0.1), Split::validation});
  EXPECT_EQ(train.size(), 904U);  // floor(1005 * 0.9)
  EXPECT_EQ(train.back(), 903);
  EXPECT_EQ(val.front(), 904);
  EXPECT_EQ(val.back(), 1004);
}

TEST(TokenDataset, DT_09_AnEmptyPartIsRefusedAndNeverReplacedByTheOther) {
  const TempFolder folder;
  const auto source = counting_dataset(folder / "t", 5);
  const auto error = [&](const SplitOptions& o, Split part) {
    return error_of<UsageError>([&] { TokenDataset dataset(source, o, part); });
  };
  EXPECT_NE(error(options("auto", 0), Split::validation).find("no validation data"), std::string::npos);
  EXPECT_NE(error(options("documents", 0.5), Split::train).find("cannot hold out 1 of 1 documents"),
            std::string::npos);
  EXPECT_NE(error(options("tail", 0.1, 2), Split::train).find("val_documents (2) has no meaning"),
            std::string::npos);
  EXPECT_EQ(error(options("auto", 0), Split::train), "");
  const TempFolder tiny;
  const auto one = counting_dataset(tiny / "t", 1);
  EXPECT_NE(error_of<UsageError>([&] {
              TokenDataset d(one, options("tail", 0.5), Split::train);
            }).find("training part has no tokens (1 tokens"),
            std::string::npos);
}

TEST(TokenDataset, ReadsAcrossSegmentsAndMarksDocumentStarts) {
  const TempFolder folder;
  const auto source = numbered_documents(folder / "t", 60);
  const TokenDataset train(source, options("documents", 0.3), Split::train);
  const auto all = tokens_of(train);
  for (const int64_t size : {1, 2, 7, 33}) {
    for (int64_t begin = 0; begin + size <= train.num_tokens(); begin++) {
      std::vector<int32_t> tokens(static_cast<size_t>(size));
      std::vector<uint8_t> starts(static_cast<size_t>(size), 9);
      train.read(begin, tokens, starts, 1000);
      for (int64_t i = 0; i < size; i++) {
        const auto at = static_cast<size_t>(begin + i);
        ASSERT_EQ(tokens[static_cast<size_t>(i)], all[at]);
        ASSERT_EQ(starts[static_cast<size_t>(i)], at == 0 || all[at] != all[at - 1] ? 1 : 0) << at;
      }
    }
  }
  std::vector<int32_t> three(3);
  EXPECT_THROW(train.read(train.num_tokens() - 2, three, {}, 0), Error);
}

TEST(TokenDataset, FingerprintFollowsTheSplit) {
  const TempFolder folder;
  const auto source = numbered_documents(folder / "t", 60);
  const auto print = [&](const SplitOptions& o, Split part) {
    return TokenDataset(source, o, part).fingerprint();
  };
  EXPECT_EQ(print(options("auto", 0.1), Split::train), print(options("documents", 0.1), Split::train));
  EXPECT_NE(print(options("auto", 0.1), Split::train), print(options("auto", 0.2), Split::train));
  EXPECT_NE(print(options("auto", 0.1), Split::train), print(options("auto", 0.1), Split::validation));
}

}  // namespace
}  // namespace shoal
