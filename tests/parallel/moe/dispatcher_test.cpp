#include "parallel/moe/dispatcher.h"

#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "tests/parallel/communicator_suite.h"
#include "tests/parallel/moe/dispatcher_suite.h"
#include "tests/support/error_of.h"
#include "tests/support/expect_close.h"

namespace shoal {

using testing::error_of;

namespace {

using testing::DispatchResult;
using testing::equal_bits;
using testing::routing_cases;
using testing::RoutingCase;
using testing::run_dispatch;

void expect_same(const DispatchResult& got, const DispatchResult& want) {
  EXPECT_EQ(got.rows_per_expert, want.rows_per_expert);
  EXPECT_TRUE(equal_bits(got.x_RD, want.x_RD)) << "x_RD";
  EXPECT_TRUE(equal_bits(got.y_TD, want.y_TD)) << "y_TD";
  EXPECT_TRUE(equal_bits(got.dx_TD, want.dx_TD)) << "dx_TD";
  EXPECT_TRUE(equal_bits(got.dweights_TK, want.dweights_TK)) << "dweights_TK";
}

/// The tokens of all ranks on one rank.
RoutingCase on_one_rank(const RoutingCase& c, int num_ranks) {
  RoutingCase one = c;
  one.tokens = [&c, num_ranks](int) {
    int64_t total = 0;
    for (int r = 0; r < num_ranks; r++) total += c.tokens(r);
    return total;
  };
  return one;
}

class EveryRouting : public ::testing::TestWithParam<RoutingCase> {};

TEST_P(EveryRouting, AllToAllHasTheBitsOfAllGather) {
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const int n : {1, 2, 4}) {
      run_ranks(n, [&](const std::shared_ptr<Communicator>& world) {
        expect_same(run_dispatch(*world, "all_to_all", GetParam(), dtype),
                    run_dispatch(*world, "all_gather", GetParam(), dtype));
      });
    }
  }
}

TEST_P(EveryRouting, PartsHaveTheBitsOfTheWhole) {
  for (const int n : {1, 2, 3, 4}) {
    for (const int64_t chunks : {2, 3, 64}) {
      run_ranks(n, [&](const std::shared_ptr<Communicator>& world) {
        expect_same(run_dispatch(*world, "all_to_all", GetParam(), DType::f32, {}, {.chunks = chunks}),
                    run_dispatch(*world, "all_to_all", GetParam(), DType::f32));
      });
    }
  }
}

TEST_P(EveryRouting, RowsThatNobodyNeedsChangeNoBit) {
  const auto expect_padded = [](Communicator& group, const char* kind, int64_t chunks) {
    const DispatchResult got =
        run_dispatch(group, kind, GetParam(), DType::f32, {}, {.chunks = chunks, .padded = true});
    const DispatchResult want = run_dispatch(group, kind, GetParam(), DType::f32);
    EXPECT_TRUE(equal_bits(got.y_TD, want.y_TD)) << "y_TD";
    EXPECT_TRUE(equal_bits(got.dx_TD, want.dx_TD)) << "dx_TD";
    EXPECT_TRUE(equal_bits(got.dweights_TK, want.dweights_TK)) << "dweights_TK";
    for (const int64_t rows : got.rows_per_expert) EXPECT_EQ(rows, got.rows_per_expert.front());
    EXPECT_GE(got.x_RD.size(0), want.x_RD.size(0));
  };
  expect_padded(*make_single_communicator(), "local", 1);
  for (const int n : {1, 2, 4}) {
    for (const int64_t chunks : {1, 2}) {
      run_ranks(n, [&](const std::shared_ptr<Communicator>& world) {
        expect_padded(*world, "all_to_all", chunks);
      });
    }
  }
}

TEST_P(EveryRouting, NM_03_AnyNumberOfRanksHasTheBitsOfOneRank) {
  for (const int n : {1, 2, 3, 4}) {
    const DispatchResult whole =
        run_dispatch(*make_single_communicator(), "local", on_one_rank(GetParam(), n), DType::f32);
    run_ranks(n, [&](const std::shared_ptr<Communicator>& world) {
      const DispatchResult part = run_dispatch(*world, "all_to_all", GetParam(), DType::f32);
      int64_t token = 0;
      for (int r = 0; r < world->rank(); r++) token += GetParam().tokens(r);
      const int64_t end = token + GetParam().tokens(world->rank());
      EXPECT_TRUE(equal_bits(part.y_TD, whole.y_TD.rows(token, end)));
      EXPECT_TRUE(equal_bits(part.dx_TD, whole.dx_TD.rows(token, end)));
      EXPECT_TRUE(equal_bits(part.dweights_TK, whole.dweights_TK.rows(token, end)));
      // The experts see the same rows in the same order.
      const ShardRange shard = shard_range(GetParam().num_experts, {world->rank(), n});
      int64_t row = 0, num_rows = 0;
      for (int64_t e = 0; e < shard.end; e++)
        (e < shard.begin ? row : num_rows) += whole.rows_per_expert[static_cast<size_t>(e)];
      EXPECT_TRUE(equal_bits(part.x_RD, whole.x_RD.rows(row, row + num_rows)));
    });
  }
}

void expect_close(const DispatchResult& got, const DispatchResult& want, double tolerance) {
  using testing::close;
  EXPECT_EQ(got.rows_per_expert, want.rows_per_expert);
  EXPECT_TRUE(close(got.y_TD, want.y_TD, {tolerance, tolerance})) << "y_TD";
  EXPECT_TRUE(close(got.dx_TD, want.dx_TD, {tolerance, tolerance})) << "dx_TD";
  EXPECT_TRUE(close(got.dweights_TK, want.dweights_TK, {tolerance, tolerance})) << "dweights_TK";
}

TEST_P(EveryRouting, TwoLevelsGiveTheResultOfOne) {
  for (const auto& [n, per_node] : {std::pair{1, 1}, {2, 1}, {4, 2}, {4, 1}, {4, 4}, {6, 2}, {6, 3}}) {
    if (n > GetParam().num_experts) continue;
    run_ranks(n, [&](const std::shared_ptr<Communicator>& world) {
      const auto run = [&](const char* kind, DType dtype) {
        return run_dispatch(*world, kind, GetParam(), dtype, {}, {.ranks_per_node = per_node});
      };
      expect_close(run("hierarchical", DType::f64), run("all_to_all", DType::f64), 1e-13);
      expect_close(run("hierarchical", DType::f32), run("all_to_all", DType::f32), 1e-5);
      if (per_node == n) expect_same(run("hierarchical", DType::f32), run("all_to_all", DType::f32));
    });
  }
}

/// Counted from the routing: rows of all_to_all for each (token, choice), of hierarchical for each (token,
/// node), both ways, forward and backward; besides them counts, and of hierarchical the ids and, twice, the
/// weights of what goes to other nodes.
TEST_P(EveryRouting, BytesBetweenNodesAreCountedAndFewerOverTwoLevels) {
  const RoutingCase& c = GetParam();
  constexpr int kRanks = 4, kPerNode = 2;
  constexpr int64_t kRowBytes = 5 * 4, kCountBytes = 8, kIdBytes = 4, kWeightBytes = 4;
  run_ranks(kRanks, [&](const std::shared_ptr<Communicator>& world) {
    int64_t first = 0, choices = 0, nodes = 0;
    for (int r = 0; r < world->rank(); r++) first += c.tokens(r);
    const int mine = world->rank() / kPerNode;
    for (int64_t t = first; t < first + c.tokens(world->rank()); t++) {
      int64_t away = 0;
      for (int64_t k = 0; k < c.top_k; k++) {
        const int32_t id = c.id(t, k);
        if (id >= 0) away += id * kRanks / c.num_experts / kPerNode != mine ? 1 : 0;
      }
      choices += away;
      nodes += away > 0 ? 1 : 0;
    }
    const auto sent = [&](const char* kind) {
      const Traffic own = run_dispatch(*world, kind, c, DType::f32, {}, {.ranks_per_node = kPerNode}).traffic;
      return world->sum(bytes_sent(own).between_nodes);
    };
    const int64_t flat = world->sum(choices), two_level = world->sum(nodes);
    EXPECT_EQ(sent("all_to_all"), 4 * flat * kRowBytes + kRanks * c.num_experts / 2 * kCountBytes);
    EXPECT_EQ(sent("hierarchical"),
              two_level * (4 * kRowBytes + c.top_k * (kIdBytes + 2 * kWeightBytes)) + kRanks * kCountBytes);
    EXPECT_LE(two_level, flat);
  });
}

/// The definition, in loops: y[t] = sum over k of w[t, k] * f_e(x[t]), f_e(v) = (e + 1) v^2.
TEST_P(EveryRouting, LocalMatchesTheDefinition) {
  const RoutingCase c = on_one_rank(GetParam(), 4);
  const DispatchResult got = run_dispatch(*make_single_communicator(), "local", c, DType::f64);
  const int64_t num_tokens = c.tokens(0), width = 5, k_max = c.top_k;
  const auto x = testing::random_tensor({num_tokens, width}, DType::f64, 1).to_vector<double>();
  const auto w = testing::random_tensor({num_tokens, k_max}, DType::f64, 2).to_vector<double>();
  const auto dy = testing::random_tensor({num_tokens, width}, DType::f64, 3).to_vector<double>();
  std::vector<double> y(x.size(), 0.0), dx(x.size(), 0.0), dw(w.size(), 0.0);
  for (int64_t t = 0; t < num_tokens; t++) {
    for (int64_t k = 0; k < k_max; k++) {
      if (c.id(t, k) < 0) continue;
      for (int64_t d = 0; d < width; d++) {
        const auto i = static_cast<size_t>(t * width + d), j = static_cast<size_t>(t * k_max + k);
        const double factor = c.id(t, k) + 1;
        y[i] += w[j] * factor * x[i] * x[i];
        dx[i] += dy[i] * w[j] * 2 * factor * x[i];
        dw[j] += dy[i] * factor * x[i] * x[i];
      }
    }
  }
  EXPECT_TRUE(testing::close(got.y_TD.to_vector<double>(), y, {1e-13, 1e-13}));
  EXPECT_TRUE(testing::close(got.dx_TD.to_vector<double>(), dx, {1e-13, 1e-13}));
  EXPECT_TRUE(testing::close(got.dweights_TK.to_vector<double>(), dw, {1e-13, 1e-13}));
}

INSTANTIATE_TEST_SUITE_P(Cases, EveryRouting, ::testing::ValuesIn(routing_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Dispatcher, WithUnitWeightsDispatchAndCombineMultiplyByTopK) {
  for (const char* kind : {"all_to_all", "all_gather"}) {
    run_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
      const int64_t num_tokens = 3 + world->rank(), top_k = 2;
      Choice choice;
      choice.kind = kind;
      const auto dispatcher = DispatcherRegistry::make(choice, DispatcherContext{world.get(), 8});
      std::vector<int32_t> ids;
      for (int64_t i = 0; i < num_tokens * top_k; i++)
        ids.push_back(static_cast<int32_t>((i * 3 + world->rank()) % 8));
      const Tensor x =
          testing::random_tensor({num_tokens, 4}, DType::f32, static_cast<uint64_t>(world->rank()));
      const Tensor ones = Tensor::from(std::vector<float>(ids.size(), 1.0F), {num_tokens, top_k});
      const Dispatched d = dispatcher->dispatch(x, Tensor::from(ids, {num_tokens, top_k})).wait();
      const auto y = dispatcher->combine(d.x_RD, ones, d.plan).wait().to_vector<float>();
      for (size_t i = 0; i < y.size(); i++) EXPECT_EQ(y[i], 2 * x.to_vector<float>()[i]);
    });
  }
}

TEST(Dispatcher, PaddedRowsAreRefusedWhereTheyWouldNotSuffice) {
  const RoutingCase c{"one", 2, 1, [](int) { return 4; }, [](int64_t, int64_t) { return 1; }};
  const auto single = make_single_communicator();
  const Tensor x = Tensor::zeros({4, 3}, DType::f32),
               ids = Tensor::from(std::vector<int32_t>{1, 0, 1, 1}, {4, 1});
  const auto local = testing::make_dispatcher(*single, "local", 2, {});
  EXPECT_EQ(local->dispatch(x, ids, 3).wait().rows_per_expert, (std::vector<int64_t>{3, 3}));
  EXPECT_NE(error_of([&] {
              local->dispatch(x, ids, 2).wait();
            }).find("expert 1 has 3 assignments, expected at most 2"),
            std::string::npos);
  EXPECT_NE(error_of([&] { local->dispatch(x, ids, 0).wait(); }).find("at least one row for each expert"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              run_dispatch(*single, "all_gather", c, DType::f32, {}, {.padded = true});
            }).find("use all_to_all, or local with ep: 1"),
            std::string::npos);
}

TEST(Dispatcher, WorksWithOneExpert) {
  const RoutingCase c{"one", 1, 1, [](int) { return 4; }, [](int64_t, int64_t) { return 0; }};
  for (const char* kind : {"local", "all_gather", "all_to_all"}) {
    const DispatchResult r = run_dispatch(*make_single_communicator(), kind, c, DType::f32);
    EXPECT_EQ(r.rows_per_expert, (std::vector<int64_t>{4}));
    EXPECT_EQ(r.x_RD.size(0), 4);
  }
}

TEST(Dispatcher, WorksWhenRanksHoldDifferentNumbersOfExperts) {
  const RoutingCase c{"seven", 7, 2, [](int r) { return 2 + r; },
                      [](int64_t t, int64_t k) { return static_cast<int32_t>((t * 2 + k * 3) % 7); }};
  run_ranks(3, [&](const std::shared_ptr<Communicator>& world) {
    expect_same(run_dispatch(*world, "all_to_all", c, DType::f32),
                run_dispatch(*world, "all_gather", c, DType::f32));
  });
}

// EMP-01: E = 8, EP = 4, 3 tokens on rank 0 only, all routed to its experts 0 and 1: nobody leaves the
// sequence of collectives, in forward or backward, and the numbers are those of one rank.
TEST(Dispatcher, EMP_01_RanksWithoutTokensStayInStep) {
  const RoutingCase c{"emp01", 8, 2, [](int r) { return r == 0 ? 3 : 0; },
                      [](int64_t, int64_t k) { return static_cast<int32_t>(k); }};
  const DispatchResult one = run_dispatch(*make_single_communicator(), "local", c, DType::f32);
  for (const char* kind : {"all_to_all", "all_gather"}) {
    run_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
      for (int step = 0; step < 20; step++) {
        const DispatchResult r = run_dispatch(*world, kind, c, DType::f32);
        EXPECT_EQ(r.x_RD.size(0), world->rank() == 0 ? 6 : 0);
        ASSERT_TRUE(r.dx_TD.defined() && r.dweights_TK.defined()) << "a gradient is zero, not missing";
        if (world->rank() == 0)
          expect_same(r, [&] {
            DispatchResult want = one;
            want.rows_per_expert.resize(2);
            return want;
          }());
      }
    });
  }
}

// EMP-05: one token in all, four ranks.
TEST(Dispatcher, EMP_05_FewerTokensThanRanks) {
  const RoutingCase c{"emp05", 8, 2, [](int r) { return r == 2 ? 1 : 0; },
                      [](int64_t, int64_t k) { return k == 0 ? 7 : 0; }};
  run_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
    const DispatchResult r = run_dispatch(*world, "all_to_all", c, DType::f64);
    expect_same(r, run_dispatch(*world, "all_gather", c, DType::f64));
    EXPECT_EQ(r.x_RD.size(0), world->rank() == 0 || world->rank() == 3 ? 1 : 0);
    for (const double v : r.dx_TD.to_vector<double>()) EXPECT_TRUE(std::isfinite(v) && v != 0);
  });
}

TEST(Dispatcher, TwoLevelsNeedNodesOfEqualSizeInOrder) {
  for (const std::vector<int>& nodes : {std::vector{0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1, 2}}) {
    const std::string message = error_of([&] {
      run_ranks(4, [&](const std::shared_ptr<Communicator>& world) {
        world->traffic().set_nodes(nodes);
        DispatcherRegistry::make({"hierarchical", nullptr}, DispatcherContext{world.get(), 4});
      });
    });
    EXPECT_NE(message.find("node by node, as many on each"), std::string::npos) << message;
  }
}

TEST(Dispatcher, LocalRefusesExpertParallelism) {
  const std::string message = error_of([] {
    run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
      Choice choice;
      choice.kind = "local";
      DispatcherRegistry::make(choice, DispatcherContext{world.get(), 4});
    });
  });
  EXPECT_NE(message.find("local needs ep = 1, got ep = 2; use all_to_all or set ep: 1"), std::string::npos)
      << message;
}

TEST(Dispatcher, RefusesIdsAndTokensThatDoNotFit) {
  for (const char* kind : {"local", "all_gather", "all_to_all"}) {
    Choice choice;
    choice.kind = kind;
    const auto group = make_single_communicator();
    const auto dispatcher = DispatcherRegistry::make(choice, DispatcherContext{group.get(), 4});
    const Tensor x = Tensor::zeros({2, 3}, DType::f32);
    auto dispatch = [&](const std::vector<int32_t>& ids) {
      return error_of([&] {
        dispatcher->dispatch(x, Tensor::from(ids, {static_cast<int64_t>(ids.size()), 1})).wait();
      });
    };
    EXPECT_NE(dispatch({0, 4}).find("expert_ids_TK[1, 0] is 4"), std::string::npos) << kind;
    EXPECT_NE(dispatch({0, 1, 2}), "") << kind;
    EXPECT_NE(error_of([&] { dispatcher->combine(x, x, nullptr).wait(); }).find("got none"),
              std::string::npos);
  }
}

TEST(DispatcherRegistry, HoldsTheKinds) {
  EXPECT_EQ(DispatcherRegistry::instance().names(),
            (std::vector<std::string>{"all_gather", "all_to_all", "hierarchical", "local"}));
}

}  // namespace
}  // namespace shoal
