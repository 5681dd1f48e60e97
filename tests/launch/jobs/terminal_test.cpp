// What a user sees who watches a training run in a terminal, and what a file gets.
#include <fcntl.h>
#include <sys/ioctl.h>

#include "tests/launch/jobs/shoal_jobs.h"

namespace shoal::testing {
namespace {

/// Runs a command with a terminal of `columns` columns as its stdout; returns what the terminal got.
std::string shown_in_terminal(const std::vector<std::string>& argv, const std::filesystem::path& folder,
                              int columns, const std::string& kind = "xterm") {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY);
  SHOAL_CHECK(terminal >= 0 && ::grantpt(terminal) == 0 && ::unlockpt(terminal) == 0, "no pseudo terminal");
  const std::string name = ::ptsname(terminal);
  const int user = ::open(name.c_str(), O_RDWR | O_NOCTTY);  // keeps it open until everything is read
  winsize size{24, static_cast<unsigned short>(columns), 0, 0};
  ::ioctl(terminal, TIOCSWINSZ, &size);
  std::string command = "TERM=" + kind;
  for (const std::string& word : argv) command += " '" + word + "'";
  std::string shown;
  Job job({"bash", "-c", command + " >" + name + " 2>&1"}, folder);
  ::fcntl(terminal, F_SETFL, O_NONBLOCK);
  auto drain = [&] {
    char buffer[4096];
    for (ssize_t n = ::read(terminal, buffer, sizeof buffer); n > 0;
         n = ::read(terminal, buffer, sizeof buffer))
      shown.append(buffer, static_cast<size_t>(n));
  };
  const bool ended = wait_until([&] {
    const bool over = job.has_ended();
    drain();
    return over;
  });
  ::close(user);
  ::close(terminal);
  EXPECT_TRUE(ended) << shown;
  EXPECT_EQ(job.wait().code, 0) << shown;
  return shown;
}

/// Text that stays on the screen: what is erased is left out.
std::vector<std::string> lines_that_stay(const std::string& shown) {
  std::vector<std::string> lines;
  std::istringstream in(shown);
  for (std::string line; std::getline(in, line);) {
    while (!line.empty() && line.back() == '\r') line.pop_back();
    const size_t erased = line.rfind("\r\033[K");
    lines.push_back(erased == std::string::npos ? line : line.substr(erased + 4));
  }
  return lines;
}

}  // namespace

TEST(Terminal, ShowsProgressInOneLineThatGoesAway) {
  for (const int ranks : {1, 2}) {
    for (const int columns : {40, 80}) {
      const ShoalFolder folder;
      const std::string shown = shown_in_terminal(
          ShoalFolder::command(ranks, {"train", "tiny.yaml", "run.steps=40", "run.log_every=20"}),
          folder.path(""), columns);
      EXPECT_NE(shown.find("/40 "), std::string::npos) << "no progress line:\n" << shown;
      EXPECT_NE(shown.find("\r\033[K"), std::string::npos) << shown;
      size_t num_tables = 0;
      for (const std::string& line : lines_that_stay(shown)) {
        EXPECT_EQ(line.find("/40 ["), std::string::npos) << line;
        EXPECT_EQ(line.find('\033'), std::string::npos) << line;
        const bool table =
            line.find(" loss ") != std::string::npos && line.find("step ") != std::string::npos;
        if (table && line.find("validation") == std::string::npos) {
          num_tables++;
          EXPECT_LT(line.size(), static_cast<size_t>(columns)) << line;
        }
      }
      EXPECT_EQ(num_tables, 1U) << shown;
    }
  }
}

TEST(Terminal, ThatCannotEraseALineGetsPlainLines) {
  const ShoalFolder folder;
  const std::string shown =
      shown_in_terminal(ShoalFolder::command(1, {"train", "tiny.yaml"}), folder.path(""), 80, "dumb");
  EXPECT_EQ(shown.find('\033'), std::string::npos) << shown;
  EXPECT_EQ(shown.find("/6 "), std::string::npos) << shown;
}

TEST(Terminal, FilesGetPlainLinesAlsoUnderMpirun) {
  const ShoalFolder folder;
  ::setenv("TERM", "xterm", 1);
  const Ended ended = folder.shoal(2, {"train", "tiny.yaml"});
  EXPECT_EQ(ended.code, 0) << ended.all();
  EXPECT_EQ(ended.err, "");
  for (const char c : ended.out) EXPECT_TRUE(c == '\n' || (c >= ' ' && c < 127)) << static_cast<int>(c);
  // Nothing but what Shoal has to say.
  for (const char* label : {"run  ", "model  ", "data  ", "batch  ", "layout  ", "precision  ", "machine  ",
                            "result  ", "time  ", "folder  ", "next  "})
    EXPECT_EQ(count("\n" + ended.out, str("\n", label)), 1) << label << "\n" << ended.out;
}

TEST(Terminal, LinesBeforeAndAfterTheTableFitInto80Columns) {
  const ShoalFolder folder;
  const Ended ended = folder.shoal(2, {"train", "tiny.yaml", "parallel.ep=2"});
  EXPECT_EQ(ended.code, 0) << ended.all();
  std::istringstream lines(ended.out);
  const std::string program = SHOAL_BINARY_DIR "/shoal";  // as it was called, in what to do next
  for (std::string line; std::getline(lines, line);) {
    if (const size_t at = line.find(program); at != std::string::npos)
      line.replace(at, program.size(), "shoal");
    EXPECT_LE(line.size(), 80U) << line;
  }
  EXPECT_NE(ended.out.find(program + " generate runs/tiny"), std::string::npos) << ended.out;
}

}  // namespace shoal::testing
