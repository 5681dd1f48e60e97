// The shell scripts, with stand-ins for the system's tools first in PATH.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "core/base/error.h"
#include "tests/support/job.h"

namespace shoal {

namespace {

namespace fs = std::filesystem;

struct Outcome {
  int status = -1;
  std::string output;  // stdout and stderr
};

class Scripts : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / str("shoal scripts ", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "bin");
  }
  void TearDown() override { fs::remove_all(folder_); }

  void stand_in(const std::string& name, const std::string& body) const {
    const fs::path file = folder_ / "bin" / name;
    std::ofstream(file) << "#!/bin/bash\n" << body << "\n";
    fs::permissions(file, fs::perms::owner_all);
  }
  Outcome run(const std::string& command) const {
    const std::string line =
        str("cd '", folder_.string(), "' && PATH=\"$PWD/bin:$PATH\" && ", command, " 2>&1");
    std::FILE* pipe = ::popen(line.c_str(), "r");
    Outcome outcome;
    char buffer[4096];
    while (const size_t size = std::fread(buffer, 1, sizeof buffer, pipe))
      outcome.output.append(buffer, size);
    const int status = ::pclose(pipe);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
  }
  Outcome setup(const std::string& arguments = "") const {
    return run(str("bash '", SHOAL_SOURCE_DIR, "/launch/setup.sh' ", arguments));
  }
  // As on a machine where everything is installed except libonig-dev.
  void pretend_one_is_missing() const {
    stand_in("dpkg-query",
             R"(for p in "${@:3}"; do [[ $p == libonig-dev ]] || echo "installed $p"; done; exit 1)");
  }
  std::string file_text(const fs::path& file) const {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    return text.str();
  }
  // A copy of the scripts in a folder with spaces, and a build that only prints how it is called.
  fs::path pretend_tree() const {
    const fs::path tree = folder_ / "my tree";
    fs::create_directories(tree / "launch");
    for (const char* name : {"quickstart.sh", "common.sh"})
      fs::copy_file(fs::path(SHOAL_SOURCE_DIR) / "launch" / name,
                    tree / "launch" / name);  // with permissions
    std::ofstream(tree / "launch" / "setup.sh") << "#!/bin/bash\n";
    fs::permissions(tree / "launch" / "setup.sh", fs::perms::owner_all);
    stand_in("cmake",
             "mkdir -p build; touch build/build.ninja; echo configured >>configured\n"
             "echo \"CMAKE_HOME_DIRECTORY:INTERNAL=$PWD\" >build/CMakeCache.txt");
    stand_in("ninja",
             "printf '#!/bin/bash\\nprintf shoal; printf \" <%%s>\" \"$@\"; echo\\n' >build/shoal\n"
             "chmod 755 build/shoal");
    stand_in("mpirun", R"([[ $1 != --version ]] || exec echo "mpirun (Open MPI) 4.1"
echo "mpirun $*" | sed 's/ build.*//'
while [[ $# -gt 0 && $1 != build/* ]]; do shift; done
"$@")");
    return tree;
  }
  fs::path folder_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_F(Scripts, SetupListsPackagesAndRefusesUnknownArguments) {
  const auto list = setup("--list");
  EXPECT_EQ(list.status, 0);
  EXPECT_TRUE(contains(list.output, "libopenmpi-dev\n")) << list.output;
  EXPECT_EQ(setup("--unknown").status, 2);
}

TEST_F(Scripts, SetupIsSilentAndNeedsNoRootWhenNothingIsMissing) {
  stand_in("dpkg-query", R"(for p in "${@:3}"; do echo "installed $p"; done)");
  stand_in("apt-get", "echo apt-get was called; exit 9");
  stand_in("id", "echo 1000");
  if (!fs::exists("/usr/share/doc/python3.11/html/_sources"))
    GTEST_SKIP() << "no python3.11-doc on this machine";
  const auto outcome = setup();
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.output, "");
}

TEST_F(Scripts, SetupWithoutRootNamesWhatIsMissingAndTheCommand) {
  pretend_one_is_missing();
  stand_in("apt-get", "echo apt-get was called");
  stand_in("id", "echo 1000");
  const auto outcome = setup();
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(contains(outcome.output, "  libonig-dev")) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "sudo launch/setup.sh"));
  EXPECT_FALSE(contains(outcome.output, "apt-get was called"));
}

TEST_F(Scripts, SetupAsRootInstallsOnlyWhatIsMissing) {
  pretend_one_is_missing();
  stand_in("id", "echo 0");
  stand_in("apt-get", "echo \"$*\" >>calls");
  EXPECT_EQ(setup().status, 0);
  const std::string calls = file_text(folder_ / "calls");
  EXPECT_TRUE(contains(calls, "update")) << calls;
  EXPECT_TRUE(contains(calls, "libonig-dev")) << calls;
  EXPECT_FALSE(contains(calls, "libfmt-dev")) << calls;
}

TEST_F(Scripts, SetupShowsTheLastLinesOfAFailingInstallation) {
  pretend_one_is_missing();
  stand_in("id", "echo 0");
  stand_in("apt-get", "seq 100; echo 'E: no network' >&2; exit 100");
  const auto outcome = setup();
  EXPECT_EQ(outcome.status, 1);
  EXPECT_TRUE(contains(outcome.output, "E: no network"));
  EXPECT_TRUE(contains(outcome.output, "still needed: libonig-dev"));
  EXPECT_FALSE(contains(outcome.output, "  50\n"));
}

TEST_F(Scripts, QuickstartRunsEveryStepFromAnyFolderAndConfiguresOnce) {
  const fs::path tree = pretend_tree();
  const auto outcome = run("'my tree/launch/quickstart.sh' train.steps=5");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  for (const char* text : {"[1/6]", "[6/6]", "shoal <prepare> <configs/quickstart.yaml> <train.steps=5>",
                           "mpirun -n 2", "shoal <train> <configs/quickstart.yaml> <train.steps=5>",
                           "shoal <generate> <runs/quickstart>", "shoal <report> <runs/quickstart>"})
    EXPECT_TRUE(contains(outcome.output, text)) << text << "\n" << outcome.output;
  EXPECT_EQ(run("'my tree/launch/quickstart.sh'").status, 0);
  EXPECT_EQ(file_text(tree / "configured"), "configured\n");
}

TEST_F(Scripts, QuickstartTakesTextFromAnyPathAsAQuotedOverride) {
  pretend_tree();
  std::ofstream(folder_ / "a \"$b\".txt") << "text";
  const auto outcome = run("TEXT='a \"$b\".txt' 'my tree/launch/quickstart.sh'");
  EXPECT_EQ(outcome.status, 0) << outcome.output;
  EXPECT_TRUE(contains(outcome.output, "/a \\\"$$b\\\".txt\"]>")) << outcome.output;
  EXPECT_FALSE(contains(outcome.output, "<runs/quickstart>")) << "another text is another run";
  const auto missing = run("TEXT=nowhere.txt 'my tree/launch/quickstart.sh'");
  EXPECT_EQ(missing.status, 2);
  EXPECT_TRUE(contains(missing.output, "no file or folder 'nowhere.txt'")) << missing.output;
  EXPECT_EQ(run("RANKS=0 'my tree/launch/quickstart.sh'").status, 2);
}

TEST_F(Scripts, QuickstartAnswersCtrlCWithASaveAndCode130) {
  pretend_tree();
  stand_in("mpirun", R"([[ $1 != --version ]] || exec echo "mpirun (Open MPI) 4.1"
trap 'echo saved; exit 0' USR1
trap 'echo ended; exit 1' TERM
trap 'echo killed by Ctrl-C; exit 1' INT
[[ -z $STUBBORN ]] || trap 'touch ../asked' USR1
touch ../training
while true; do sleep 0.02; done)");
  for (const bool stubborn : {false, true}) {
    fs::remove(folder_ / "training");
    testing::Job job({"bash", "-c",
                      str("export PATH=\"$PWD/bin:$PATH\" STUBBORN=", stubborn ? "1" : "",
                          "; exec 'my tree/launch/quickstart.sh'")},
                     folder_);
    ASSERT_TRUE(testing::wait_until([&] { return fs::exists(folder_ / "training"); })) << job.out_so_far();
    job.signal(SIGINT);
    if (stubborn) {  // the second one does not wait for the save
      ASSERT_TRUE(testing::wait_until([&] { return fs::exists(folder_ / "asked"); }));
      job.signal(SIGINT);
    }
    const testing::Ended ended = job.wait();
    EXPECT_EQ(ended.code, stubborn ? 1 : 130) << ended.all();
    EXPECT_TRUE(contains(ended.err, "saving at the end of this step")) << ended.err;
    EXPECT_EQ(contains(ended.out, "the same command goes on"), !stubborn) << ended.out;
    EXPECT_EQ(contains(ended.out, stubborn ? "ended" : "saved"), true) << ended.all();
    EXPECT_FALSE(contains(ended.out, "[5/6]")) << ended.out;
    EXPECT_TRUE(fs::is_empty(folder_ / "tmp")) << "a temporary file was left";
  }
}

TEST_F(Scripts, QuickstartStopsAtTheFirstFailureAndShowsIt) {
  pretend_tree();
  stand_in("cmake", "echo CMake Error: something; exit 1");
  const auto outcome = run("'my tree/launch/quickstart.sh'");
  EXPECT_NE(outcome.status, 0);
  EXPECT_TRUE(contains(outcome.output, "CMake Error: something")) << outcome.output;
  EXPECT_FALSE(contains(outcome.output, "[3/6]"));
}

}  // namespace shoal
