#include "parallel/traffic.h"

#include <gtest/gtest.h>

#include "parallel/communicator.h"
#include "tests/support/error_of.h"

namespace shoal {
namespace {

using Kind = CollectiveKind;
using testing::error_of;

TEST(Traffic, CountsWhatEachCallSendsInARing) {
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    world->traffic().set_nodes({0, 0, 1});
    const int me = world->rank();
    const bool near = me == 0;  // the next rank is on the same node
    const auto expect = [&](Kind kind, int64_t calls, int64_t bytes) {
      const CallTraffic& counted = world->traffic().ledger().at("world")[kind];
      EXPECT_EQ(counted.calls, calls) << collective_name(kind);
      EXPECT_EQ(counted.sent.within_node, near ? bytes : 0) << collective_name(kind);
      EXPECT_EQ(counted.sent.between_nodes, near ? 0 : bytes) << collective_name(kind);
    };
    const Tensor five = Tensor::zeros({5}, DType::f32), fifteen = Tensor::zeros({15}, DType::f32);
    world->all_reduce(five, ReduceOp::sum).wait();
    expect(Kind::all_reduce, 1, 26);  // 2 * 20 * 2 / 3
    world->all_gather(five, fifteen).wait();
    world->all_gather(Tensor::zeros({0}, DType::f32), Tensor::zeros({0}, DType::f32)).wait();
    expect(Kind::all_gather, 2, 40);
    world->reduce_scatter(fifteen, five, ReduceOp::sum).wait();
    expect(Kind::reduce_scatter, 1, 40);
    world->broadcast(five, 1).wait();
    expect(Kind::broadcast, 1, me == 0 ? 0 : 20);
    // Rank r sends r + 1 rows of 8 bytes to each rank.
    const std::vector<int64_t> send(3, me + 1), receive = {1, 2, 3};
    world
        ->all_to_all(Tensor::zeros({3 * (me + 1), 2}, DType::f32), Tensor::zeros({6, 2}, DType::f32), send,
                     receive)
        .wait();
    const CallTraffic& exchanged = world->traffic().ledger().at("world")[Kind::all_to_all];
    EXPECT_EQ(exchanged.sent.within_node, me == 2 ? 0 : 8 * (me + 1));
    EXPECT_EQ(exchanged.sent.between_nodes, (me == 2 ? 16 : 8) * (me + 1));
    EXPECT_EQ(world->traffic().ledger().at("world").total().calls, 6);
  });
}

TEST(Traffic, OfGroupsByPlaceIsInOneLedgerWithTheirNodes) {
  run_ranks(4, [](const std::shared_ptr<Communicator>& world) {
    world->traffic().set_nodes({0, 0, 1, 1});
    // Ranks {3, 1} and {2, 0}: the order is turned round.
    const auto pair = world->split_by([](int r) { return Communicator::Place{r % 2, -r}; }, "pair");
    EXPECT_EQ(pair->rank(), world->rank() < 2 ? 1 : 0);
    EXPECT_EQ(pair->traffic().nodes(), (std::vector<int>{1, 0}));
    const Traffic before = world->traffic().ledger();
    EXPECT_EQ(pair->sum(int64_t{1}), 2);
    EXPECT_EQ(make_single_communicator()->sum(int64_t{1}), 1);
    const Traffic since = world->traffic().ledger() - before;
    ASSERT_EQ(since.size(), 1U);
    EXPECT_EQ(since.at("pair").total().sent, (LinkBytes{0, 8}));
    EXPECT_EQ(bytes_sent(since * 3), (LinkBytes{0, 24}));
  });
}

TEST(Traffic, OfImaginedRanksIsCountedWithoutCalls) {
  const auto world = make_imagined_communicator(5, 512, "world");
  std::vector<int> nodes;
  for (int r = 0; r < 512; r++) nodes.push_back(r / 8);
  world->traffic().set_nodes(nodes);
  const auto group = world->split_by([](int r) { return Communicator::Place{r % 4, r}; }, "quarter");
  EXPECT_EQ(group->size(), 128);
  EXPECT_EQ(group->rank(), 1);
  group->traffic().all_gather(10);
  EXPECT_EQ(bytes_sent(world->traffic().ledger()), (LinkBytes{0, 1270}));
  const Tensor x = Tensor::zeros({1}, DType::f32);
  EXPECT_NE(error_of([&] { group->all_reduce(x, ReduceOp::sum).wait(); }).find("[quarter]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { group->barrier(); }).find("imagined"), std::string::npos);
}

TEST(Traffic, NodesAreRegularWhenTheyLieOneByOneWithAsManyRanks) {
  EXPECT_EQ(regular_node_size({}, 6), 6);
  EXPECT_EQ(regular_node_size({0, 0, 1, 1}, 4), 2);
  EXPECT_EQ(regular_node_size({3, 3, 3}, 3), 3);
  EXPECT_EQ(regular_node_size({0, 1, 0, 1}, 4), 0);
  EXPECT_EQ(regular_node_size({0, 0, 0, 1}, 4), 0);
  EXPECT_EQ(regular_node_size({0, 1, 1, 2}, 4), 0);
}

}  // namespace
}  // namespace shoal
