#include "core/base/error.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace shoal {

using testing::error_of;

TEST(Str, ConcatenatesAnythingPrintable) {
  EXPECT_EQ(str("a", 1, 'b', 2.5, std::string("c"), true), "a1b2.5c1");
}

TEST(ShoalCheck, PassesWhenTheConditionHolds) {
  int evaluated = 0;
  auto text = [&] {
    evaluated++;
    return "costly";
  };
  EXPECT_NO_THROW(SHOAL_CHECK(1 + 1 == 2, text()));
  EXPECT_EQ(evaluated, 0) << "the message is made only for a failure";
}

TEST(ShoalCheck, NamesTheMessageAndTheSourceLine) {
  const int line = __LINE__ + 1;
  EXPECT_EQ(error_of([] { SHOAL_CHECK(false, "add: expected ", 2, ", got ", 3); }),
            str("add: expected 2, got 3 [tests/core/base/error_test.cpp:", line, "]"));
}

TEST(ShoalCheck, EvaluatesTheConditionOnce) {
  int evaluated = 0;
  SHOAL_CHECK(++evaluated > 0, "never");
  EXPECT_EQ(evaluated, 1);
}

TEST(ShoalCheck, IsOneStatement) {
  bool reached_else = false;
  if (false)
    SHOAL_CHECK(false, "not reached");
  else
    reached_else = true;
  EXPECT_TRUE(reached_else);
}

TEST(Error, CarriesItsExitCode) {
  EXPECT_EQ(Error("x").code(), ExitCode::failure);
  EXPECT_EQ(UsageError("x").code(), ExitCode::usage);
  EXPECT_EQ(Error("x", ExitCode::done).code(), ExitCode::done);
  EXPECT_EQ(static_cast<int>(ExitCode::usage), 2);
  EXPECT_EQ(error_of([] { throw UsageError("bad key"); }), "bad key");
}

TEST(CheckFailed, KeepsTheWholePathOfAFileOutsideTheTree) {
  EXPECT_EQ(error_of([] { detail::check_failed("/elsewhere/x.cpp", 7, "m"); }), "m [/elsewhere/x.cpp:7]");
}

}  // namespace shoal
