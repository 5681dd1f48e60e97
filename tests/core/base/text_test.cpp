#include "core/base/text.h"

#include <gtest/gtest.h>

namespace shoal {

TEST(NearestName, FindsTypos) {
  const std::vector<std::string> names = {"top_k", "num_experts", "score", "lr"};
  EXPECT_EQ(nearest_name("topk", names), "top_k");
  EXPECT_EQ(nearest_name("top-k", names), "top_k");
  EXPECT_EQ(nearest_name("TOP_K", names), "top_k");
  EXPECT_EQ(nearest_name("num_expert", names), "num_experts");
  EXPECT_EQ(nearest_name("nmu_experts", names), "num_experts");
  EXPECT_EQ(nearest_name("sorce", names), "score");
  EXPECT_EQ(nearest_name("Lr", names), "lr");
}

TEST(NearestName, IsEmptyWhenNothingIsClose) {
  EXPECT_EQ(nearest_name("zebra", {"top_k", "score"}), "");
  EXPECT_EQ(nearest_name("xy", {"lr"}), "") << "two edits make any word of two letters";
  EXPECT_EQ(nearest_name("abc", {}), "");
  EXPECT_EQ(nearest_name("", {"abc"}), "");
}

TEST(NearestName, PrefersTheFewestEditsThenTheFirst) {
  EXPECT_EQ(nearest_name("scores", {"stores", "score"}), "stores");
  EXPECT_EQ(nearest_name("scoring", {"storing_", "scorings"}), "scorings");
}

TEST(NearestName, CountsASwapOfNeighboursAsOneEdit) {
  EXPECT_EQ(nearest_name("abc", {"acb"}), "acb");
  EXPECT_EQ(nearest_name("abc", {"cba"}), "");
}

TEST(Suggest, IsAPhraseOrNothing) {
  EXPECT_EQ(suggest("topk", {"top_k"}), ", did you mean 'top_k'?");
  EXPECT_EQ(suggest("zebra", {"top_k"}), "");
}

TEST(Join, PutsTheSeparatorBetweenItems) {
  EXPECT_EQ(join({}, ", "), "");
  EXPECT_EQ(join({"a"}, ", "), "a");
  EXPECT_EQ(join({"a", "", "c"}, " | "), "a |  | c");
}

TEST(HumanCount, ScalesByThousands) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(950), "950");
  EXPECT_EQ(human_count(1234567), "1.23 M");
  EXPECT_EQ(human_count(-1500), "-1.50 K");
  EXPECT_EQ(human_count(2e9), "2.00 G");
  EXPECT_EQ(human_count(3e18), "3000.00 P");
}

TEST(HumanBytes, ScalesBy1024) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(int64_t{3} << 29), "1.50 GiB");
  EXPECT_EQ(human_bytes(int64_t{1} << 50), "1024.00 TiB");
}

TEST(HumanDuration, UsesTheTwoLargestUnits) {
  EXPECT_EQ(human_duration(0), "0.0 s");
  EXPECT_EQ(human_duration(3.21), "3.2 s");
  EXPECT_EQ(human_duration(245), "4 min 05 s");
  EXPECT_EQ(human_duration(3720), "1 h 02 min");
  EXPECT_EQ(human_duration(3599.9), "1 h 00 min");
}

TEST(HumanDuration, NeverShowsSixtySeconds) {
  EXPECT_EQ(human_duration(59.94), "59.9 s");
  EXPECT_EQ(human_duration(59.97), "1 min 00 s");
}

TEST(RankList, JoinsNeighbours) {
  EXPECT_EQ(rank_list({3}), "rank 3");
  EXPECT_EQ(rank_list({0, 1}), "ranks 0, 1");
  EXPECT_EQ(rank_list({0, 1, 2, 5, 7, 8}), "ranks 0-2, 5, 7, 8");
}

}  // namespace shoal
