// Files that change under the reader, and locks.
#include "data/file_io.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "core/base/error.h"

namespace shoal {

namespace {

class FileIo : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / str("shoal-file-io-", ::getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const char* name) const { return (folder_ / name).string(); }

  std::filesystem::path folder_;
};

using FileIoDeathTest = FileIo;

/// A plain substring. GoogleTest's own regular expressions hang here under ASan: Oniguruma exports functions
/// with the names of the C library's, and the sanitizer mixes the two.
struct Containing {
  using is_gtest_matcher = void;
  std::string part;
  bool MatchAndExplain(const std::string& text, std::ostream*) const {
    return text.find(part) != std::string::npos;
  }
  void DescribeTo(std::ostream* out) const { *out << "contains \"" << part << '"'; }
  void DescribeNegationTo(std::ostream* out) const { *out << "does not contain \"" << part << '"'; }
};

TEST_F(FileIo, NoPipeIsReplaced) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(write_file(path("pipe"), "x"), UsageError);
  EXPECT_TRUE(std::filesystem::is_fifo(path("pipe")));
}

TEST_F(FileIo, WhatALinkPointsToIsReplaced) {
  write_file(path("target"), "old");
  std::filesystem::create_symlink("target", path("link"));
  write_file(path("link"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(path("link")));
  EXPECT_EQ(read_file(path("target"), 10), "new");
}

}  // namespace

TEST_F(FileIoDeathTest, MappedFileThatBecomesShorterEndsTheProcessWithItsName) {
  const std::string file = path("text.txt");
  std::ofstream(file) << std::string(100000, 'x');
  const auto read_truncated = [&] {
    report_truncated_maps();
    const MappedFile other(path("text.txt")), map(file);
    std::filesystem::resize_file(file, 0);
    const volatile char* byte = map.data() + 50000;
    std::exit(*byte == 'x' ? 3 : 4);
  };
  const ::testing::Matcher<const std::string&> message(Containing{"text.txt: the file became shorter"});
  EXPECT_EXIT(read_truncated(), ::testing::ExitedWithCode(1), message);
}

TEST_F(FileIo, ReleasedMapsAreForgotten) {
  const std::string file = path("text.txt");
  std::ofstream(file) << "abc";
  for (int i = 0; i < 1000; i++) {
    MappedFile map(file), moved(std::move(map));
    ASSERT_EQ(moved.text(), "abc");
  }
}

TEST_F(FileIo, LockIsExclusiveAndFreeAgainAfterwards) {
  const std::string file = path("lock");
  {
    const FileLock held(file, [] {});
    EXPECT_EQ(FileLock::try_lock(file), nullptr);
  }
  const auto again = FileLock::try_lock(file);
  EXPECT_NE(again, nullptr);
  EXPECT_EQ(FileLock::try_lock(file), nullptr);
}

TEST_F(FileIo, WaitingForALockCanBeGivenUp) {
  const FileLock held(path("lock"), [] {});
  int asked = 0;
  const auto give_up = [&] {
    if (++asked == 3) throw Error("no more");
  };
  EXPECT_THROW(FileLock(path("lock"), give_up), Error);
  EXPECT_EQ(asked, 3);
}

TEST_F(FileIo, WhatAKilledWriterLeftBesideAFileIsRemovedAndNothingElse) {
  for (const char* name : {"a.json", "a.json.tmp.12.0", "a.json.tmp.13.7", "ab.json.tmp.12.0", "a.json.tmp"})
    std::ofstream(path(name)) << "x";
  AtomicFile::remove_leftovers(path("a.json"));
  std::set<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(path("")))
    left.insert(entry.path().filename().string());
  EXPECT_EQ(left, (std::set<std::string>{"a.json", "ab.json.tmp.12.0", "a.json.tmp"}));
}

TEST_F(FileIo, LockInAMissingFolderNamesTheFileAndTheReason) {
  try {
    FileLock::try_lock(path("none/lock"));
    FAIL() << "expected an Error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("none/lock: cannot create the lock file: No such file"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace shoal
