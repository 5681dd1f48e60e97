#include "parallel/moe/dispatch_plan.h"

#include <gtest/gtest.h>

#include "core/base/random.h"

namespace shoal {
namespace {

Tensor ids(const std::vector<int32_t>& values, int64_t top_k) {
  return Tensor::from(values, {static_cast<int64_t>(values.size()) / top_k, top_k});
}

TEST(SortAssignments, OrdersByExpertThenTokenThenChoice) {
  const SortedAssignments s = sort_assignments(ids({2, 0, 0, -1, 2, 2}, 2), 4);
  EXPECT_EQ(s.counts_E, (std::vector<int64_t>{2, 0, 3, 0}));
  EXPECT_EQ(s.row_N.to_vector<int64_t>(), (std::vector<int64_t>{0, 1, 0, 2, 2}));
  EXPECT_EQ(s.choice_N.to_vector<int64_t>(), (std::vector<int64_t>{1, 0, 0, 0, 1}));
  EXPECT_EQ(s.slots_TK.to_vector<int64_t>(), (std::vector<int64_t>{2, 0, 1, -1, 3, 4}));
}

TEST(SortAssignments, TakesNoTokensAndOnlyDroppedOnes) {
  EXPECT_EQ(sort_assignments(Tensor::empty({0, 2}, DType::i32), 3).num_rows(), 0);
  const SortedAssignments s = sort_assignments(ids({-1, -1}, 1), 2);
  EXPECT_EQ(s.num_rows(), 0);
  EXPECT_EQ(s.slots_TK.to_vector<int64_t>(), (std::vector<int64_t>{-1, -1}));
}

TEST(SortAssignments, TakesExpertsInTheOrderOfTheirPlaces) {
  const Tensor place = Tensor::from(std::vector<int32_t>{2, 3, 0, 1}, {4});  // experts 2, 3, 0, 1
  const SortedAssignments s = sort_assignments(ids({2, 0, 0, -1, 2, 2}, 2), 4, place);
  EXPECT_EQ(s.counts_E, (std::vector<int64_t>{2, 0, 3, 0}));
  EXPECT_EQ(s.row_N.to_vector<int64_t>(), (std::vector<int64_t>{0, 2, 2, 0, 1}));
  EXPECT_EQ(s.slots_TK.to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 4, -1, 1, 2}));
}

TEST(SortPadded, GivesEveryExpertItsRows) {
  const SortedAssignments s = sort_padded(ids({1, 0, 0, -1}, 2), 2, 3);
  EXPECT_EQ(s.counts_E, (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(s.row_N.to_vector<int64_t>(), (std::vector<int64_t>{0, 1, -1, 0, -1, -1}));
  EXPECT_EQ(s.choice_N.to_vector<int64_t>(), (std::vector<int64_t>{1, 0, -1, 0, -1, -1}));
  EXPECT_EQ(s.slots_TK.to_vector<int64_t>(), (std::vector<int64_t>{3, 0, 1, -1}));
  EXPECT_EQ(sort_padded(Tensor::empty({0, 2}, DType::i32), 3, 0).num_rows(), 0);
}

TEST(SortAssignments, NamesTheFirstBadId) {
  for (const int32_t bad : {4, -2}) {
    try {
      sort_assignments(ids({0, 1, 2, bad}, 2), 4);
      FAIL() << "expected an error";
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(str("expert_ids_TK[1, 1] is ", bad)), std::string::npos)
          << e.what();
    }
  }
  EXPECT_THROW(sort_assignments(Tensor::zeros({2}, DType::i32), 4), Error);
  EXPECT_THROW(sort_assignments(Tensor::zeros({2, 1}, DType::i64), 4), Error);
}

TEST(RowsPerRank, SumsTheExpertsOfEachRank) {
  const std::vector<int64_t> counts = {1, 2, 3, 4, 5};
  EXPECT_EQ(rows_per_rank(counts, 1), (std::vector<int64_t>{15}));
  EXPECT_EQ(rows_per_rank(counts, 2), (std::vector<int64_t>{6, 9}));  // larger shards first: 3 + 2 experts
  EXPECT_EQ(rows_per_rank(counts, 5), counts);
}

TEST(OrderArrivals, PutsExpertsBeforeSources) {
  // Source 0 sends 1 row for expert 0 and 2 for expert 1; source 1 sends 2 and 1.
  const ArrivalOrder order = order_arrivals(std::vector<int64_t>{1, 2, 2, 1}, 2, 2);
  EXPECT_EQ(order.recv_rows, (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(order.rows_per_expert, (std::vector<int64_t>{3, 3}));
  EXPECT_FALSE(order.identity);
  EXPECT_EQ(order.index_R.to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 4, 1, 2, 5}));
}

TEST(OrderArrivals, InverseUndoesIndexForRandomCounts) {
  const RandomStream random(1, "test");
  for (uint64_t trial = 0; trial < 20; trial++) {
    const int64_t sources = 1 + static_cast<int64_t>(random.below(trial * 100, 5));
    const int64_t local = 1 + static_cast<int64_t>(random.below(trial * 100 + 1, 5));
    std::vector<int64_t> counts;
    for (int64_t i = 0; i < sources * local; i++)
      counts.push_back(static_cast<int64_t>(random.below(trial * 100 + 2 + static_cast<uint64_t>(i), 4)));
    const ArrivalOrder order = order_arrivals(counts, sources, local);
    if (order.identity) continue;
    const auto index = order.index_R.to_vector<int64_t>(), inverse = order.inverse_R.to_vector<int64_t>();
    for (size_t n = 0; n < index.size(); n++)
      EXPECT_EQ(inverse[static_cast<size_t>(index[n])], static_cast<int64_t>(n));
  }
}

TEST(OrderArrivals, IsTheIdentityForOneSourceOneExpertOrNoRows) {
  EXPECT_TRUE(order_arrivals(std::vector<int64_t>{3, 4}, 1, 2).identity);
  EXPECT_TRUE(order_arrivals(std::vector<int64_t>{3, 4}, 2, 1).identity);
  EXPECT_TRUE(order_arrivals(std::vector<int64_t>{0, 0, 0, 0}, 2, 2).identity);
}

TEST(PlanOf, RefusesThePlanOfAnotherDispatcher) {
  struct A final : DispatchPlan {};
  struct B final : DispatchPlan {};
  EXPECT_NO_THROW(plan_of<A>(std::make_shared<A>(), "a"));
  EXPECT_THROW(plan_of<A>(std::make_shared<B>(), "a"), Error);
  EXPECT_THROW(plan_of<A>(nullptr, "a"), Error);
}

}  // namespace
}  // namespace shoal
