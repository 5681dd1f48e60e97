// Rows of the generated parity table with ranks that are processes: two, four or eight of them.
#include "tests/mpi/mpi_world.h"
#include "tests/parity/generated_table.h"

namespace shoal::testing {
namespace {

/// At most a dozen of the rows for so many ranks, evenly spread; half of it for eight, which have few cores
/// in tests.
size_t num_rows_for(int world) {
  return world == 8 ? 6 : 12;
}
std::vector<TableRow> rows_for(int world) {
  const size_t count = num_rows_for(world);
  std::vector<TableRow> all, some;
  for (const TableRow& row : generated_table().rows()) {
    if (row[kWorld] == world) all.push_back(row);
  }
  for (size_t i = 0; i < count && i < all.size(); i++) some.push_back(all[i * all.size() / count]);
  return some;
}

TEST(TableOverMpi, GivesTheResultOfOneRank) {
  const int world = mpi_world()->size();
  if (world != 2 && world != 4 && world != 8) {
    GTEST_SKIP() << "the table has rows for 2, 4 and 8 ranks, not for " << world;
  }
  const std::vector<TableRow> rows = rows_for(world);
  EXPECT_GE(rows.size(), world == 8 ? 6U : 10U);
  for (const TableRow& row : rows) {
    const ParityCase c = table_case(row);
    const ParityResult got = run_parity(c, mpi_world());
    if (mpi_world()->rank() == 0) {
      EXPECT_TRUE(same_result(got, run_case(one_rank(c), 1), tolerance_of(c.dtype))) << c.name(world);
    }
  }
}

}  // namespace
}  // namespace shoal::testing
