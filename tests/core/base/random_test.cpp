#include "core/base/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "core/base/error.h"

namespace shoal {

namespace {

using Block = std::array<uint32_t, 4>;

// Every element is equally likely at every position: chi-square over many streams, small domains included
// (these walk the cycle most).
TEST(PermuteIndex, IsUniformOverStreams) {
  for (const uint64_t n : {5, 8, 20, 40}) {
    std::vector<double> counts(n);
    const double draws = 100000;
    for (uint64_t stream = 0; stream < 50000; stream++) {
      for (uint64_t position = 0; position < 2; position++) counts[permute_index(position, n, 7, stream)]++;
    }
    double chi_square = 0;
    const double expected = draws / static_cast<double>(n);
    for (const double count : counts) chi_square += (count - expected) * (count - expected) / expected;
    EXPECT_LT(chi_square / static_cast<double>(n - 1), 3) << "n " << n;
  }
}

}  // namespace

// Known answers published with the generator for philox4x32 with 10 rounds.
TEST(Philox, GivesThePublishedAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ULL, ~0ULL, ~0ULL), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // Counter 243f6a88 85a308d3 13198a2e 03707344 and key a4093822 299f31d0, words in order.
  EXPECT_EQ(philox(0x299f31d0a4093822ULL, 0x85a308d3243f6a88ULL, 0x0370734413198a2eULL),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(RandomStream, DependsOnSeedStreamAndIndexOnly) {
  const RandomStream a(1, "weights"), same(1, "weights"), other_seed(2, "weights"), other_name(1, "order");
  EXPECT_EQ(a.bits64(5), same.bits64(5));
  EXPECT_NE(a.bits64(5), a.bits64(6));
  EXPECT_NE(a.bits64(5), other_seed.bits64(5));
  EXPECT_NE(a.bits64(5), other_name.bits64(5));
  EXPECT_EQ(a.bits(5), static_cast<uint32_t>(a.bits64(5)));
  EXPECT_EQ(RandomStream(1, stream_id("weights")).bits64(9), a.bits64(9));
}

TEST(RandomStream, TellsIndicesAbove32BitsApart) {
  const RandomStream stream(1, "wide");
  std::set<uint64_t> values;
  for (int shift = 0; shift < 64; shift++) values.insert(stream.bits64(uint64_t{1} << shift));
  EXPECT_EQ(values.size(), 64U);
}

TEST(RandomStream, UniformFillsTheHalfOpenUnitInterval) {
  const RandomStream stream(3, "uniform");
  constexpr int kDraws = 20000, kBins = 10;
  std::vector<int> bins(kBins);
  double sum = 0;
  for (int i = 0; i < kDraws; i++) {
    const double value = stream.uniform(static_cast<uint64_t>(i));
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    sum += value;
    bins[static_cast<size_t>(value * kBins)]++;
  }
  // Five standard deviations.
  EXPECT_NEAR(sum / kDraws, 0.5, 5 * std::sqrt(1.0 / 12 / kDraws));
  for (const int count : bins) EXPECT_NEAR(count, kDraws / kBins, 5 * std::sqrt(kDraws * 0.1 * 0.9));
}

TEST(RandomStream, NormalHasTheMomentsOfAStandardNormal) {
  const RandomStream stream(4, "normal");
  constexpr int kDraws = 20000;
  double m1 = 0, m2 = 0, m4 = 0;
  for (int i = 0; i < kDraws; i++) {
    const double value = stream.normal(static_cast<uint64_t>(i));
    ASSERT_TRUE(std::isfinite(value));
    m1 += value;
    m2 += value * value;
    m4 += value * value * value * value;
  }
  EXPECT_NEAR(m1 / kDraws, 0, 5 / std::sqrt(kDraws));
  EXPECT_NEAR(m2 / kDraws, 1, 5 * std::sqrt(2.0 / kDraws));
  EXPECT_NEAR(m4 / kDraws, 3, 5 * std::sqrt(96.0 / kDraws));
}

TEST(RandomStream, BelowStaysInRangeAndReachesEveryValue) {
  const RandomStream stream(5, "below");
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 500; i++) {
    ASSERT_LT(stream.below(i, 7), 7U);
    seen.insert(stream.below(i, 7));
    EXPECT_EQ(stream.below(i, 1), 0U);
  }
  EXPECT_EQ(seen.size(), 7U);
  EXPECT_GT(stream.below(0, ~0ULL) | stream.below(1, ~0ULL) | stream.below(2, ~0ULL), uint64_t{1} << 60);
  EXPECT_THROW(stream.below(0, 0), Error);
}

TEST(StreamId, DiffersForSimilarNames) {
  std::set<uint64_t> ids;
  for (int i = 0; i < 2000; i++) ids.insert(stream_id(str("layers.", i, ".weight")));
  ids.insert(stream_id(""));
  EXPECT_EQ(ids.size(), 2001U);
}

TEST(PermuteIndex, IsAPermutationOfEverySmallSize) {
  for (uint64_t n = 1; n <= 200; n++) {
    std::vector<int> hits(n);
    for (uint64_t i = 0; i < n; i++) {
      const uint64_t to = permute_index(i, n, 11, n);
      ASSERT_LT(to, n);
      hits[to]++;
    }
    EXPECT_EQ(hits, std::vector<int>(n, 1)) << n;
  }
}

TEST(PermuteIndex, IsAPermutationOfALargeSizeAndOfPowersOfFour) {
  for (const uint64_t n : {uint64_t{65536}, uint64_t{65537}, uint64_t{100003}}) {
    std::vector<bool> hit(n);
    for (uint64_t i = 0; i < n; i++) hit[permute_index(i, n, 2, 3)] = true;
    EXPECT_EQ(std::count(hit.begin(), hit.end(), true), static_cast<std::ptrdiff_t>(n));
  }
}

TEST(PermuteIndex, IsOneToOneOnASampleOfHugeSizes) {
  for (const uint64_t n : {uint64_t{1} << 40, (uint64_t{1} << 62) + 1, ~uint64_t{0}}) {
    std::set<uint64_t> to;
    for (uint64_t i = 0; i < 1000; i++) {
      const uint64_t value = permute_index(i, n, 1, 1);
      ASSERT_LT(value, n);
      to.insert(value);
    }
    EXPECT_EQ(to.size(), 1000U) << n;
  }
}

TEST(PermuteIndex, DependsOnSeedAndStream) {
  int same_seed = 0, same_stream = 0, fixed = 0;
  for (uint64_t i = 0; i < 1000; i++) {
    const uint64_t value = permute_index(i, 1000, 1, 1);
    same_seed += value == permute_index(i, 1000, 2, 1);
    same_stream += value == permute_index(i, 1000, 1, 2);
    fixed += value == i;
  }
  // One match each is expected by chance.
  EXPECT_LT(same_seed, 12);
  EXPECT_LT(same_stream, 12);
  EXPECT_LT(fixed, 12);
}

TEST(PermuteIndex, RefusesAPositionPastTheEnd) {
  EXPECT_THROW(permute_index(5, 5, 1, 1), Error);
  EXPECT_THROW(permute_index(0, 0, 1, 1), Error);
}

}  // namespace shoal
