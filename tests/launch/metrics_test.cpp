#include "launch/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/base/error.h"
#include "core/base/log.h"

namespace shoal {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class Metrics : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / str("shoal-metrics-", ::getpid());
    fs::remove_all(folder_);
    file_ = folder_ / "run" / "metrics.jsonl";
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string content() const {
    std::ostringstream text;
    text << std::ifstream(file_, std::ios::binary).rdbuf();
    return text.str();
  }
  std::vector<Json> rows() const {
    std::vector<Json> rows;
    std::istringstream in(content());
    for (std::string line; std::getline(in, line);) rows.push_back(Json::parse(line));
    return rows;
  }
  std::vector<int64_t> steps() const {
    std::vector<int64_t> steps;
    for (const auto& row : rows())
      if (row["kind"] == "step") steps.push_back(row["step"]);
    return steps;
  }
  void add_raw(const std::string& text) const {
    std::ofstream(file_, std::ios::app | std::ios::binary) << text;
  }

  fs::path folder_, file_;
};

StepMetrics step_row(int64_t step) {
  StepMetrics m;
  m.step = step;
  m.tokens = step * 4096;
  m.loss = 10.0 / 3.0 / static_cast<double>(step);
  return m;
}

void train(MetricsWriter& writer, int64_t first, int64_t last) {
  for (int64_t step = first; step <= last; step++) {
    writer.write(step_row(step));
    if (step % 5 == 0) writer.write(EvalMetrics{step, 100, 2.5});
  }
}

}  // namespace

TEST_F(Metrics, NumbersReadBackToTheSameBits) {
  MetricsWriter writer(file_);
  writer.begin(-1);
  StepMetrics m;
  m.step = 7;
  m.tokens = (int64_t{1} << 53) + 1;
  m.loss = 0.1 + 0.2;
  m.aux_loss = std::numeric_limits<double>::denorm_min();
  m.z_loss = -1e300;
  m.learning_rate = 1.0 / 3.0;
  m.peak_bytes = std::numeric_limits<int64_t>::max();
  m.traffic["first and last stage"] = {m.tokens, 5};
  m.layers = {
      {.layer = 3, .counts = {0, 5, int64_t{1} << 60}, .max_vio = 1e-7, .dead = 1, .bias_min = -0.25}};
  writer.write(m);
  const auto read = rows();
  ASSERT_EQ(read.size(), 1U);
  const Json& row = read[0];
  EXPECT_EQ(row["kind"], "step");
  EXPECT_EQ(row["tokens"].get<int64_t>(), m.tokens);
  EXPECT_EQ(row["loss"].get<double>(), m.loss);
  EXPECT_EQ(row["aux_loss"].get<double>(), m.aux_loss);
  EXPECT_EQ(row["z_loss"].get<double>(), m.z_loss);
  EXPECT_EQ(row["learning_rate"].get<double>(), m.learning_rate);
  EXPECT_EQ(row["peak_bytes"].get<int64_t>(), m.peak_bytes);
  EXPECT_EQ(row["traffic"]["first and last stage"]["within_node"].get<int64_t>(), m.tokens);
  EXPECT_EQ(row["traffic"]["first and last stage"]["between_nodes"].get<int64_t>(), 5);
  EXPECT_EQ(row["moe"][0]["layer"], 3);
  EXPECT_EQ(row["moe"][0]["counts"].get<std::vector<int64_t>>(), m.layers[0].counts);
  EXPECT_EQ(row["moe"][0]["max_vio"].get<double>(), 1e-7);
  EXPECT_EQ(row["moe"][0]["dead"], 1);
  EXPECT_EQ(row["moe"][0]["bias_min"].get<double>(), -0.25);
}

TEST_F(Metrics, NotANumberAndInfinityAreNull) {
  MetricsWriter writer(file_);
  writer.begin(-1);
  StepMetrics m = step_row(1);
  m.loss = std::nan("");
  m.grad_norm = std::numeric_limits<double>::infinity();
  writer.write(m);
  writer.write(EvalMetrics{1, 10, 1e4});  // exp(1e4) overflows
  const auto read = rows();
  EXPECT_TRUE(read[0]["loss"].is_null());
  EXPECT_TRUE(read[0]["grad_norm"].is_null());
  EXPECT_EQ(read[1]["loss"], 1e4);
  EXPECT_TRUE(read[1]["perplexity"].is_null());
}

TEST_F(Metrics, RunRowIsFirstAndMustBeAnObject) {
  MetricsWriter writer(file_);
  writer.begin(-1);
  writer.write_run("{\n \"name\": \"a\\nb\", \"world\": 2\n}");
  writer.write(step_row(1));
  ASSERT_EQ(rows().size(), 2U);
  EXPECT_EQ(rows()[0]["kind"], "run");
  EXPECT_EQ(rows()[0]["name"], "a\nb");
  EXPECT_THROW(writer.write_run("[1]"), Error);
  EXPECT_THROW(writer.write_run("{\"a\":"), Error);
  EXPECT_EQ(rows().size(), 2U);
}

TEST_F(Metrics, LG_03_ResumeAfterCrashHasEachStepOnceWithTheUninterruptedValues) {
  MetricsWriter uninterrupted(file_);
  uninterrupted.begin(-1);
  uninterrupted.write_run(R"({"name":"r"})");
  train(uninterrupted, 1, 10);
  const std::string expected = content();

  MetricsWriter first(file_);
  first.begin(-1);
  first.write_run(R"({"name":"r"})");
  train(first, 1, 7);
  add_raw(R"({"kind":"step","step":8,"lo)");  // killed while writing
  MetricsWriter resumed(file_);
  resumed.begin(5);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2, 3, 4, 5}));
  train(resumed, 6, 10);
  EXPECT_EQ(content(), expected);
}

TEST_F(Metrics, LG_03_ResumeKeepsTheEvaluationOfTheCheckpointStep) {
  MetricsWriter writer(file_);
  writer.begin(-1);
  train(writer, 1, 12);
  writer.begin(10);
  EXPECT_EQ(rows().size(), 12U);
  EXPECT_EQ(rows().back()["kind"], "eval");
  EXPECT_EQ(rows().back()["step"], 10);
}

TEST_F(Metrics, LG_03_NewRunReplacesOldRowsAndResumeWithoutAFileStartsOne) {
  MetricsWriter writer(file_);
  writer.begin(40);
  EXPECT_EQ(content(), "");
  train(writer, 1, 3);
  writer.begin(0);
  EXPECT_EQ(content(), "");
  train(writer, 1, 3);
  writer.begin(-1);
  EXPECT_EQ(content(), "");
  EXPECT_EQ(std::distance(fs::directory_iterator(file_.parent_path()), fs::directory_iterator()), 1)
      << "temporary files were left behind";
}

TEST_F(Metrics, BrokenRowsAreCut) {
  MetricsWriter writer(file_);
  writer.begin(-1);
  writer.write(step_row(1));
  add_raw("not json\n\n[1]\n{\"step\":1}\n{\"kind\":\"step\",\"step\":\"1\"}\n{\"kind\":\"step\"}\n");
  add_raw(std::string("\0\0\0\n", 4));
  writer.write(step_row(2));
  // Complete as JSON, but without its line end it may still be torn: {"step":1 of {"step":12.
  add_raw(R"({"kind":"step","step":3})");
  writer.begin(9);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(rows().size(), 2U);
}

TEST_F(Metrics, UnwritableFolderIsAnErrorThatNamesTheFile) {
  fs::create_directories(folder_);
  std::ofstream(folder_ / "run") << "a file, no folder";
  MetricsWriter writer(file_);
  try {
    writer.begin(-1);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("metrics.jsonl"), std::string::npos) << error.what();
  }
}

TEST_F(Metrics, FullDiskLosesARowButNeitherTheRunNorTheRowsAround) {
  MetricsWriter writer(file_);
  writer.begin(-1);
  writer.write(step_row(1));
  log::set_quiet(true);
  // A file size limit in the middle of the next row makes write() fall short, as a full disk does.
  rlimit old{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit tight = old;
  tight.rlim_cur = fs::file_size(file_) + 20;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &tight), 0);
  writer.write(step_row(2));
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, old_handler);
  log::set_quiet(false);
  writer.write(step_row(3));
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(writer.num_lost_rows(), 1);
}

TEST(TrafficText, NamesTheGroupsWithMostAndTheOthersTogether) {
  EXPECT_EQ(traffic_text({}), "");
  EXPECT_EQ(traffic_text({{"dp", {0, 0}}}), "");
  EXPECT_EQ(traffic_text({{"dp", {100, 24}}, {"ep", {512, 0}}}),
            "636 B (ep 512 B, dp 124 B), 24 B between nodes");
  EXPECT_EQ(traffic_text(
                {{"a", {1, 0}}, {"b", {2, 0}}, {"c", {3, 0}}, {"d", {0, 4}}, {"e", {5, 0}}, {"f", {6, 1}}}),
            "22 B (f 7 B, e 5 B, d 4 B, c 3 B, others 3 B), 5 B between nodes");
}

}  // namespace shoal
