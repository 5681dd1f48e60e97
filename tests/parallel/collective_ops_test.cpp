#include "parallel/collective_ops.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "core/autograd/tape.h"
#include "tests/support/expect_close.h"
#include "tests/support/gradcheck.h"

namespace shoal {
namespace {

using testing::close;
using testing::random_tensor;

/// A tensor that is a leaf, so that its gradient can be read.
struct Input {
  explicit Input(Tensor x) : value(std::move(x)) {
    leaf.grad_dtype = DType::f64;
    value.grad_ref.leaf = &leaf;
  }
  std::vector<double> grad() const { return leaf.grad.to_vector<double>(); }
  Tensor value;
  Leaf leaf;
};

Tensor of_rank(int rank, const Shape& shape, uint64_t seed) {
  return random_tensor(shape, DType::f64, seed * 100 + static_cast<uint64_t>(rank));
}

std::vector<double> sum_over_ranks(int n, const Shape& shape, uint64_t seed) {
  std::vector<double> total(static_cast<size_t>(shape.numel()), 0.0);
  for (int r = 0; r < n; r++) {
    const auto part = of_rank(r, shape, seed).to_vector<double>();
    for (size_t i = 0; i < total.size(); i++) total[i] += part[i];
  }
  return total;
}

template <class Body>
void for_groups(const Body& body) {
  for (const int n : {1, 2, 3, 4}) run_ranks(n, [&](const auto& world) { body(*world); });
}

constexpr testing::Tolerance kExact{1e-14, 1e-14};

TEST(CollectiveOps, CopyToSumsGradientsOfTheRanks) {
  for_groups([](Communicator& group) {
    Tape tape;
    Input x(random_tensor({3, 5}, DType::f64, 1));  // replicated
    const Tensor y = copy_to(x.value, group);
    EXPECT_TRUE(close(y, x.value));
    tape.backward({y}, {of_rank(group.rank(), {3, 5}, 2)});
    EXPECT_TRUE(close(x.grad(), sum_over_ranks(group.size(), {3, 5}, 2), kExact));
  });
}

TEST(CollectiveOps, CopyToDoesNotTouchAGradientThatOthersShare) {
  for_groups([](Communicator& group) {
    Tape tape;
    Input x(random_tensor({4}, DType::f64, 1));
    const Tensor dy = of_rank(group.rank(), {4}, 2), before = dy.clone();
    tape.backward({copy_to(x.value, group)}, {dy});
    EXPECT_EQ(dy.to_vector<double>(), before.to_vector<double>());
  });
}

TEST(CollectiveOps, ReduceFromSumsValuesAndPassesGradients) {
  for_groups([](Communicator& group) {
    Tape tape;
    Input x(of_rank(group.rank(), {2, 3}, 3));
    const Tensor y = reduce_from(x.value, group);
    EXPECT_TRUE(close(testing::to_doubles(y), sum_over_ranks(group.size(), {2, 3}, 3), kExact));
    EXPECT_EQ(x.value.to_vector<double>(), of_rank(group.rank(), {2, 3}, 3).to_vector<double>());
    const Tensor dy = random_tensor({2, 3}, DType::f64, 4);  // replicated
    tape.backward({y}, {dy});
    EXPECT_EQ(x.grad(), dy.to_vector<double>());
  });
}

/// Rows of rank r: equal, or r % 3 (so some ranks have none).
int64_t rows_of(int rank, bool equal) {
  return equal ? 2 : rank % 3;
}

void check_gather(Communicator& group, bool sharded, bool equal) {
  const int n = group.size(), me = group.rank();
  std::vector<double> want;
  int64_t total = 0, begin = 0;
  for (int r = 0; r < n; r++) {
    const auto part = of_rank(r, {rows_of(r, equal), 3}, 5).to_vector<double>();
    want.insert(want.end(), part.begin(), part.end());
    if (r < me) begin += rows_of(r, equal);
    total += rows_of(r, equal);
  }
  Tape tape;
  Input x(of_rank(me, {rows_of(me, equal), 3}, 5));
  const Tensor y = sharded ? gather_sharded(x.value, group) : gather_replicated(x.value, group);
  EXPECT_EQ(y.size(0), total);
  EXPECT_EQ(y.to_vector<double>(), want);
  // Replicated consumers have equal gradients; sharded ones have their own.
  const Tensor dy = of_rank(sharded ? me : 0, {total, 3}, 6);
  tape.backward({y}, {dy});
  std::vector<double> all = sharded ? sum_over_ranks(n, {total, 3}, 6) : dy.to_vector<double>();
  const std::vector<double> own(all.begin() + begin * 3, all.begin() + (begin + rows_of(me, equal)) * 3);
  EXPECT_TRUE(close(x.grad(), own, kExact));
}

TEST(CollectiveOps, GathersWorkWithEqualUnevenAndNoRows) {
  for_groups([](Communicator& group) {
    for (const bool sharded : {false, true}) {
      for (const bool equal : {false, true}) check_gather(group, sharded, equal);
    }
  });
}

TEST(CollectiveOps, ReduceScatterGivesEachRankItsSummedRows) {
  for_groups([](Communicator& group) {
    const int n = group.size(), me = group.rank();
    const Shape whole{2 * n, 3}, part{2, 3};
    Tape tape;
    Input x(of_rank(me, whole, 7));
    const Tensor y = reduce_scatter(x.value, group);
    const auto sums = sum_over_ranks(n, whole, 7);
    EXPECT_TRUE(close(testing::to_doubles(y), {sums.begin() + me * 6, sums.begin() + (me + 1) * 6}, kExact));
    tape.backward({y}, {of_rank(me, part, 8)});
    std::vector<double> want;
    for (int r = 0; r < n; r++) {
      const auto dy = of_rank(r, part, 8).to_vector<double>();
      want.insert(want.end(), dy.begin(), dy.end());
    }
    EXPECT_EQ(x.grad(), want);
  });
}

TEST(CollectiveOps, ReduceScatterRefusesRowsThatDoNotDivide) {
  try {
    run_ranks(2, [](const auto& world) { reduce_scatter(Tensor::zeros({3, 1}, DType::f64), *world); });
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("must divide by the group size 2"), std::string::npos) << e.what();
  }
}

int64_t sent_rows(int from, int to) {
  return (from + 2 * to) % 4;
}

struct ExchangeCase {
  std::vector<int64_t> send, recv;
  int64_t num_sent, num_received;
};
ExchangeCase exchange_case(Communicator& group) {
  ExchangeCase c;
  for (int r = 0; r < group.size(); r++) {
    c.send.push_back(sent_rows(group.rank(), r));
    c.recv.push_back(sent_rows(r, group.rank()));
  }
  c.num_sent = std::accumulate(c.send.begin(), c.send.end(), int64_t{0});
  c.num_received = std::accumulate(c.recv.begin(), c.recv.end(), int64_t{0});
  return c;
}

TEST(CollectiveOps, AllToAllSendsGradientsBackWithCountsSwapped) {
  for_groups([](Communicator& group) {
    const ExchangeCase c = exchange_case(group);
    Tape tape;
    Input x(of_rank(group.rank(), {c.num_sent, 2}, 9));
    const StartedExchange started = all_to_all_start(x.value, group, c.send, c.recv);
    const Tensor between = reduce_from(random_tensor({2}, DType::f64, 1), group);  // overlaps
    const Tensor y = all_to_all_wait(started);
    EXPECT_EQ(y.size(0), c.num_received);
    EXPECT_EQ(between.size(0), 2);
    // The gradient of y is y itself, so what comes back must be x: each row went there and back.
    tape.backward({y}, {y.clone()});
    EXPECT_EQ(x.grad(), x.value.to_vector<double>());
  });
}

/// Calls `reached` when its backward runs.
struct Marker final : Function {
  explicit Marker(std::function<void()> reached) : reached(std::move(reached)) {}
  std::function<void()> reached;
  const char* name() const override { return "marker"; }
  Tensor forward(const Tensor& x) { return x; }
  std::vector<Tensor> backward(const std::vector<Tensor>& dy) override {
    reached();
    return {dy[0]};
  }
};

TEST(CollectiveOps, WorkBetweenStartAndWaitRunsWhileTheReverseExchangeIsOpen) {
  // Rank 0 begins its backward only after rank 1 has come to the work between: that is possible only if
  // wait.backward does not wait for rank 0.
  run_ranks(2, [](const std::shared_ptr<Communicator>& world) {
    const auto order = world->split(0, 0, "order");
    std::vector<std::string> log;
    Tape tape;
    Input x(of_rank(world->rank(), {2, 1}, 1)), other(random_tensor({1}, DType::f64, 2));
    const Tensor before = apply(Marker([&] { log.push_back("before"); }), x.value);
    const StartedExchange started = all_to_all_start(before, *world, {1, 1}, {1, 1});
    const Tensor between = apply(Marker([&] {
                                   log.push_back("between");
                                   if (world->rank() == 1) order->barrier();
                                 }),
                                 other.value);
    const Tensor y = all_to_all_wait(started);
    if (world->rank() == 0) order->barrier();
    tape.backward({y, between}, {y.clone(), random_tensor({1}, DType::f64, 3)});
    EXPECT_EQ(log, (std::vector<std::string>{"between", "before"}));
    EXPECT_EQ(x.grad(), x.value.to_vector<double>());
  });
}

TEST(CollectiveOps, AllToAllWithoutATapeNeedsNoBackward) {
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    const ExchangeCase c = exchange_case(*world);
    const NoGrad no_grad;
    Input x(of_rank(world->rank(), {c.num_sent, 2}, 9));
    const Tensor y = all_to_all_wait(all_to_all_start(x.value, *world, c.send, c.recv));
    EXPECT_FALSE(y.requires_grad());
    EXPECT_EQ(y.size(0), c.num_received);
  });
}

}  // namespace
}  // namespace shoal
