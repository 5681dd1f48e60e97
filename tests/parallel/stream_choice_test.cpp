#include "parallel/stream_choice.h"

#include <gtest/gtest.h>

namespace shoal {
namespace {

constexpr int64_t kBytes = 100000;
constexpr std::chrono::nanoseconds kFast{10000}, kSlow{50000};

TEST(StreamChoice, StreamsForAWhileAfterSeveralSlowCopiesInARow) {
  StreamChoice choice;
  for (int i = 0; i < 20; i++) {
    choice.note(kBytes, kSlow);
    choice.note(kBytes, kSlow);
    EXPECT_FALSE(choice.streams()) << "an interruption is not a rule";
    choice.note(kBytes, kFast);
  }
  for (int i = 0; i < StreamChoice::kSlowCopies; i++) choice.note(kBytes, kSlow);
  for (int i = 0; i < StreamChoice::kStreamedCopies; i++) {
    EXPECT_TRUE(choice.streams());
    choice.note(kBytes, kFast);
  }
  EXPECT_FALSE(choice.streams()) << "ordinary stores are tried again";
}

TEST(StreamChoice, SmallCopiesSayNothing) {
  StreamChoice choice;
  for (int i = 0; i < 20; i++) choice.note(StreamChoice::kMeasurableBytes - 1, kSlow * 1000);
  EXPECT_FALSE(choice.streams());
}

}  // namespace
}  // namespace shoal
