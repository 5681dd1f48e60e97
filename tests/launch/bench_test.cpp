// shoal bench: every row is there and is a rate. No test asserts a speed.
#include "launch/bench.h"

#include <gtest/gtest.h>

#include <set>

#include "core/base/threads.h"
#include "tests/support/tiny_run.h"

namespace shoal::testing {
namespace {

using nlohmann::json;

BenchOptions tiny_options() {
  BenchOptions options;
  options.seconds = 0;
  options.tokens = 32;
  options.memory = 3 << 12;
  options.parameters = 1000;
  options.message_bytes = {64, 1 << 12};
  options.max_steps = 2;
  return options;
}

void expect_all_rows(const BenchReport& report) {
  std::map<std::string, int> groups;
  std::set<std::string> names;
  for (const BenchRow& row : report.rows) {
    EXPECT_TRUE(row.one_thread > 0 && std::isfinite(row.one_thread)) << row.group << ' ' << row.name;
    EXPECT_TRUE(row.all > 0 && std::isfinite(row.all)) << row.group << ' ' << row.name;
    groups[row.group]++;
    EXPECT_TRUE(names.insert(row.group + row.name).second) << row.name;
  }
  EXPECT_EQ(groups, (std::map<std::string, int>{{"f32", 10}, {"bf16", 10}, {"f64", 10}, {"memory", 5}}));
}

TEST(Bench, OneRankHasARateForEveryTypeAndForMemory) {
  const BenchReport report = bench_machine(tiny_options(), *make_single_communicator());
  expect_all_rows(report);
  EXPECT_TRUE(report.collectives.empty());
  for (const BenchRow& row : report.rows) EXPECT_EQ(row.all, row.one_thread);  // it is the same thing
  const std::string text = report.text();
  for (const char* part : {"1 rank of 1 thread", "f32, GFLOP/s", "bf16, GFLOP/s", "f64, GFLOP/s",
                           "memory, GB/s", "multiply-adds in registers", "triad", "adamw", "100 %"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  EXPECT_EQ(text.find("collectives"), std::string::npos);
}

TEST(Bench, ATeamIsMeasuredAsAWholeAndAsOneThreadAndLeftAsItWas) {
  set_num_threads(2);
  const BenchReport report = bench_machine(tiny_options(), *make_single_communicator());
  EXPECT_EQ(num_threads(), 2);
  set_num_threads(1);
  EXPECT_EQ(report.threads, 2);
  expect_all_rows(report);
}

TEST(Bench, SeveralRanksSumTheirRatesAndMeasureCollectives) {
  run_ranks(3, [](const std::shared_ptr<Communicator>& world) {
    const BenchReport report = bench_machine(tiny_options(), *world);
    expect_all_rows(report);
    ASSERT_EQ(report.collectives.size(), 8U);
    const char* names[] = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"};
    for (size_t i = 0; i < 8; i++) {
      const CollectiveRow& row = report.collectives[i];
      EXPECT_EQ(row.name, names[i % 4]);
      EXPECT_EQ(row.bytes, i < 4 ? 5 * 3 * 4 : 341 * 3 * 4);  // whole elements for every rank
      EXPECT_GT(row.rate(), 0);
    }
    EXPECT_NE(report.text().find("all_to_all"), std::string::npos);
  });
}

TEST(Bench, TheStepOfAConfigIsProfiledOnEveryRankAndNothingIsWritten) {
  TinyRun run;
  const std::string yaml = run.yaml();
  run_ranks(2, [&](const std::shared_ptr<Communicator>& world) {
    const LoadedConfig loaded =
        load_train_config_text(yaml, "tiny.yaml", {"parallel.ep=2", "data.micro_batch=2"}, 2);
    BenchReport report;
    report.step = bench_step(loaded, tiny_options(), world);
    report.step_name = "tiny.yaml";
    EXPECT_GE(report.step->steps, 1);
    EXPECT_LE(report.step->steps, 2);
    EXPECT_EQ(report.step->tokens_per_step, 8 * 16);
    double sum = 0;
    std::set<std::string> names;
    for (const ProfileRow& row : report.step->rows) {
      sum += row.ms;
      names.insert(row.name);
    }
    EXPECT_NEAR(sum, report.step->step_ms, 1e-6 * sum);
    for (const char* name : {"experts up", "exchange", "optimizer", kWaitingRow})
      EXPECT_TRUE(names.contains(name));
    if (world->rank() != 0) return;
    const json parsed = json::parse(report.to_json().dump());
    EXPECT_EQ(parsed.at("step").at("config"), "tiny.yaml");
    EXPECT_GT(parsed.at("step").at("sections").size(), 10U);
    EXPECT_NE(report.text().find("step of tiny.yaml, random tokens\nprofile "), std::string::npos)
        << report.text();
  });
  EXPECT_FALSE(std::filesystem::exists(run.folder / "tiny"));
  EXPECT_FALSE(std::filesystem::exists(run.folder / "data"));
}

TEST(Bench, JsonHasWhatTheTableHas) {
  BenchReport report;
  report.ranks = 2;
  report.rows = {{"f32", "multiply-adds", 100, 180}, {"memory", "read", 20, 30}};
  report.collectives = {{"all_reduce", 1 << 20, 0.001}};
  const json parsed = json::parse(report.to_json().dump());
  EXPECT_EQ(parsed.at("ranks"), 2);
  EXPECT_EQ(parsed.at("rates").at(0).at("all_threads"), 180);
  EXPECT_EQ(parsed.at("rates").at(1).at("unit"), "GB/s");
  EXPECT_DOUBLE_EQ(parsed.at("collectives").at(0).at("gb_per_s"), 1.048576);
  EXPECT_FALSE(parsed.contains("step"));
}

// The ceiling of a row: the longer of its arithmetic and its memory traffic.
TEST(Ceilings, TheShortestTimeIsThatOfTheTighterLimit) {
  const Ceilings c{.flops = 100, .flops_bf16 = 200, .bytes = 10};
  EXPECT_DOUBLE_EQ(c.seconds({.flops = 100, .flops_bf16 = 100, .bytes = 1}), 1.5);
  EXPECT_DOUBLE_EQ(c.seconds({.flops = 100, .bytes = 20}), 2);
  EXPECT_DOUBLE_EQ(c.seconds({}), 0);
  EXPECT_DOUBLE_EQ(Ceilings{}.seconds({.flops = 1}), 0);
  ProfileSummary summary;
  summary.ceilings = c;
  ProfileRow row;
  row.ms = 4000;
  row.cost = {.flops = 100, .bytes = 20};
  EXPECT_DOUBLE_EQ(summary.share_of_ceiling(row), 0.5);
  row.ms = 0;
  EXPECT_EQ(summary.share_of_ceiling(row), 0);
}

TEST(Ceilings, OfThisMachineAreRates) {
  const Ceilings c = measure_ceilings(DType::f32, *make_single_communicator());
  EXPECT_GT(c.flops, 0);
  EXPECT_GT(c.flops_bf16, 0);
  EXPECT_GT(c.bytes, 0);
}

TEST(Bench, RatesAboveTheMultiplyAddsAreSaidToBeDisturbed) {
  BenchReport report;
  report.rows = {{"f32", "multiply-adds in registers", 100, 200}, {"f32", "product", 102, 190}};
  EXPECT_EQ(report.text().find("something else ran"), std::string::npos) << report.text();
  report.rows[1].all = 210;
  EXPECT_NE(report.text().find("something else ran"), std::string::npos) << report.text();
  report.rows = {{"memory", "update", 10, 20}, {"memory", "read", 12, 24}};  // patterns differ by nature
  EXPECT_EQ(report.text().find("something else ran"), std::string::npos) << report.text();
}

}  // namespace
}  // namespace shoal::testing
