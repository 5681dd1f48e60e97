#include "launch/checkpoint_format.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "launch/crc32c.h"

namespace shoal {

namespace {

Manifest example() {
  Manifest m;
  m.step = 20;
  m.world = 2;
  const auto file = [](const char* name, int64_t bytes, std::vector<uint32_t> blocks, int64_t last) {
    uint32_t crc = 0;
    for (size_t b = 0; b < blocks.size(); b++)
      crc = crc32c_combine(crc, blocks[b], static_cast<uint64_t>(b + 1 < blocks.size() ? kBlockBytes : last));
    return FileRecord{name, bytes, crc, blocks};
  };
  m.files = {file("w0000.h5", kBlockBytes + 100, {0x12345678U, 0x9ABCDEF0U}, 100),
             file("w0001.h5", 500, {5}, 500), file("state.json", 3, {1}, 3), file("config.yaml", 0, {}, 0)};
  m.tensors = {{"optim/m/a",
                DType::f32,
                {4, 3},
                {{"w0000.h5", 64, 24, {{0, 0}, {2, 3}}, 7}, {"w0001.h5", 16, 24, {{2, 0}, {2, 3}}, 8}}},
               {"model/s", DType::i64, {}, {{"w0001.h5", 40, 8, {{}, {}}, 9}}},
               {"model/e", DType::u8, {0, 2}, {}}};
  m.sort();
  return m;
}

// The example with one JSON change and a right checksum.
std::string problem_after(const std::function<void(nlohmann::json&)>& change) {
  std::string text = manifest_text(example());
  auto root = nlohmann::json::parse(text.substr(0, text.size() - 16));
  change(root);
  text = root.dump() + "\n";
  char tail[24];
  std::snprintf(tail, sizeof tail, "crc32c %08x\n", crc32c(text));
  return parse_manifest(text + tail).problem;
}

void expect_problem(const std::string& expected, const std::function<void(nlohmann::json&)>& change) {
  const std::string problem = problem_after(change);
  EXPECT_NE(problem.find(expected), std::string::npos) << problem;
}

}  // namespace

TEST(CheckpointFormat, TheManifestReadsBackTheSame) {
  const std::string text = manifest_text(example());
  const ManifestResult result = parse_manifest(text);
  EXPECT_EQ(result.problem, "");
  EXPECT_EQ(manifest_text(result.manifest), text);
  EXPECT_EQ(result.manifest.step, 20);
  EXPECT_EQ(result.manifest.find_tensor("optim/m/a")->pieces[1].box, (Box{{2, 0}, {2, 3}}));
  EXPECT_EQ(result.manifest.find_tensor("nothing"), nullptr);
  EXPECT_EQ(problem_after([](auto&) {}), "");
}

TEST(CheckpointFormat, EveryBitFlipOfTheManifestIsDetected) {
  std::string text = manifest_text(example());
  for (size_t bit = 0; bit < text.size() * 8; bit++) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(parse_manifest(text).problem, "") << "bit " << bit;
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << bit % 8));
  }
  EXPECT_EQ(parse_manifest(text).problem, "");
}

TEST(CheckpointFormat, EveryTruncationAndAppendedBytesAreDetected) {
  const std::string text = manifest_text(example());
  for (size_t bytes = 0; bytes < text.size(); bytes++)
    EXPECT_NE(parse_manifest(std::string_view(text).substr(0, bytes)).problem, "") << bytes;
  EXPECT_NE(parse_manifest(text + "\n").problem, "");
  EXPECT_NE(parse_manifest(text + std::string(1, '\0')).problem, "");
  EXPECT_NE(parse_manifest(text + text).problem, "");
}

TEST(CheckpointFormat, AnUnknownVersionIsToldApartFromDamage) {
  std::string text = manifest_text(example());
  const size_t at = text.find("\"version\":1");
  text.replace(at, 11, "\"version\":7");
  EXPECT_EQ(parse_manifest(text).newer_version, -1);  // the checksum does not hold
  text.resize(text.size() - 16);
  char tail[24];
  std::snprintf(tail, sizeof tail, "crc32c %08x\n", crc32c(text));
  const ManifestResult result = parse_manifest(text + tail);
  EXPECT_EQ(result.newer_version, 7);
  EXPECT_EQ(result.problem, "MANIFEST.json: format version 7, this program reads version 1");
}

TEST(CheckpointFormat, SizesOffsetsAndShapesAreCheckedAgainstEachOther) {
  // tensors: 0 model/e, 1 model/s, 2 optim/m/a; files: 0 config.yaml, 1 state.json, 2 w0000.h5, 3 w0001.h5
  expect_problem("ends behind the end of w0001.h5",
                 [](auto& r) { r["tensors"][1]["pieces"][0]["offset"] = 493; });
  expect_problem("ends behind the end of w0001.h5",
                 [](auto& r) { r["tensors"][1]["pieces"][0]["offset"] = INT64_MAX; });
  expect_problem("expected an integer >= 0", [](auto& r) { r["tensors"][1]["pieces"][0]["offset"] = -8; });
  expect_problem("of i64 has 9 bytes", [](auto& r) { r["tensors"][1]["pieces"][0]["bytes"] = 9; });
  expect_problem("rows [2, 4) of dimension 0 are missing",
                 [](auto& r) { r["tensors"][2]["pieces"].erase(1); });
  expect_problem("are stored twice",
                 [](auto& r) { r["tensors"][2]["pieces"].push_back(r["tensors"][2]["pieces"][1]); });
  expect_problem("outside of shape", [](auto& r) { r["tensors"][2]["shape"] = {2, 3}; });
  expect_problem("too many elements", [](auto& r) {
    r["tensors"][2]["shape"] = {int64_t{1} << 40, int64_t{1} << 40};
  });
  expect_problem("too many elements", [](auto& r) {
    r["tensors"][0]["shape"] = {0, int64_t{1} << 40, int64_t{1} << 40};
  });
  expect_problem("at most 6 sizes", [](auto& r) { r["tensors"][2]["shape"] = {1, 1, 1, 1, 1, 1, 1}; });
  expect_problem("2 blocks, got 1", [](auto& r) { r["files"][2]["blocks"].erase(1); });
  expect_problem("do not give its checksum", [](auto& r) { r["files"][2]["blocks"][0] = "00000000"; });
  expect_problem("block_bytes", [](auto& r) { r["block_bytes"] = 4096; });
}

TEST(CheckpointFormat, NamesFromFilesNeverBecomePaths) {
  for (const char* name : {"../w0001.h5", "/etc/passwd", "a/b", "..", ".", "", "w 1.h5"})
    expect_problem("expected [A-Za-z0-9._-]+", [name](auto& r) { r["files"][0]["name"] = name; });
  for (const char* name : {"/model/a", "model//a", "model/../a", "model/", "", "model/a b"})
    EXPECT_FALSE(is_tensor_name(name)) << name;
  EXPECT_TRUE(is_tensor_name("model/layers.0.qkv.weight"));
  expect_problem("not in the list of files",
                 [](auto& r) { r["tensors"][1]["pieces"][0]["file"] = "w0002.h5"; });
  expect_problem("not sorted and unique", [](auto& r) { r["tensors"][1]["name"] = "optim/m/a"; });
  expect_problem("not sorted and unique", [](auto& r) { r["files"][3]["name"] = "w0000.h5"; });
  expect_problem("unknown dtype", [](auto& r) { r["tensors"][1]["dtype"] = "f17"; });
}

TEST(CheckpointFormat, MissingAndMistypedFieldsAreProblemsNotCrashes) {
  for (const char* key : {"block_bytes", "files", "format", "step", "tensors", "version", "world"}) {
    EXPECT_NE(problem_after([key](auto& r) { r.erase(key); }), "") << key;
    EXPECT_NE(problem_after([key](auto& r) { r[key] = nullptr; }), "") << key;
    EXPECT_NE(problem_after([key](auto& r) { r[key] = {1, "x"}; }), "") << key;
  }
  for (const char* key : {"name", "dtype", "shape", "pieces"})
    EXPECT_NE(problem_after([key](auto& r) { r["tensors"][2].erase(key); }), "") << key;
  for (const char* key : {"file", "offset", "bytes", "start", "extent", "crc32c"})
    EXPECT_NE(problem_after([key](auto& r) { r["tensors"][2]["pieces"][0].erase(key); }), "") << key;
  expect_problem("state.json is not in the list of files", [](auto& r) { r["files"].erase(1); });
  EXPECT_NE(problem_after([](auto& r) { r = nlohmann::json::array(); }), "");
}

TEST(CheckpointFormat, StepNamesAreOrderedByNumberAndOnlyExactNamesCount) {
  EXPECT_EQ(step_name(1000), "step-000001000");
  EXPECT_EQ(step_name(12345678901), "step-12345678901");
  for (const int64_t step : {int64_t{0}, int64_t{9}, int64_t{999999999}, int64_t{1000000000}})
    EXPECT_EQ(step_of_name(step_name(step)), step);
  for (const char* name : {"step-10", "step-000000010.bad-1", "step-000000010.tmp-ab", "step-00000001x",
                           "latest", "step-", "step-0000000010", "step-9999999999999999999"})
    EXPECT_EQ(step_of_name(name), std::nullopt) << name;
}

}  // namespace shoal
