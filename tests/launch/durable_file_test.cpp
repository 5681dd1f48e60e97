#include "launch/durable_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>

#include "tests/launch/checkpoint_support.h"
#include "tests/support/error_of.h"

namespace shoal {

namespace fs = std::filesystem;
using test::TempFolder;

using testing::error_of;

TEST(DurableFile, WhatIsWrittenIsReadBack) {
  const TempFolder folder;
  DurableFile file = DurableFile::create(folder / "a");
  file.reserve(10);
  EXPECT_EQ(file.size(), 10);
  file.write_at("world", 5, 5);
  file.write_at("hello", 5, 0);
  file.sync();
  std::string text(7, ' ');
  file.read_at(text.data(), 7, 2);
  EXPECT_EQ(text, "lloworl");
  file.close();
  EXPECT_EQ(read_file(folder / "a", 10), "helloworld");
}

TEST(DurableFile, ReadingBehindTheEndNamesTheOffset) {
  const TempFolder folder;
  test::write_all(folder / "a", "12345");
  const DurableFile file = DurableFile::open(folder / "a");
  char buffer[8];
  EXPECT_EQ(error_of([&] { file.read_at(buffer, 4, 3); }),
            (folder / "a").string() + ": ends at offset 5, expected 2 more bytes");
}

TEST(DurableFile, CreateRefusesAnExistingFileAndASymbolicLink) {
  const TempFolder folder;
  test::write_all(folder / "a", "x");
  fs::create_symlink("elsewhere", folder / "link");
  for (const char* name : {"a", "link"}) {
    const std::string text = error_of([&] { DurableFile::create(folder / name); });
    EXPECT_EQ(text, (folder / name).string() + ": cannot create: File exists (errno 17)");
  }
  EXPECT_FALSE(fs::exists(folder / "elsewhere"));
}

TEST(DurableFile, OpenRefusesLinksDirectoriesAndPipes) {
  const TempFolder folder;
  test::write_all(folder / "a", "x");
  fs::create_symlink("a", folder / "link");
  fs::create_directory(folder / "sub");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { DurableFile::open(folder / "link"); }).find("(errno 40)"), std::string::npos);
  EXPECT_NE(error_of([&] { DurableFile::open(folder / "sub"); }).find("not a regular file"),
            std::string::npos);
  EXPECT_NE(error_of([&] { DurableFile::open(folder / "pipe"); }).find("not a regular file"),
            std::string::npos);
  EXPECT_NE(error_of([&] { DurableFile::open(folder / "none"); }).find("(errno 2)"), std::string::npos);
}

TEST(DurableFile, ReadFileRefusesMoreThanTheLimitBeforeAllocating) {
  const TempFolder folder;
  test::write_all(folder / "a", "");
  fs::resize_file(folder / "a", uintmax_t{1} << 40);  // a hole
  EXPECT_EQ(error_of([&] { read_file(folder / "a", 1000); }),
            (folder / "a").string() + ": expected at most 1000 bytes, got 1099511627776");
}

TEST(DurableFile, RenameNewNeverReplaces) {
  const TempFolder folder;
  fs::create_directory(folder / "from");
  fs::create_directory(folder / "to");
  try {
    rename_new(folder / "from", folder / "to");
    FAIL() << "an empty directory was replaced";
  } catch (const FileError& error) {
    EXPECT_EQ(error.number(), EEXIST);
  }
  fs::remove(folder / "to");
  rename_new(folder / "from", folder / "to");
  sync_directory(folder.path());
  EXPECT_EQ(test::names_in(folder.path()), std::set<std::string>{"to"});
}

TEST(DurableFile, AFullDiskIsReportedWithPathNeededAndFreeBytes) {
  const TempFolder folder;
  const std::string text = FileError(folder / "a", "write", ENOSPC, 12345).what();
  EXPECT_EQ(text.find((folder / "a").string() + ": cannot write: No space left on device (errno 28); needed "
                                                "12345 bytes; free "),
            0U)
      << text;
}

TEST(DurableFile, AFileSizeLimitIsAnErrorOfReserveAndOfWrite) {
  const TempFolder folder;
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit{4096, 4096};
    std::signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string bytes(8192, 'x');
    const auto number = [](const std::function<void()>& work) {
      try {
        work();
      } catch (const FileError& error) {
        return error.number();
      }
      return 0;
    };
    DurableFile file = DurableFile::create(folder / "a");
    if (number([&] { file.reserve(8192); }) != EFBIG) _exit(1);
    // The write stops after 4096 bytes, and the rest fails.
    if (number([&] { file.write_at(bytes.data(), 8192, 0); }) != EFBIG) _exit(2);
    if (file.size() != 4096) _exit(3);
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace shoal
