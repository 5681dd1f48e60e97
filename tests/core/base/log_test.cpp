#include "core/base/log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace shoal {

namespace {

// Restores the rank, the console and the rank file after each test.
class Log : public testing::Test {
 protected:
  Log() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() / str("shoal-log-", ::getpid(), "-", info->name());
  }
  ~Log() override {
    log::set_folder("");
    log::set_rank(0, 1);
    log::set_quiet(false);
    log::set_terminal_columns(0);
    std::filesystem::remove_all(folder_);
  }
  // The lines of a rank's file without their time stamps.
  std::string file(int rank) const {
    std::ifstream in(folder_ / "log" / str("rank-", rank, ".log"));
    std::string text;
    for (std::string line; std::getline(in, line);) {
      EXPECT_EQ(line.find_first_not_of("0123456789T:-"), 19U) << "starts with the time: " << line;
      EXPECT_EQ(line.substr(19, 2), "Z ");
      text += line.substr(std::min<size_t>(21, line.size())) + "\n";
    }
    return text;
  }

  std::filesystem::path folder_;
};

}  // namespace

TEST_F(Log, InfoOfRankZeroGoesToStdout) {
  testing::internal::CaptureStdout();
  log::info("step ", 3, ": loss ", 1.5);
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "step 3: loss 1.5\n");
}

TEST_F(Log, OtherRanksKeepInfoOffTheConsole) {
  log::set_rank(1, 2);
  testing::internal::CaptureStdout();
  log::info("hello");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST_F(Log, WarningsOfAnyRankGoToStderrWithTheRank) {
  testing::internal::CaptureStderr();
  log::warn("slow disk");
  log::set_rank(1, 2);
  log::warn("slow disk");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "warning: slow disk\n[rank 1] warning: slow disk\n");
}

TEST_F(Log, AStatusIsReplacedByTheNextLineAndFitsTheTerminal) {
  testing::internal::CaptureStdout();
  log::status("not on a terminal");
  log::set_terminal_columns(8);
  log::status("1234567890");
  log::status("two");
  log::info("line");
  log::info("line");
  log::status("three");
  log::status("");
  log::status("");
  log::set_rank(1, 2);
  log::status("of another rank");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "1234567\r\033[Ktwo\r\033[Kline\nline\nthree\r\033[K");
}

TEST_F(Log, AWarningErasesTheStatusFirst) {
  log::set_terminal_columns(80);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  log::status("step 1");
  log::warn("slow disk");
  log::set_rank(1, 2);
  log::warn("slow disk");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "step 1\r\033[K");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "warning: slow disk\n\r\033[K[rank 1] warning: slow disk\n");
}

TEST_F(Log, QuietSilencesTheConsoleButNotTheFile) {
  log::set_quiet(true);
  log::set_folder(folder_.string());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  log::info("a");
  log::warn("b");
  EXPECT_EQ(testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(file(0), "info a\nwarn b\n");
}

TEST_F(Log, EachRankAppendsToItsOwnFile) {
  log::set_quiet(true);
  log::set_rank(3, 4);
  log::set_folder(folder_.string());
  log::debug("first");
  log::set_folder("");
  log::debug("lost");
  log::set_folder(folder_.string());
  log::debug("second");
  EXPECT_EQ(file(3), "debug first\ndebug second\n");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "log" / "rank-0.log"));
}

TEST_F(Log, RanksAsThreadsHaveTheirOwnRankAndFile) {
  log::set_quiet(true);
  log::set_folder(folder_.string());
  std::thread([&] {
    EXPECT_EQ(log::rank(), 0);
    log::set_rank(1, 2);
    log::set_folder(folder_.string());
    log::info("from one");
  }).join();
  log::info("from zero");
  EXPECT_EQ(log::rank(), 0);
  EXPECT_NE(file(0).find("from zero"), std::string::npos);
  EXPECT_EQ(file(0).find("from one"), std::string::npos);
  EXPECT_NE(file(1).find("from one"), std::string::npos);
}

TEST_F(Log, NamesAFileThatCannotBeOpened) {
  std::ofstream(folder_) << "a file where the folder should be";
  try {
    log::set_folder(folder_.string());
    FAIL() << "expected an Error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(
                  str("log file ", (folder_ / "log/rank-0.log").string(), ": cannot be opened")),
              std::string::npos)
        << e.what();
  }
}

}  // namespace shoal
