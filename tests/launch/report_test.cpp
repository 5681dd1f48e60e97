#include "launch/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <regex>
#include <sstream>

#include "core/base/error.h"
#include "launch/metrics.h"
#include "launch/svg_chart.h"
#include "tests/launch/report_example.h"

namespace shoal {

namespace {

namespace fs = std::filesystem;
using testing::ExampleRun;
using testing::write_example_run;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) count++;
  return count;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A tag at page[at] == '<': its name ("/b" for an end tag) and where it ends; an empty name when it is
// malformed. By hand, since std::regex recurses per character of the long drawing attributes.
struct Tag {
  std::string name;
  size_t end = 0;
  bool self_closing = false;
};
Tag parse_tag(const std::string& page, size_t at) {
  auto is_name = [&](size_t i) {
    return i < page.size() && (std::isalnum(page[i]) || page[i] == '-' || page[i] == '_');
  };
  size_t i = at + 1;
  if (page[i] == '/') i++;
  while (is_name(i)) i++;
  Tag tag{page.substr(at + 1, i - at - 1)};
  while (i < page.size() && page[i] == ' ') {
    while (page[i] == ' ') i++;
    while (is_name(i)) i++;
    if (page.compare(i, 2, "=\"") != 0) continue;
    const size_t quote = page.find('"', i + 2);
    if (quote == std::string::npos || page.find_first_of("<>", i) < quote) return {};
    i = quote + 1;
  }
  if (page[i] == '/') tag.self_closing = true, i++;
  if (page[i] != '>') return {};
  tag.end = i + 1;
  return tag;
}

// The first wrongly nested or unescaped place of a page, or "".
std::string nesting_problem(const std::string& page) {
  std::vector<std::string> open;
  for (size_t at = page.find('<'); at != std::string::npos; at = page.find('<', at)) {
    if (page.compare(at, 2, "<!") == 0) {
      at++;
      continue;
    }
    const Tag tag = parse_tag(page, at);
    if (tag.name.empty()) return "no tag: " + page.substr(at, 60);
    at = tag.end;
    if (tag.name[0] == '/') {
      if (open.empty() || "/" + open.back() != tag.name)
        return "<" + tag.name + "> closes " + (open.empty() ? "nothing" : open.back());
      open.pop_back();
    } else if (!tag.self_closing && tag.name != "meta") {
      open.push_back(tag.name);
      if (tag.name == "script" || tag.name == "style") at = page.find("</" + tag.name + ">", at);
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is not closed";
}

class Report : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) / str("shoal-report-", ::getpid());
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path add_file(const std::string& name, const std::string& content) const {
    fs::create_directories(folder_ / name);
    std::ofstream(folder_ / name / "metrics.jsonl", std::ios::binary) << content;
    return folder_ / name;
  }
  fs::path folder_;
};

std::string expect_usage_error(const std::vector<fs::path>& runs) {
  try {
    render_report(runs);
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no UsageError";
  return "";
}

}  // namespace

TEST_F(Report, OnePageNamesAllRunsAndDrawsEachChart) {
  write_example_run(folder_ / "a", {.name = "balanced", .num_steps = 300, .num_layers = 2});
  write_example_run(folder_ / "b",
                    {.name = "starving", .seed = 2, .num_steps = 200, .balanced = false, .drop_share = 0.1});
  const auto page = render_report({folder_ / "a", folder_ / "b"});
  EXPECT_EQ(nesting_problem(page), "");
  for (const char* text :
       {"balanced", "starving", "held-out text", "Gradient norm", "Learning rate", "Throughput",
        "Model FLOPs utilisation", "Balancing loss", "Fullest expert", "Dropped assignments",
        "Router entropy", "MaxVio", "Router bias", "What differs in the configs", "21.40 M", "9.20 M"})
    EXPECT_TRUE(contains(page, text)) << text;
  EXPECT_EQ(count_of(page, ">Expert load, layer "), 5U);
  EXPECT_FALSE(contains(page, "Router z-loss")) << "a quantity that is zero throughout has no chart";
  EXPECT_FALSE(contains(page, "nan")) << "NaN leaked into the drawing";
}

TEST(NestingProblem, FindsWhatIsWrong) {
  EXPECT_EQ(nesting_problem("<!DOCTYPE html><p class=\"a b\">x<br/></p>"), "");
  EXPECT_EQ(nesting_problem("<b><i></b></i>"), "</b> closes i");
  EXPECT_EQ(nesting_problem("<b>"), "<b> is not closed");
  EXPECT_EQ(nesting_problem("a < b"), "no tag: < b");
  EXPECT_EQ(nesting_problem("<p title=\"<\">x</p>"), "no tag: <p title=\"<\">x</p>");
}

TEST_F(Report, PageLoadsNothingFromElsewhere) {
  write_example_run(folder_ / "a", {.num_steps = 20});
  const auto page = render_report({folder_ / "a"});
  for (const char* load : {"src=", "href=", "@import", "url(", "fetch(", "https://"})
    EXPECT_FALSE(contains(page, load)) << load;
  EXPECT_EQ(count_of(page, "http://"), count_of(page, "http://www.w3.org/2000/svg"))
      << "an address other than the SVG namespace";
}

TEST_F(Report, NamesAndConfigsAreEscaped) {
  const auto run = add_file(
      "x", R"({"kind":"run","name":"<b>\"a\" & 'b'</b><script>alert(1)</script>","config":{"<k>":"<v>"}})"
           "\n{\"kind\":\"step\",\"step\":1,\"loss\":2.5}\n");
  const auto page = render_report({run});
  EXPECT_EQ(nesting_problem(page), "");
  EXPECT_EQ(count_of(page, "<script>"), 1U);
  EXPECT_TRUE(contains(page, "&lt;b&gt;&quot;a&quot; &amp; &#39;b&#39;&lt;/b&gt;"));
  EXPECT_TRUE(contains(page, "&lt;k&gt;"));
  EXPECT_TRUE(contains(page, "&lt;v&gt;"));
  EXPECT_EQ(html_escape("a\xff\x01"
                        "b\xc3\xa9"),
            "a??b\xc3\xa9");
}

TEST_F(Report, SummaryHoldsTheNumbersOfTheRun) {
  const auto run = add_file("sum",
                            R"({"kind":"run","name":"r","params_total":1234567,"world":4,"layout":"ep 4"}
{"kind":"step","step":1,"tokens":1000,"loss":5.5,"tokens_per_s":100,"skipped":0,"peak_bytes":1048576}
{"kind":"step","step":2,"tokens":2000,"loss":4.25,"tokens_per_s":200,"skipped":1,"peak_bytes":2097152}
{"kind":"step","step":3,"tokens":3000,"loss":4.75,"tokens_per_s":200,"traffic":{"dp":{"within_node":9,"between_nodes":7},"tp":{}}}
{"kind":"eval","step":2,"loss":4.5}
{"kind":"eval","step":3,"loss":4.625}
)");
  const auto page = render_report({run});
  for (const char* text : {"<b>1.23 M</b>", "<b>4</b>", "<b>ep 4</b>", "4.7500 <small>at step 3</small>",
                           "4.2500 <small>at step 2</small>", "4.6250 <small>at step 3</small>",
                           "4.5000 <small>at step 2</small>", "<b>200</b>", "<b>20.0 s</b>",
                           "<b>2.00 MiB</b>", "<b>16 B (dp 16 B, tp 0 B), 7 B between nodes</b>"})
    EXPECT_TRUE(contains(page, text)) << text;
  EXPECT_FALSE(contains(page, "MFU")) << "rows without a value in any run are left out";
  EXPECT_FALSE(contains(page, "Expert load")) << "a dense run has no expert section";
}

TEST_F(Report, EmptyAndOneRowRunsAreDrawn) {
  const auto empty = add_file("empty", "");
  const auto one = add_file("one",
                            "{\"kind\":\"step\",\"step\":1,\"loss\":3,\"grad_norm\":0,\"tokens_per_s\":10,"
                            "\"moe\":[{\"layer\":0,\"counts\":[4],\"max_vio\":0,\"entropy\":0}]}\n");
  for (const auto& runs : std::vector<std::vector<fs::path>>{{empty}, {one}, {empty, one}}) {
    const auto page = render_report(runs);
    EXPECT_EQ(nesting_problem(page), "");
    EXPECT_FALSE(std::regex_search(page, std::regex("\\b(nan|inf)\\b")));
  }
  EXPECT_TRUE(contains(render_report({empty}), "no training step has been logged yet"));
  EXPECT_TRUE(contains(render_report({one}), "No values to draw."));  // grad norm 0 on a log axis
}

TEST_F(Report, TornAndBrokenLinesAreCountedAndLeftOut) {
  const auto run =
      add_file("torn",
               "{\"kind\":\"step\",\"step\":1,\"loss\":3}\ngarbage\n{\"kind\":\"step\",\"loss\":3}\n"
               "{\"kind\":\"step\",\"step\":2,\"loss\":null}\n{\"kind\":\"step\",\"st");
  const auto page = render_report({run});
  EXPECT_TRUE(contains(page, "3 broken or torn line(s)")) << page.substr(page.find("<body>"), 600);
  EXPECT_TRUE(contains(page, "1 logged step(s) have no finite loss"));
}

TEST_F(Report, MissingRunIsAUsageErrorThatNamesIt) {
  EXPECT_TRUE(contains(expect_usage_error({folder_ / "nowhere"}), "nowhere: there is no such file"));
  fs::create_directories(folder_ / "no-metrics");
  EXPECT_TRUE(contains(expect_usage_error({folder_ / "no-metrics"}), "metrics.jsonl: there is no such file"));
  EXPECT_TRUE(contains(expect_usage_error({}), "no run given"));
}

TEST_F(Report, EqualNamesAreToldApart) {
  write_example_run(folder_ / "a", {.name = "same", .num_steps = 5});
  write_example_run(folder_ / "b", {.name = "same", .num_steps = 5});
  const auto page = render_report({folder_ / "a", folder_ / "b", folder_ / "b"});
  EXPECT_TRUE(contains(page, str("same (", (folder_ / "a").string(), ")")));
  EXPECT_TRUE(contains(page, str("same (", (folder_ / "b").string(), ") #2")));
}

TEST_F(Report, LongRunsStaySmall) {
  write_example_run(folder_ / "a", {.num_steps = 20000, .eval_every = 10, .num_layers = 1, .num_experts = 8});
  const auto page = render_report({folder_ / "a"});
  EXPECT_LT(page.size(), size_t{600000});
}

TEST_F(Report, IsWrittenAsOneFile) {
  write_example_run(folder_ / "a", {.num_steps = 5});
  write_report({folder_ / "a"}, folder_ / "report.html");
  std::ostringstream text;
  text << std::ifstream(folder_ / "report.html").rdbuf();
  EXPECT_EQ(text.str(), render_report({folder_ / "a" / "metrics.jsonl"}));
}

// To look at the pages: SHOAL_REPORT_EXAMPLES names a folder that they are written to.
TEST_F(Report, ExamplePagesAreWellFormed) {
  const char* chosen = std::getenv("SHOAL_REPORT_EXAMPLES");
  const fs::path target = chosen != nullptr ? fs::path(chosen) : folder_;
  write_example_run(folder_ / "a", {.name = "aux-free bias"});
  write_example_run(
      folder_ / "b",
      {.name = "no balancing", .seed = 2, .balanced = false, .drop_share = 0.12, .final_loss = 3.4});
  write_example_run(folder_ / "c", {.name = "64 experts",
                                    .seed = 3,
                                    .num_steps = 1500,
                                    .tokens_per_step = 8192,
                                    .num_layers = 6,
                                    .num_experts = 64,
                                    .top_k = 6,
                                    .final_loss = 2.9});
  write_report({folder_ / "a"}, target / "one.html");
  write_report({folder_ / "a", folder_ / "b", folder_ / "c"}, target / "three.html");
  for (const char* name : {"one.html", "three.html"}) {
    std::ostringstream page;
    page << std::ifstream(target / name).rdbuf();
    EXPECT_EQ(nesting_problem(page.str()), "");
  }
}

TEST(HeatLevel, IsSymmetricInTheLogarithmAndMarksDeadExperts) {
  EXPECT_EQ(heat_level(0), -1);
  EXPECT_EQ(heat_level(kNaN), -1);
  EXPECT_EQ(heat_level(1), (kHeatLevels - 1) / 2);
  EXPECT_EQ(heat_level(0.25), 0);
  EXPECT_EQ(heat_level(1e-9), 0);
  EXPECT_EQ(heat_level(4), kHeatLevels - 1);
  EXPECT_EQ(heat_level(1e9), kHeatLevels - 1);
  EXPECT_EQ(heat_level(2) + heat_level(0.5), kHeatLevels - 1);
}

TEST(HeatMap, CellsCoverEveryExpertAndColumnOnce) {
  LoadHistory load;
  load.add(10, {4, 0, 4});
  load.add(20, {8, 0, 4});
  const auto svg = render_heat_map("t", load, 100);
  EXPECT_TRUE(contains(svg, "<path class=\"h0\" d=\"M0 1h20v1h-20z\"/>"))
      << svg;  // expert 1 never has a token
  double area = 0;
  static const std::regex kCell(R"(M\d+ \d+h(\d+)v1)");
  for (std::sregex_iterator it(svg.begin(), svg.end(), kCell), end; it != end; ++it)
    area += std::stod((*it)[1]);
  EXPECT_EQ(area, 3 * 20) << "in steps";
}

TEST(LoadHistory, JoinsNeighboursAndKeepsAllCounts) {
  LoadHistory load;
  for (int64_t step = 1; step <= 1000; step++) load.add(step, {1, static_cast<double>(step)});
  load.add(1001, {1, 2, 3});  // another number of experts
  EXPECT_LE(load.columns().size(), LoadHistory::kMaxColumns);
  auto sums = [&] {
    double first = 0, second = 0;
    for (const auto& column : load.columns()) first += column.counts[0], second += column.counts[1];
    return std::pair(first, second);
  };
  EXPECT_EQ(sums(), std::pair(1000.0, 500500.0));
  load.shrink(7);
  EXPECT_LE(load.columns().size(), 7U);
  EXPECT_EQ(sums(), std::pair(1000.0, 500500.0));
  EXPECT_EQ(load.columns().front().first_step, 1);
  EXPECT_EQ(load.columns().back().last_step, 1000);
}

TEST(Ticks, AreOneTwoOrFiveTimesAPowerOfTen) {
  EXPECT_EQ(nice_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(nice_ticks(-1, 1, 4), (std::vector<double>{-1, -0.5, 0, 0.5, 1}));
  EXPECT_EQ(nice_ticks(1, 2000, 4).size(), 4U);  // 500 1000 1500 2000
  EXPECT_EQ(nice_ticks(3, 3, 5), std::vector<double>{3});
  EXPECT_EQ(log_ticks(0.1, 10).size(), 7U);  // 0.1 0.2 0.5 1 2 5 10
  EXPECT_EQ(log_ticks(1e-6, 1e6).size(), 13U);
  EXPECT_GE(log_ticks(2.2, 4.0).size(), 3U) << "a narrow range still gets labels";
}

TEST(ShortNumber, IsShortAndExactEnough) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.0025), "0.0025");
  EXPECT_EQ(short_number(1.5e-5), "1.5e-5");
  EXPECT_EQ(short_number(2000), "2000");
  EXPECT_EQ(short_number(12000), "12k");
  EXPECT_EQ(short_number(3.2e6), "3.2M");
  EXPECT_EQ(short_number(-0.5), "-0.5");
  EXPECT_EQ(short_number(1e16), "1e16");
  EXPECT_EQ(short_number(kNaN), "-");
}

TEST(Downsample, KeepsExtremesOrderAndGaps) {
  std::vector<Point> points;
  for (int i = 0; i < 10000; i++) points.push_back({static_cast<double>(i), std::sin(i * 0.01)});
  points[1234].y = 50;
  points[4321].y = -50;
  points[7777].y = kNaN;
  const auto kept = downsample(points, 1000);
  EXPECT_LE(kept.size(), 1001U);
  bool high = false, low = false, gap = false;
  for (size_t i = 0; i < kept.size(); i++) {
    if (i > 0) {
      EXPECT_LT(kept[i - 1].x, kept[i].x);
    }
    high |= kept[i].y == 50, low |= kept[i].y == -50, gap |= std::isnan(kept[i].y);
  }
  EXPECT_TRUE(high && low && gap);
  EXPECT_EQ(downsample({{1, 2}}, 1000).size(), 1U);
  EXPECT_TRUE(downsample({}, 1000).empty());
}

TEST(TickLabels, ShareDecimalsAndUnit) {
  EXPECT_EQ(tick_labels({0, 5000, 10000}), (std::vector<std::string>{"0", "5k", "10k"}));
  EXPECT_EQ(tick_labels({0.01, 0.0105, 0.011}), (std::vector<std::string>{"0.0100", "0.0105", "0.0110"}));
  EXPECT_EQ(tick_labels({-0.5, 0, 0.5}), (std::vector<std::string>{"-0.5", "0.0", "0.5"}));
  EXPECT_EQ(tick_labels({0, 2e-7, 4e-7}), (std::vector<std::string>{"0", "2e-7", "4e-7"}));
  EXPECT_EQ(tick_labels({3}), std::vector<std::string>{"3"});
}

TEST(LineChart, CropsASteepStartAndSaysSo) {
  LineChart chart{.title = "t", .x_label = "step", .y_label = "u", .crop_start = true};
  Series series{"a", "red", {}};
  for (int i = 0; i <= 1000; i++)
    series.points.push_back({static_cast<double>(i), i < 20 ? 100.0 - i : 2 + 1.0 / i});
  chart.series = {series};
  EXPECT_TRUE(contains(render_line_chart(chart), "The start goes up to 100."));
  chart.series[0].points[500].y = 100;  // a later spike is never cut off
  EXPECT_FALSE(contains(render_line_chart(chart), "The start goes up to"));
}

TEST(Smooth, IsACentredMeanThatSkipsGaps) {
  const auto line = smooth({{1, 1}, {2, 2}, {3, 9}, {4, 4}, {5, 5}}, 3);
  EXPECT_EQ(line[0].y, 1) << "the start has no neighbours before it";
  EXPECT_EQ(line[1].y, 4);
  EXPECT_EQ(line[2].y, 5);
  EXPECT_EQ(line[3].y, 6);
  EXPECT_EQ(line[4].y, 4.5);
  const auto gap = smooth({{1, 4}, {2, kNaN}, {3, 4}, {4, 6}, {5, 1}}, 3);
  EXPECT_TRUE(std::isnan(gap[1].y));
  EXPECT_EQ(gap[2].y, 5);
  EXPECT_EQ(smooth({{1, 1}, {2, 3}}, 1)[1].y, 3) << "a window of one changes nothing";
  EXPECT_TRUE(smooth({}, 9).empty());
}

}  // namespace shoal
