// The table of a training run: aligned, as wide as the terminal, without columns that mean nothing.
#include "launch/step_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/base/error.h"

namespace shoal {

namespace {

StepMetrics usual_metrics() {
  StepMetrics m;
  m.step = 12345;
  m.loss = 3.77123;
  m.aux_loss = 0.0123;
  m.z_loss = 4.5e-4;
  m.learning_rate = 2.85e-3;
  m.grad_norm = 1.31;
  m.max_load = 1.46;
  m.dropped = 0.0312;
  m.tokens_per_s = 9712;
  m.tflops = 0.163;
  m.mfu = 0.84;
  return m;
}

StepTableOptions options(int columns, bool everything = true) {
  StepTableOptions o;
  o.steps = 20000;
  o.columns = columns;
  o.moe = o.aux_loss = o.z_loss = o.drops = everything;
  return o;
}

/// Where the words of a line end; headings of several words count as one ("grad norm").
std::vector<size_t> ends_of_cells(std::string line) {
  for (const char* words : {"grad norm", "drop %", "MFU %", "h 02", "2 min", "1 h"}) {
    const size_t at = line.find(words);
    if (at == std::string::npos) continue;
    const size_t space = line.find(' ', at);
    line[space] = '_';
  }
  std::vector<size_t> ends;
  for (size_t i = 0; i < line.size(); i++)
    if (line[i] != ' ' && (i + 1 == line.size() || line[i + 1] == ' ')) ends.push_back(i);
  return ends;
}

StepTable table(int columns, bool everything = true) {
  return StepTable(options(columns, everything));
}

}  // namespace

TEST(StepTable, EveryNumberStandsUnderItsHeading) {
  for (const int columns : {0, 40, 60, 80, 100, 120, 200}) {
    for (const bool everything : {false, true}) {
      const StepTable t = table(columns, everything);
      const std::string header = t.header(), line = t.line(usual_metrics(), 3720);
      EXPECT_EQ(ends_of_cells(header), ends_of_cells(line)) << header << "\n" << line;
      EXPECT_EQ(header.size(), line.size());
    }
  }
}

TEST(StepTable, NarrowTerminalsGetTheMostImportantColumnsOnly) {
  for (const int columns : {1, 20, 30, 40, 60, 80, 100, 120}) {
    const std::string header = table(columns).header();
    EXPECT_TRUE(columns < 20 || header.size() < static_cast<size_t>(columns)) << columns << ": " << header;
    EXPECT_NE(header.find("step"), std::string::npos);
    EXPECT_NE(header.find("loss"), std::string::npos);
  }
  const std::string narrow = table(40).header();
  EXPECT_NE(narrow.find("ETA"), std::string::npos) << narrow;
  EXPECT_NE(narrow.find("tokens/s"), std::string::npos) << narrow;
  EXPECT_EQ(narrow.find("TFLOP/s"), std::string::npos) << narrow;
  for (const char* heading : {"aux", "z", "lr", "grad norm", "max/mean", "drop %", "TFLOP/s", "MFU %"})
    EXPECT_NE(table(0).header().find(heading), std::string::npos) << heading;
}

TEST(StepTable, ColumnsThatMeanNothingForTheModelAreLeftOut) {
  const std::string header = table(0, /*everything=*/false).header();
  for (const char* heading : {"aux", " z", "max/mean", "drop"})
    EXPECT_EQ(header.find(heading), std::string::npos) << header;
  const char* yaml =
      "data: {text: [a.txt]}\nmodel: {hidden_size: 16, heads: 2, moe: {num_experts: 4, top_k: 2}}\n";
  auto header_of = [&](const std::vector<std::string>& overrides) {
    const LoadedConfig loaded = load_train_config_text(yaml, "exp.yaml", overrides, 1);
    return StepTable(step_table_options(loaded.config, 0)).header();
  };
  const std::string plain = header_of({});
  EXPECT_NE(plain.find("max/mean"), std::string::npos) << plain;
  for (const char* heading : {"aux", " z", "drop"})
    EXPECT_EQ(plain.find(heading), std::string::npos) << plain;
  const std::string full = header_of(
      {"model.moe.router.aux_coeff=0.01", "model.moe.router.z_coeff=1e-3", "model.moe.capacity_factor=1.25"});
  for (const char* heading : {"aux", " z", "drop %"})
    EXPECT_NE(full.find(heading), std::string::npos) << full;
  EXPECT_EQ(header_of({"model.moe.num_experts=0"}).find("max/mean"), std::string::npos);
}

TEST(StepTable, UnknownNumbersAreSaidToBeUnknown) {
  StepMetrics m = usual_metrics();
  m.loss = -std::numeric_limits<double>::quiet_NaN();
  const std::string line = table(0).line(m, std::numeric_limits<double>::quiet_NaN());
  EXPECT_NE(line.find(" nan "), std::string::npos) << line;
  EXPECT_EQ(line.find("-nan"), std::string::npos) << line;
  EXPECT_TRUE(line.ends_with(" -")) << line;
}

TEST(StepTable, StatusFitsInItsTerminalAndItsBarGrows) {
  for (const int columns : {20, 40, 60, 80, 200}) {
    size_t filled_before = 0;
    for (const int64_t step : {0, 5000, 10000, 20000}) {
      const std::string status = table(columns).status(step, 9712, 65);
      EXPECT_TRUE(columns < 60 || status.size() < static_cast<size_t>(columns)) << columns << ": " << status;
      EXPECT_NE(status.find("/20000 "), std::string::npos) << status;
      const auto filled = static_cast<size_t>(std::ranges::count(status, '#'));
      EXPECT_GE(filled, filled_before);
      filled_before = filled;
      EXPECT_EQ(columns >= 80 && std::ranges::count(status, '.') > 3, columns >= 80 && step < 20000)
          << status;
    }
    EXPECT_EQ(filled_before > 0, columns >= 80) << "a bar of a few columns would show nothing";
  }
  const std::string status = table(100).status(10000, 9712, 65);
  EXPECT_EQ(status,
            "10000/20000 [####################....................]  50 %  9.71 K tokens/s  ETA 1 min 05 s");
}

}  // namespace shoal
