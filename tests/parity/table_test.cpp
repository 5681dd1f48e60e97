// The generated parity table (covering_set.h): each row against one rank.
#include <set>

#include "tests/parity/generated_table.h"

namespace shoal::testing {
namespace {

constexpr int kParts = 8;  // tests, so that a run can be cut

class GeneratedTable : public ::testing::TestWithParam<int> {};

TEST_P(GeneratedTable, GivesTheResultOfOneRank) {
  const std::vector<TableRow>& rows = generated_table().rows();
  for (size_t i = static_cast<size_t>(GetParam()); i < rows.size(); i += kParts)
    expect_parity(table_case(rows[i]), rows[i][kWorld]);
}

INSTANTIATE_TEST_SUITE_P(Parity, GeneratedTable, ::testing::Range(0, kParts),
                         [](const auto& info) { return str("Part", info.param); });

TEST(ParityTable, HasEveryPairOfSettingsOfItsLegalLayouts) {
  PairSet covered;
  for (const TableRow& row : generated_table().rows()) {
    ASSERT_TRUE(is_legal(row));
    for (int i = 0; i < kFactors; i++)
      for (int j = i + 1; j < kFactors; j++)
        covered.set(i, row[static_cast<size_t>(i)], j, row[static_cast<size_t>(j)], true);
  }
  size_t layouts = 0;
  std::set<std::pair<int, int>> degrees;  // axis and degree
  for (const int world : {2, 4, 8}) {
    layouts += layouts_of(world).size();
    for (const TableRow& row : layouts_of(world)) {
      for (int i = 0; i < kBlock; i++) {
        degrees.insert({i, row[static_cast<size_t>(i)]});
        for (int j = i + 1; j < kBlock; j++)
          ASSERT_TRUE(covered.has(i, row[static_cast<size_t>(i)], j, row[static_cast<size_t>(j)]))
              << i << ' ' << j;
        for (int j = kBlock; j < kFactors; j++)
          for (size_t b = 0; b < table_values(static_cast<Factor>(j)).size(); b++)
            ASSERT_TRUE(covered.has(i, row[static_cast<size_t>(i)], j, static_cast<int>(b))) << i << ' ' << j;
      }
    }
  }
  for (const Factor axis : {kTp, kCp, kPp, kEtp, kEp}) EXPECT_TRUE(degrees.contains({axis, 4})) << axis;
  EXPECT_GE(generated_table().rows().size(), 150U);
  std::printf("  %zu rows for %zu legal layouts\n", generated_table().rows().size(), layouts);
}

}  // namespace
}  // namespace shoal::testing
