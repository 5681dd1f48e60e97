// Runs the tests of CUDA kernels. A test in which TSan reports a race that the test does not expect has
// failed. SHOAL_EMULATOR_BARRIERS=FILE: writes "TEST<tab>KERNEL FILE:LINE" for each barrier to the file: the
// test that executed it first, for tests/cuda/mutate.sh.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>

#include "core/backend/cuda/runtime.h"
#include "tests/cuda/races.h"

namespace shoal::testing {

int& expected_races() {
  static int races = 0;
  return races;
}

namespace {

class Watcher final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestStart(const ::testing::TestInfo&) override { expected_races() = emulator::races(); }

  void OnTestEnd(const ::testing::TestInfo& info) override {
    for (const emulator::Barrier& barrier : emulator::barriers_seen()) {
      if (!seen_.insert(barrier.name()).second) continue;
      if (const char* path = std::getenv("SHOAL_EMULATOR_BARRIERS")) {
        std::ofstream(path, std::ios::app)
            << info.test_suite_name() << '.' << info.name() << '\t' << barrier.name() << '\n';
      }
    }
    EXPECT_EQ(emulator::races(), expected_races()) << "TSan reported races, see above";
  }

 private:
  std::set<std::string> seen_;
};

}  // namespace

}  // namespace shoal::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  shoal::cuda::memory_options().cache = false;  // so that every tensor has guards
  ::testing::UnitTest::GetInstance()->listeners().Append(new shoal::testing::Watcher);
  return RUN_ALL_TESTS();
}
