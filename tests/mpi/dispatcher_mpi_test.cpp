#include <gtest/gtest.h>

#include "tests/mpi/mpi_world.h"
#include "tests/parallel/communicator_suite.h"
#include "tests/parallel/moe/dispatcher_suite.h"

namespace shoal {
namespace {

using testing::DispatchResult;
using testing::equal_bits;
using testing::mpi_world;
using testing::routing_cases;
using testing::RoutingCase;
using testing::run_dispatch;

class EveryRouting : public ::testing::TestWithParam<RoutingCase> {};

/// What ranks as threads get on the rank of this process.
DispatchResult on_threads(const std::string& kind, const RoutingCase& c, DType dtype) {
  DispatchResult result;
  run_ranks(mpi_world()->size(), [&](const std::shared_ptr<Communicator>& world) {
    DispatchResult mine = run_dispatch(*world, kind, c, dtype);
    if (world->rank() == mpi_world()->rank()) result = std::move(mine);
  });
  return result;
}

TEST_P(EveryRouting, HasTheBitsOfRanksAsThreads) {
  for (const char* kind : {"all_to_all", "all_gather"}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const DispatchResult got = run_dispatch(*mpi_world(), kind, GetParam(), dtype);
      const DispatchResult want = on_threads(kind, GetParam(), dtype);
      EXPECT_EQ(got.rows_per_expert, want.rows_per_expert);
      EXPECT_TRUE(equal_bits(got.x_RD, want.x_RD));
      EXPECT_TRUE(equal_bits(got.y_TD, want.y_TD));
      EXPECT_TRUE(equal_bits(got.dx_TD, want.dx_TD));
      EXPECT_TRUE(equal_bits(got.dweights_TK, want.dweights_TK));
    }
  }
}

TEST_P(EveryRouting, InPartsHasTheBitsOfTheWhole) {
  for (const bool padded : {false, true}) {
    const DispatchResult want =
        run_dispatch(*mpi_world(), "all_to_all", GetParam(), DType::f32, {}, {.padded = padded});
    const DispatchResult got =
        run_dispatch(*mpi_world(), "all_to_all", GetParam(), DType::f32, {}, {.chunks = 2, .padded = padded});
    EXPECT_TRUE(equal_bits(got.x_RD, want.x_RD));
    EXPECT_TRUE(equal_bits(got.y_TD, want.y_TD));
    EXPECT_TRUE(equal_bits(got.dx_TD, want.dx_TD));
    EXPECT_TRUE(equal_bits(got.dweights_TK, want.dweights_TK));
  }
}

INSTANTIATE_TEST_SUITE_P(Mpi, EveryRouting, ::testing::ValuesIn(routing_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace shoal
