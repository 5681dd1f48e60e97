// CUDA kernels mirror those of the CPU, and are written so that the emulator can run them.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>

#include "core/base/error.h"
#include "tests/rules/source_tree.h"

namespace shoal::rules {

namespace {

constexpr const char* kCudaFolder = "core/backend/cuda/";

/// Names of the kernels that a file adds for a device: "add_fwd" in `add_fwd.add(DeviceType::cuda, ...)`.
std::set<std::string> kernels_of(const SourceFile& file, const std::string& device) {
  const std::regex add("(\\w+)\\.add\\(DeviceType::" + device + "\\b");
  std::set<std::string> names;
  for (const std::string& line : file.code) {
    for (std::sregex_iterator it(line.begin(), line.end(), add), end; it != end; ++it) names.insert((*it)[1]);
  }
  return names;
}

/// What a kernel file may not hold, since only one of the two compilers understands it.
std::vector<std::string> portability_violations(const SourceFile& file) {
  static const std::regex kForbidden(
      R"((__shared__|<<<|\basm\b|__CUDACC__|__CUDA_ARCH__|\b(threadIdx|blockDim)\.[yz]|\bcuda[A-Z]\w+))");
  std::vector<std::string> found;
  if (!file.path.starts_with(kCudaFolder) || file.path.starts_with("core/backend/cuda/launch.")) return found;
  const bool host_header = std::any_of(file.code.begin(), file.code.end(), [](const std::string& line) {
    return line.find("<cuda_runtime_api.h>") != std::string::npos;
  });
  if (file.path.ends_with(".cpp") || host_header) return found;  // which neither compiler of kernels sees
  const bool ptx = file.path == "core/backend/cuda/ptx.h";
  std::smatch match;
  for (size_t i = 0; i < file.code.size(); i++) {
    if (std::regex_search(file.code[i], match, kForbidden)) {
      const std::string name = match[1];
      if (ptx && (name == "asm" || name == "__CUDACC__")) continue;
      found.push_back(violation(
          file, i + 1,
          str("'", name, "' belongs into core/backend/cuda/", name == "asm" ? "ptx.h" : "launch.h")));
    }
  }
  return found;
}

}  // namespace

TEST(CudaRules, KernelFilesHaveTheKernelsOfTheirCpuTwins) {
  std::map<std::string, std::set<std::string>> cpu;
  std::set<std::string> in_host_code;  // kernels of libraries
  for (const SourceFile& file : all_sources()) {
    cpu[file.path] = kernels_of(file, "cpu");
    if (file.path.starts_with(kCudaFolder) && file.path.ends_with(".cpp"))
      in_host_code.merge(kernels_of(file, "cuda"));
  }
  size_t num_kernels = 0;
  for (const SourceFile& file : all_sources()) {
    const std::set<std::string> names = kernels_of(file, "cuda");
    if (!file.path.ends_with(".cu") || names.empty()) continue;
    const std::string stem = file.path.substr(std::string(kCudaFolder).size());
    std::set<std::string> twins = cpu["core/backend/cpu/" + stem.substr(0, stem.size() - 3) + ".cpp"];
    for (const std::string& name : in_host_code) twins.erase(name);
    EXPECT_EQ(names, twins) << file.path;
    num_kernels += names.size();
  }
  EXPECT_GE(num_kernels, 30U);
}

TEST(CudaRules, KernelsAreWrittenForBothCompilers) {
  std::vector<std::string> found;
  for (const SourceFile& file : all_sources()) {
    const auto more = portability_violations(file);
    found.insert(found.end(), more.begin(), more.end());
  }
  EXPECT_TRUE(found.empty()) << listing(found);
}

TEST(CudaRules, AViolationIsFoundAndNamed) {
  EXPECT_EQ(portability_violations(make_source("core/backend/cuda/x.cu", "\n__shared__ int a[3];\n")),
            std::vector<std::string>{
                "core/backend/cuda/x.cu:2: '__shared__' belongs into core/backend/cuda/launch.h"});
  const std::string assembly = "asm volatile(\"bar.sync 0;\");\n";
  EXPECT_EQ(portability_violations(make_source("core/backend/cuda/x.cu", assembly)),
            std::vector<std::string>{"core/backend/cuda/x.cu:1: 'asm' belongs into core/backend/cuda/ptx.h"});
  EXPECT_TRUE(portability_violations(make_source("core/backend/cuda/ptx.h", assembly)).empty());
  EXPECT_EQ(portability_violations(make_source("core/backend/cuda/ptx.h", "__shared__ int a;\n")).size(), 1U);
  EXPECT_EQ(portability_violations(make_source("core/backend/cuda/x.cu", "k<<<1, 2>>>();\n")).size(), 1U);
  EXPECT_EQ(portability_violations(make_source("core/backend/cuda/x.h", "cudaMalloc(&p, 3);\n")).size(), 1U);
  EXPECT_TRUE(
      portability_violations(make_source("core/backend/cuda/launch.h", "__shared__ int a;\n")).empty());
  EXPECT_TRUE(portability_violations(make_source("core/backend/cuda/x.cpp", "cudaMalloc(&p, 3);\n")).empty());
  EXPECT_EQ(
      kernels_of(make_source("a.cu", "  a.add(DeviceType::cuda, &f), b.add(DeviceType::cpu, &g),\n"), "cuda"),
      std::set<std::string>{"a"});
}

}  // namespace shoal::rules
