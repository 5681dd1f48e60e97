// How many instructions two steps of a tiny model execute, by valgrind's callgrind, against a stored number:
// what makes a step longer is seen on any machine, however loaded. A change that is meant updates the number,
// with its reason in the commit.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <regex>
#include <string>

namespace {

struct Outcome {
  int status = 0;
  std::string output;
};

Outcome run(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return {-1, "popen failed"};
  std::array<char, 4096> buffer{};
  for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    outcome.output.append(buffer.data(), n);
  outcome.status = pclose(pipe);
  return outcome;
}

/// Instructions inside TrainEngine::step, all calls included; 0 and a failure when valgrind cannot say.
int64_t count_instructions(const std::string& precision) {
  const auto file = std::filesystem::temp_directory_path() / ("shoal-callgrind-" + std::to_string(getpid()));
  const Outcome outcome =
      run("SHOAL_CPU_ISA=avx2 SHOAL_GEMM=tiled OMP_NUM_THREADS=1 valgrind --tool=callgrind "
          "--toggle-collect='shoal::TrainEngine::step*' --callgrind-out-file='" +
          file.string() + "' " + TINY_STEP + " " + precision);
  std::filesystem::remove(file);
  std::smatch collected;
  if (outcome.status != 0 ||
      !std::regex_search(outcome.output, collected, std::regex("Collected : ([0-9]+)"))) {
    ADD_FAILURE() << "valgrind ended with status " << outcome.status << ":\n" << outcome.output;
    return 0;
  }
  return std::stoll(collected[1]);
}

class Instructions : public ::testing::Test {
 protected:
  void SetUp() override {
#if !defined(__x86_64__) || !defined(__GNUC__) || __GNUC__ != 12 || !defined(NDEBUG)
    GTEST_SKIP() << "the stored numbers are of g++ 12 on x86-64 in a Release build";
#endif
    if (!__builtin_cpu_supports("avx2"))
      GTEST_SKIP() << "the stored numbers are of the AVX2 kernels; this CPU has none";
    if (run("valgrind --version").status != 0)
      GTEST_SKIP() << "valgrind is not installed (launch/setup.sh installs it)";
  }
};

// 2 %: the C library takes other paths on other CPUs.
void expect_count(const std::string& precision, double stored) {
  const auto counted = static_cast<double>(count_instructions(precision));
  std::printf("%s: %.0f instructions\n", precision.c_str(), counted);
  EXPECT_LT(std::abs(counted / stored - 1), 0.02)
      << precision << ": two steps take " << static_cast<int64_t>(counted) << " instructions, stored are "
      << static_cast<int64_t>(stored) << " (" << 100 * (counted / stored - 1)
      << " %); if that is meant, store the new number here and give the reason in the commit";
}

TEST_F(Instructions, OfTwoStepsInF32AreAsStored) {
  expect_count("f32", 17.82e6);
}
TEST_F(Instructions, OfTwoStepsInBf16AreAsStored) {
  expect_count("bf16", 47.51e6);
}

}  // namespace
