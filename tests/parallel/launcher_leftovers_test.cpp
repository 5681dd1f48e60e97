// Folders of killed launchers, as Open MPI 4 leaves them; nothing else may be touched.
#include "parallel/launcher_leftovers.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "core/base/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

class LauncherLeftovers : public ::testing::Test {
 protected:
  LauncherLeftovers() {
    std::string pattern = (fs::temp_directory_path() / "shoal-leftovers-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    fs::create_directories(root_ / "shm");
    namespace_ = fs::read_symlink("/proc/self/ns/pid").string();
    setenv("OMPI_MCA_btl_vader_backing_directory", (root_ / "shm").c_str(), 1);
    setenv("PMIX_NAMESPACE", "885194753", 1);
  }
  ~LauncherLeftovers() override {
    for (const char* name :
         {"OMPI_MCA_btl_vader_backing_directory", "PMIX_NAMESPACE", "OMPI_MCA_orte_jobfam_session_dir"})
      unsetenv(name);
    fs::remove_all(root_);
  }

  /// What a Shoal job of this launcher would leave. "" for `space`: no mark, some other program's.
  void launcher(pid_t process, const std::string& space, const std::string& job) {
    const fs::path folder = root_ / "ompi" / str("pid.", process);
    fs::create_directories(folder / "0" / "0");
    if (!space.empty()) std::ofstream(folder / "shoal-job") << space << '\n' << job << '\n';
    for (int rank = 0; rank < 2; rank++)
      std::ofstream(root_ / "shm" / str("vader_segment.host.", geteuid(), '.', job, '.', rank)) << "x";
  }
  static pid_t dead_process() {
    const pid_t child = fork();
    if (child == 0) _exit(0);
    waitpid(child, nullptr, 0);
    return child;
  }
  std::set<std::string> names(const char* folder) const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(root_ / folder))
      found.insert(entry.path().filename().string());
    return found;
  }
  void start_job_of(pid_t process) const {
    const fs::path mine = root_ / "ompi" / str("pid.", process);
    fs::create_directories(mine);
    setenv("OMPI_MCA_orte_jobfam_session_dir", mine.c_str(), 1);
    tidy_launcher_folders();
  }

  fs::path root_;
  std::string namespace_;
};

TEST_F(LauncherLeftovers, FoldersAndSegmentsOfKilledLaunchersOfShoalJobsAreRemoved) {
  const pid_t killed = dead_process();
  launcher(killed, namespace_, "a0001");
  start_job_of(getpid());
  EXPECT_EQ(names("ompi"), std::set<std::string>{str("pid.", getpid())});
  EXPECT_TRUE(names("shm").empty());
  // And this job's are removed once its launcher has been killed; what the mark says is enough.
  launcher(getpid(), "", "34c30001");
  fs::rename(root_ / "ompi" / str("pid.", getpid()), root_ / "ompi" / str("pid.", killed));
  start_job_of(getpid());
  EXPECT_EQ(names("ompi"), std::set<std::string>{str("pid.", getpid())});
  EXPECT_TRUE(names("shm").empty()) << *names("shm").begin();
}

TEST_F(LauncherLeftovers, LivingLaunchersOtherProgramsAndOtherContainersAreLeftAlone) {
  const pid_t killed = dead_process(), other = dead_process();
  launcher(killed, "", "b0001");             // not of a Shoal job
  launcher(other, "pid:[1]", "c0001");       // of another container, where it may live
  launcher(getppid(), namespace_, "d0001");  // lives
  start_job_of(getpid());
  EXPECT_EQ(names("ompi"), (std::set<std::string>{str("pid.", getpid()), str("pid.", getppid()),
                                                  str("pid.", killed), str("pid.", other)}));
  EXPECT_EQ(names("shm").size(), 6U);
}

TEST_F(LauncherLeftovers, DoesNothingWithoutAFolderOfTheLauncher) {
  const pid_t killed = dead_process();
  launcher(killed, namespace_, "a0001");
  tidy_launcher_folders();
  setenv("OMPI_MCA_orte_jobfam_session_dir", (root_ / "ompi" / "jf.1").c_str(), 1);
  tidy_launcher_folders();
  EXPECT_EQ(names("ompi"), std::set<std::string>{str("pid.", killed)});
}

}  // namespace
}  // namespace shoal
