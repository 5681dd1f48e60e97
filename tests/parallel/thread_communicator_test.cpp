#include <atomic>

#include "tests/parallel/communicator_suite.inc"

namespace shoal {
namespace {

using testing::communicator_cases;
using testing::CommunicatorCase;

class EveryCommunicator : public ::testing::TestWithParam<CommunicatorCase> {};

TEST_P(EveryCommunicator, WorksOnASingleRank) {
  GetParam().run(make_single_communicator());
}

TEST_P(EveryCommunicator, WorksOnOneToEightThreads) {
  for (int n = 1; n <= 8; n++) run_ranks(n, GetParam().run);
}

INSTANTIATE_TEST_SUITE_P(Threads, EveryCommunicator, ::testing::ValuesIn(communicator_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

std::string failure_of(int num_ranks, const std::function<void(const std::shared_ptr<Communicator>&)>& fn) {
  try {
    run_ranks(num_ranks, fn);
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RunRanks, MP_01_AThrowingRankWakesTheOthersOutOfTheirCollectives) {
  std::atomic<int> woken{0};
  const std::string message = failure_of(4, [&](const std::shared_ptr<Communicator>& world) {
    SHOAL_CHECK(world->rank() != 2, "expected 8 rows, got 7");
    try {
      world->barrier();
    } catch (const Error&) {
      woken++;
      throw;
    }
  });
  EXPECT_TRUE(contains(message, "rank 2 failed: expected 8 rows, got 7")) << message;
  EXPECT_EQ(woken, 3);
}

TEST(RunRanks, MP_01_AThrowingRankWakesTheOthersOutOfSplitWaitAndSubgroups) {
  for (int where = 0; where < 3; where++) {
    const std::string message = failure_of(4, [&](const std::shared_ptr<Communicator>& world) {
      const auto half = world->split(world->rank() / 2, world->rank(), "half");
      const Tensor x = Tensor::zeros({4}, DType::f32);
      Work work = world->all_reduce(x, ReduceOp::sum);
      work.wait();
      if (world->rank() == 3) throw UsageError("no such file");
      if (where == 0) world->split(0, 0, "never");
      if (where == 1) world->all_reduce(x, ReduceOp::sum).wait();
      if (where == 2) half->sum(int64_t{1});
      world->barrier();
    });
    EXPECT_TRUE(contains(message, "rank 3 failed: no such file")) << message;
  }
}

TEST(RunRanks, KeepsTheExitCodeOfTheFailure) {
  try {
    run_ranks(2, [](const std::shared_ptr<Communicator>&) { throw UsageError("bad key"); });
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ExitCode::usage);
  }
}

TEST(RunRanks, SurvivesWorkThatIsDroppedWhileAnExceptionUnwinds) {
  const std::string message = failure_of(3, [](const std::shared_ptr<Communicator>& world) {
    const Tensor x = Tensor::zeros({100}, DType::f32);
    Work work = world->all_reduce(x, ReduceOp::sum);
    if (world->rank() == 0) throw Error("gone");
    work.wait();
    world->barrier();
  });
  EXPECT_TRUE(contains(message, "rank 0 failed: gone")) << message;
}

TEST(RunRanks, RefusesLessThanOneRank) {
  EXPECT_TRUE(contains(failure_of(0, {}), "expected at least one rank, got 0"));
}

using Fn = std::function<void(Communicator&)>;
std::string mismatch(const Fn& rank0, const Fn& others) {
  return failure_of(
      3, [&](const std::shared_ptr<Communicator>& world) { (world->rank() == 0 ? rank0 : others)(*world); });
}

TEST(ThreadCommunicator, NamesBothCallsWhenRanksDisagree) {
  const Tensor f = Tensor::zeros({6}, DType::f32), d = Tensor::zeros({6}, DType::f64);
  auto reduce = [](DType dtype, int64_t count, ReduceOp op) {
    return [=](Communicator& c) { c.all_reduce(Tensor::zeros({count}, dtype), op).wait(); };
  };
  auto expect_named = [](const std::string& message, const std::string& a, const std::string& b) {
    EXPECT_TRUE(contains(message, "collective calls differ [world, call 0]") && contains(message, a) &&
                contains(message, b) && contains(message, "rank 0 called"))
        << message;
  };
  expect_named(mismatch(reduce(DType::f32, 6, ReduceOp::sum), reduce(DType::f64, 6, ReduceOp::sum)),
               "all_reduce(sum, f32, 6 elements)", "all_reduce(sum, f64, 6 elements)");
  expect_named(mismatch(reduce(DType::f32, 6, ReduceOp::sum), reduce(DType::f32, 5, ReduceOp::sum)),
               "6 elements", "5 elements");
  expect_named(mismatch(reduce(DType::f32, 6, ReduceOp::sum), reduce(DType::f32, 6, ReduceOp::max)), "sum",
               "max");
  expect_named(mismatch(reduce(DType::f32, 6, ReduceOp::sum), [](Communicator& c) { c.barrier(); }),
               "all_reduce", "barrier()");
  auto broadcast = [](int root) {
    return [=](Communicator& c) { c.broadcast(Tensor::zeros({2}, DType::u8), root).wait(); };
  };
  expect_named(mismatch(broadcast(0), broadcast(1)), "root 0", "root 1");
}

TEST(ThreadCommunicator, NamesBothRanksWhenExchangeCountsDoNotFit) {
  const std::string message = failure_of(2, [](const std::shared_ptr<Communicator>& world) {
    const int64_t wrong = world->rank();
    const std::vector<int64_t> send = {1, 1}, recv = {1 + wrong, 1};
    world
        ->all_to_all(Tensor::zeros({2, 3}, DType::f32), Tensor::zeros({2 + wrong, 3}, DType::f32), send, recv)
        .wait();
  });
  EXPECT_TRUE(contains(message, "rank 0 sends 1 rows to rank 1, which expects 2")) << message;
}

TEST(ThreadCommunicator, ReportsRanksThatWaitForEachOther) {
  const std::string crossed = failure_of(2, [](const std::shared_ptr<Communicator>& world) {
    const auto a = world->split(0, 0, "a"), b = world->split(0, 0, "b");
    (world->rank() == 0 ? a : b)->barrier();
    (world->rank() == 0 ? b : a)->barrier();
  });
  EXPECT_TRUE(contains(crossed, "rank 0 is in barrier() [a, call 0], rank 1 is in barrier() [b, call 0]"))
      << crossed;
  const std::string left = failure_of(3, [](const std::shared_ptr<Communicator>& world) {
    if (world->rank() != 1) world->sum(int64_t{1});
  });
  EXPECT_TRUE(contains(left, "rank 1 has returned")) << left;
}

}  // namespace
}  // namespace shoal
