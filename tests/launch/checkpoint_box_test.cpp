#include "launch/checkpoint_box.h"

#include <gtest/gtest.h>

#include <map>

namespace shoal {

namespace {

// All global indices of a box, row-major.
std::vector<std::vector<int64_t>> indices(const Box& box) {
  std::vector<std::vector<int64_t>> all{{}};
  for (int d = 0; d < box.extent.dims(); d++) {
    std::vector<std::vector<int64_t>> next;
    for (const auto& index : all)
      for (int64_t i = 0; i < box.extent[d]; i++) {
        next.push_back(index);
        next.back().push_back(box.start[d] + i);
      }
    all = std::move(next);
  }
  return all;
}

}  // namespace

TEST(CheckpointBox, IntersectionIsTheCommonElements) {
  EXPECT_EQ(intersect({{0, 2}, {3, 4}}, {{1, 0}, {9, 3}}), (Box{{1, 2}, {2, 1}}));
  EXPECT_EQ(intersect({{0, 0}, {2, 2}}, {{2, 0}, {2, 2}}), std::nullopt);
  EXPECT_EQ(intersect({{0}, {0}}, {{0}, {5}}), std::nullopt);
  EXPECT_EQ(intersect({{}, {}}, {{}, {}}), (Box{{}, {}}));  // a scalar
}

TEST(CheckpointBox, RunsCopyEveryCommonElementToItsPlace) {
  const std::vector<std::pair<Box, Box>> cases = {
      {{{0, 0, 0}, {4, 3, 5}}, {{0, 0, 0}, {4, 3, 5}}}, {{{0, 0, 0}, {4, 3, 5}}, {{1, 0, 0}, {2, 3, 5}}},
      {{{0, 0, 0}, {4, 3, 5}}, {{0, 1, 0}, {4, 2, 5}}}, {{{0, 0, 2}, {4, 3, 3}}, {{0, 0, 0}, {4, 3, 4}}},
      {{{1, 1, 1}, {3, 2, 4}}, {{0, 0, 0}, {3, 2, 3}}}, {{{}, {}}, {{}, {}}}};
  for (const auto& [a, b] : cases) {
    const auto part = intersect(a, b);
    ASSERT_TRUE(part);
    const auto in_a = indices(a), in_b = indices(b);
    std::map<std::vector<int64_t>, int> seen;
    int64_t previous = -1;
    for_each_run(*part, a, b, [&](int64_t from, int64_t into, int64_t count) {
      EXPECT_GT(from, previous);
      previous = from;
      for (int64_t i = 0; i < count; i++) {
        const auto& index = in_a.at(static_cast<size_t>(from + i));
        EXPECT_EQ(index, in_b.at(static_cast<size_t>(into + i)));
        seen[index]++;
      }
    });
    std::map<std::vector<int64_t>, int> expected;
    for (const auto& index : indices(*part)) expected[index] = 1;
    EXPECT_EQ(seen, expected) << box_text(a) << " and " << box_text(b);
  }
}

TEST(CheckpointBox, RowsOfTheFirstDimensionAreOneRun) {
  int runs = 0;
  const Box whole{{0, 0}, {8, 6}}, rows{{2, 0}, {3, 6}};
  for_each_run(rows, whole, rows, [&](int64_t from, int64_t into, int64_t count) {
    runs++;
    EXPECT_EQ(from, 12);
    EXPECT_EQ(into, 0);
    EXPECT_EQ(count, 18);
  });
  EXPECT_EQ(runs, 1);
}

TEST(CheckpointBox, CoverageNamesWhatIsMissingOrDoubled) {
  const Shape shape{6, 4};
  EXPECT_EQ(coverage_problem(shape, {{{0, 0}, {6, 4}}}), "");
  EXPECT_EQ(coverage_problem(shape, {{{4, 0}, {2, 4}}, {{0, 0}, {4, 4}}}), "");
  EXPECT_EQ(coverage_problem(shape, {{{4, 0}, {2, 4}}, {{4, 0}, {0, 4}}, {{0, 0}, {4, 4}}}), "");
  EXPECT_EQ(coverage_problem(shape, {}), "all elements are missing");
  EXPECT_EQ(coverage_problem(shape, {{{0, 0}, {6, 4}}, {{0, 0}, {6, 4}}}), "all elements are stored 2 times");
  EXPECT_EQ(coverage_problem(shape, {{{0, 0}, {2, 4}}, {{3, 0}, {3, 4}}}),
            "rows [2, 3) of dimension 0 are missing");
  EXPECT_EQ(coverage_problem(shape, {{{0, 0}, {2, 4}}}), "rows [2, 6) of dimension 0 are missing");
  EXPECT_EQ(coverage_problem(shape, {{{1, 0}, {5, 4}}}), "rows [0, 1) of dimension 0 are missing");
  EXPECT_EQ(coverage_problem(shape, {{{0, 0}, {6, 3}}, {{0, 2}, {6, 2}}}),
            "rows [2, 3) of dimension 1 are stored twice");
  EXPECT_EQ(coverage_problem(shape, {{{0, 0}, {6, 5}}}), "piece [0, 0] + [6, 5] is outside of shape [6, 4]");
  EXPECT_EQ(coverage_problem(shape, {{{0}, {6}}}), "piece [0] + [6] is outside of shape [6, 4]");
}

TEST(CheckpointBox, CoverageHandlesPiecesThatCutTwoDimensions) {
  const std::vector<Box> quarters = {{{0, 0}, {2, 2}}, {{0, 2}, {2, 2}}, {{2, 0}, {2, 2}}, {{2, 2}, {2, 2}}};
  EXPECT_EQ(coverage_problem({4, 4}, quarters), "");
  EXPECT_EQ(coverage_problem({4, 4}, {quarters[0], quarters[1], quarters[3]}),
            "4 of 16 elements are missing");
  EXPECT_EQ(coverage_problem({4, 4}, {quarters[0], quarters[1], quarters[2], {{1, 2}, {3, 2}}}),
            "elements [1, 2] + [1, 2] are stored twice");
}

TEST(CheckpointBox, ScalarsAndEmptyTensorsAreCoveredTheirWay) {
  EXPECT_EQ(coverage_problem({}, {{{}, {}}}), "");
  EXPECT_EQ(coverage_problem({}, {}), "all elements are missing");
  EXPECT_EQ(coverage_problem({0, 4}, {}), "");
  EXPECT_EQ(coverage_problem({0, 4}, {{{0, 0}, {0, 4}}}), "");
}

}  // namespace shoal
