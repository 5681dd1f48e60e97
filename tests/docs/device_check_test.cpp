// tests/device/run.sh as someone with a GPU runs it, with stand-ins of the tools and programs: what fails, or
// is not there, is in the file with the results of everything else.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/support/job.h"
#include "tests/support/tiny_run.h"

namespace shoal::docs {
namespace {

namespace fs = std::filesystem;
using testing::Ended;
using testing::TemporaryFolder;

constexpr const char* kCard =
    "#!/bin/bash\ncase \"$*\" in *=name*) echo 'NVIDIA H200';; *compute_cap*) echo 9.0;; *) echo 580.1;; "
    "esac\n";
// Puts the programs of the folder `programs` where a build would.
constexpr const char* kNinja = R"(#!/bin/bash
[[ "$*" == *"-C $BUILD shoal cuda_device_test kernel_bench"* ]] || exit 3
mkdir -p "$BUILD/tests/bench"
cd "$(dirname "$0")/../programs"
[[ ! -e shoal ]] || cp shoal "$BUILD/"
[[ ! -e cuda_device_test ]] || cp cuda_device_test "$BUILD/tests/"
[[ ! -e kernel_bench ]] || cp kernel_bench "$BUILD/tests/bench/"
[[ -e shoal && -e cuda_device_test && -e kernel_bench ]]
)";
constexpr const char* kTests = R"(#!/bin/bash
[[ -z ${GTEST_OUTPUT-} ]] || printf '{\n  "tests": 7,\n  "failures": 0,\n}\n' >"${GTEST_OUTPUT#json:}"
)";
constexpr const char* kSanitizer =
    "#!/bin/bash\n[[ $2 != racecheck ]] || { printf 'a \"race\"\\t\\\\\\n'; exit 9; }\n";
// The real program checks the config. The losses in bf16 are far off.
constexpr const char* kShoal = R"(#!/bin/bash
[[ $1 == train ]] || exit 3
arguments=(config "$2" --world 1)
for setting in "${@:3}"; do
  arguments+=("${setting/run.device=cuda/run.device=cpu}")
  case $setting in run.folder=*) folder=${setting#*=} ;; run.name=*) name=${setting#*=} ;; esac
done
"$REAL" "${arguments[@]}" || exit
mkdir -p "$folder/$name"
loss=2.5
[[ $name != cuda-bf16 ]] || loss=2.7
for ((i = 1; i <= 60; i++)); do echo '{"kind":"step","step":'$i',"loss":'$loss',"aux_loss":0}'; done >"$folder/$name/metrics.jsonl"
)";
constexpr const char* kBench = "#!/bin/bash\necho '{\"kernels\": ['\nexit 134\n";

class DeviceCheck : public ::testing::Test {
 protected:
  void tool(const std::string& name, const std::string& text) const {
    const fs::path path = folder_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
    fs::permissions(path, fs::perms::owner_all);
  }
  void all_tools() const {
    tool("bin/nvidia-smi", kCard);
    tool("bin/cmake", "#!/bin/bash\n");
    tool("bin/ninja", kNinja);
    tool("bin/ldconfig", "#!/bin/bash\n");
    tool("bin/compute-sanitizer", kSanitizer);
    tool("programs/shoal", kShoal);
    tool("programs/cuda_device_test", kTests);
    tool("programs/kernel_bench", kBench);
  }
  Ended check() const {
    testing::Job job({"/usr/bin/env", "PATH=" + (folder_ / "bin").string() + ":/usr/bin:/bin",
                      "BUILD=" + (folder_ / "build").string(), str("REAL=", SHOAL_BINARY_DIR, "/shoal"),
                      str(SHOAL_SOURCE_DIR, "/tests/device/run.sh"), (folder_ / "out/result.json").string()},
                     folder_.path());
    return job.wait(60);
  }
  nlohmann::json result() const {
    return nlohmann::json::parse(testing::file_bytes(folder_ / "out/result.json"));
  }
  /// Status by part; null: not run.
  std::map<std::string, nlohmann::json> parts() const {
    std::map<std::string, nlohmann::json> all;
    const nlohmann::json file = result();
    for (const auto& part : file["parts"]) all[part["part"]] = part["status"];
    return all;
  }
  TemporaryFolder folder_;
};

TEST_F(DeviceCheck, APartThatFailsIsInTheFileWithAllOthers) {
  all_tools();
  const Ended ended = check();
  EXPECT_EQ(ended.code, 1) << ended.all();
  const nlohmann::json file = result();
  EXPECT_EQ(file["card"], "NVIDIA H200");
  EXPECT_EQ(file["driver"], "580.1");
  EXPECT_EQ(file["failed_parts"], 3);
  EXPECT_EQ(file["tests"]["tests"], 7);
  EXPECT_TRUE(file["kernels"].is_null()) << "the benchmark died in the middle";
  std::map<std::string, nlohmann::json> want;
  for (const char* passed :
       {"build", "tests", "sanitizer-memcheck", "sanitizer-synccheck", "sanitizer-initcheck", "train-cpu",
        "train-cuda-f32", "losses-f32", "train-cuda-bf16", "profile"})
    want[passed] = 0;
  want["sanitizer-racecheck"] = 9;
  want["losses-bf16"] = 1;
  want["kernels"] = 134;
  want["tests-cudnn"] = want["kernels-cudnn"] = nullptr;
  EXPECT_EQ(parts(), want) << ended.all();
}

TEST_F(DeviceCheck, WhatWasNotBuiltIsLeftOutAndTheRestIsRun) {
  all_tools();
  fs::remove(folder_ / "programs/cuda_device_test");
  tool("build/tests/cuda_device_test", "#!/bin/bash\necho of an earlier build\n");
  const Ended ended = check();
  EXPECT_EQ(ended.code, 1);
  const auto all = parts();
  ASSERT_TRUE(all.contains("losses-f32")) << ended.all();
  EXPECT_EQ(all.at("build"), 1);
  EXPECT_TRUE(all.at("tests").is_null());
  EXPECT_EQ(all.at("losses-f32"), 0);
}

TEST_F(DeviceCheck, WithoutACardNothingIsRun) {
  tool("bin/nvidia-smi", "#!/bin/bash\nexit 9\n");
  const Ended ended = check();
  EXPECT_EQ(ended.code, 1);
  EXPECT_NE(ended.err.find("nvidia-smi finds no GPU here"), std::string::npos) << ended.all();
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

}  // namespace
}  // namespace shoal::docs
