#include "core/autograd/pending.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace shoal {
namespace {

struct CountingWork final : Work::Impl {
  explicit CountingWork(int* w) : waits(w) {}
  void wait() override { (*waits)++; }
  bool test() override { return *waits > 0; }
  int* waits;
};

Work make_work(int* waits) {
  return Work(std::make_unique<CountingWork>(waits));
}

TEST(Work, WaitsOnceHoweverOftenItIsAsked) {
  int waits = 0;
  {
    Work work = make_work(&waits);
    EXPECT_FALSE(work.test());
    work.wait();
    work.wait();
    EXPECT_TRUE(work.test());
  }
  EXPECT_EQ(waits, 1);
}

TEST(Work, DestructionAndAssignmentWaitForForgottenWork) {
  int first = 0, second = 0;
  {
    Work work = make_work(&first);
    work = make_work(&second);
    EXPECT_EQ(first, 1);
    EXPECT_EQ(second, 0);
  }
  EXPECT_EQ(second, 1);
}

TEST(Work, MovedFromWorkHasNothingToWaitFor) {
  int waits = 0;
  Work a = make_work(&waits);
  Work b = std::move(a);
  a.wait();  // NOLINT(bugprone-use-after-move): a moved-from Work is empty by contract
  EXPECT_EQ(waits, 0);
  b.wait();
  EXPECT_EQ(waits, 1);
  Work empty;
  EXPECT_TRUE(empty.test());
  empty.wait();
}

TEST(Work, IsDroppedWhileAnExceptionUnwinds) {
  int waits = 0;
  try {
    const Work work = make_work(&waits);
    throw std::runtime_error("peer is gone");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(waits, 0);
}

TEST(Pending, RunsItsFinishWhenWaitedFor) {
  int calls = 0;
  Pending<int> pending([&calls] { return ++calls; });
  EXPECT_EQ(calls, 0);
  EXPECT_EQ(std::move(pending).wait(), 1);
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace shoal
