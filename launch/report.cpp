#include "launch/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "core/base/error.h"
#include "core/base/text.h"
#include "data/file_io.h"
#include "launch/report_data.h"
#include "launch/report_page.h"
#include "launch/report_summary.h"
#include "launch/svg_chart.h"

namespace shoal {

namespace {

using Runs = std::vector<RunData>;

// Runs of the same name are told apart by their path, or else by a number.
void make_names_unique(Runs& runs) {
  std::map<std::string, int> uses;
  for (const auto& run : runs) uses[run.name]++;
  for (auto& run : runs)
    if (uses[run.name] > 1) run.name = str(run.name, " (", run.file.parent_path().string(), ")");
  std::set<std::string> seen;
  for (auto& run : runs) {
    const std::string name = run.name;
    for (int i = 2; !seen.insert(run.name).second; i++) run.name = str(name, " #", i);
  }
}

bool any_nonzero(const std::vector<Point>& points) {
  return std::any_of(points.begin(), points.end(),
                     [](const Point& p) { return std::isfinite(p.y) && p.y != 0; });
}

std::vector<Point> scaled(std::vector<Point> points, double factor) {
  for (auto& point : points) point.y *= factor;
  return points;
}

LineChart overlay(const Runs& runs, const char* title, const char* unit, const char* column,
                  double factor = 1) {
  LineChart chart{.title = title, .x_label = "step", .y_label = unit};
  for (size_t i = 0; i < runs.size(); i++)
    chart.series.push_back({runs[i].name, run_colour(i), scaled(runs[i].points(column), factor)});
  return chart;
}

// "" when the quantity is zero or absent in all runs.
std::string unless_zero(const LineChart& chart) {
  const bool any = std::any_of(chart.series.begin(), chart.series.end(),
                               [](const Series& s) { return any_nonzero(s.points); });
  return any ? render_line_chart(chart) : "";
}

// Adds raw values, faint, and their moving average; long runs are noisy, and several would hide each other.
void add_smoothed(LineChart& chart, const std::string& label, const std::string& colour,
                  const std::vector<Point>& raw) {
  const size_t window = raw.size() / 60;
  if (window > 1) {
    chart.series.push_back({label, colour, raw, Series::Style::faint});
    chart.note = "Faint: every logged step. Line: moving average over 1/60 of the run.";
  }
  chart.series.push_back({label, colour, smooth(raw, window)});
}

LineChart smoothed_overlay(const Runs& runs, const char* title, const char* unit, const char* column,
                           double factor = 1) {
  LineChart chart{.title = title, .x_label = "step", .y_label = unit};
  for (size_t i = 0; i < runs.size(); i++)
    add_smoothed(chart, runs[i].name, run_colour(i), scaled(runs[i].points(column), factor));
  return chart;
}

// `x`: "step" or "tokens".
LineChart loss_chart(const Runs& runs, const std::string& x) {
  LineChart chart{.title = x == "step" ? "Loss" : "Loss over tokens",
                  .x_label = x,
                  .y_label = "nats per token, without balancing losses",
                  .crop_start = true};
  bool evaluated = false;
  for (size_t i = 0; i < runs.size(); i++) {
    add_smoothed(chart, runs[i].name, run_colour(i), runs[i].points("loss", x));
    if (x != "step" || runs[i].eval_loss.empty()) continue;
    chart.series.push_back(
        {runs[i].name + ", evaluation", run_colour(i), runs[i].eval_loss, Series::Style::dots});
    evaluated = true;
  }
  if (evaluated) chart.note += str(chart.note.empty() ? "" : " ", "Circles: loss on held-out text.");
  return chart;
}

bool same_tokens_per_step(const Runs& runs) {
  std::set<double> rates;
  for (const auto& run : runs)
    if (last_value(run, "step") > 0) rates.insert(last_value(run, "tokens") / last_value(run, "step"));
  return rates.size() <= 1;
}

std::string training_charts(const Runs& runs) {
  std::string html =
      "<h2>Training</h2>\n<div class=\"grid2\">\n" + render_line_chart(loss_chart(runs, "step"));
  if (!same_tokens_per_step(runs)) html += render_line_chart(loss_chart(runs, "tokens"));
  LineChart norm = smoothed_overlay(runs, "Gradient norm", "before clipping, log scale", "grad_norm");
  norm.log_y = true;
  html += render_line_chart(norm);
  LineChart rate = overlay(runs, "Learning rate", "", "learning_rate");
  rate.y_from_zero = true;
  html += render_line_chart(rate);
  LineChart speed = smoothed_overlay(runs, "Throughput", "tokens/s, all ranks together", "tokens_per_s");
  speed.y_from_zero = true;
  html += render_line_chart(speed);
  LineChart mfu = smoothed_overlay(runs, "Model FLOPs utilisation", "% of the measured peak", "mfu", 100);
  mfu.y_from_zero = true;
  html += unless_zero(mfu);
  html += unless_zero(overlay(runs, "Balancing loss", "aux loss as added to the loss", "aux_loss"));
  html += unless_zero(overlay(runs, "Router z-loss", "as added to the loss", "z_loss"));
  return html + "</div>\n";
}

// Mean over the MoE layers at each step.
std::vector<Point> mean_over_layers(const RunData& run, std::vector<Point> LayerHistory::*values) {
  std::vector<Point> mean = run.layers.empty() ? std::vector<Point>{} : run.layers[0].*values;
  for (size_t l = 1; l < run.layers.size(); l++) {
    const auto& more = run.layers[l].*values;
    for (size_t i = 0; i < mean.size(); i++)
      mean[i].y += i < more.size() ? more[i].y : std::numeric_limits<double>::quiet_NaN();
  }
  return scaled(std::move(mean), 1.0 / static_cast<double>(std::max<size_t>(1, run.layers.size())));
}

std::string expert_overlays(const Runs& runs) {
  std::string charts;
  LineChart load = smoothed_overlay(runs, "Fullest expert",
                                    "max load / mean load, worst MoE layer, log scale", "max_load");
  load.log_y = true;
  charts += unless_zero(load);
  LineChart dropped = overlay(runs, "Dropped assignments", "% of all, capacity limit", "dropped", 100);
  dropped.y_from_zero = true;
  charts += unless_zero(dropped);
  LineChart entropy{.title = "Router entropy", .x_label = "step", .y_label = "nats, mean over MoE layers"};
  for (size_t i = 0; i < runs.size(); i++)
    entropy.series.push_back(
        {runs[i].name, run_colour(i), mean_over_layers(runs[i], &LayerHistory::entropy)});
  charts += unless_zero(entropy);
  return charts.empty() ? "" : "<h2>Experts, all runs</h2>\n<div class=\"grid2\">\n" + charts + "</div>\n";
}

LineChart per_layer(const RunData& run, const char* title, const char* unit,
                    std::vector<Point> LayerHistory::*values, double factor = 1) {
  LineChart chart{.title = title, .x_label = "step", .y_label = unit};
  for (size_t l = 0; l < run.layers.size(); l++)
    chart.series.push_back({str("layer ", run.layers[l].layer), ramp_colour(l, run.layers.size()),
                            scaled(run.layers[l].*values, factor)});
  return chart;
}

// Columns of a heat map such that the page stays a few megabytes for any number of layers and experts.
size_t heat_columns(const RunData& run) {
  size_t rows = 1;
  for (const auto& layer : run.layers) rows += layer.load.num_experts();
  return std::clamp<size_t>(400000 / rows, 40, 160);
}

std::string expert_section(const RunData& run, size_t index) {
  if (run.layers.empty()) return "";
  std::string html = fmt::format("<h2><i class=\"mark\" style=\"background:{}\"></i>Experts of {}</h2>\n",
                                 run_colour(index), html_escape(run.name));
  html += "<p class=\"sub\">Assignments per expert, relative to the layer's mean, before drops.</p>\n" +
          heat_legend();
  html += "<div class=\"grid2\">\n";
  for (const auto& layer : run.layers)
    html += render_heat_map(str("Expert load, layer ", layer.layer), layer.load, heat_columns(run));
  html += "</div>\n<h3>Balance and routing per layer</h3>\n<div class=\"grid2\">\n";
  LineChart max_vio = per_layer(run, "MaxVio", "max load / mean load - 1", &LayerHistory::max_vio);
  max_vio.y_from_zero = max_vio.crop_start = true;
  html += render_line_chart(max_vio);
  html += render_line_chart(per_layer(run, "Router entropy", "nats", &LayerHistory::entropy));
  LineChart dropped = per_layer(run, "Dropped assignments", "% of the layer's", &LayerHistory::dropped, 100);
  dropped.y_from_zero = true;
  html += unless_zero(dropped);
  LineChart dead =
      per_layer(run, "Experts without a token", "number in the logged step", &LayerHistory::dead);
  dead.y_from_zero = true;
  html += unless_zero(dead);
  LineChart bias = per_layer(run, "Router bias", "lowest and highest", &LayerHistory::bias_max);
  const LineChart lowest = per_layer(run, "", "", &LayerHistory::bias_min);
  bias.series.insert(bias.series.end(), lowest.series.begin(), lowest.series.end());
  html += unless_zero(bias);
  return html + "</div>\n";
}

}  // namespace

std::string render_report(const std::vector<std::filesystem::path>& paths) {
  if (paths.empty()) throw UsageError("report: no run given; name at least one run folder");
  Runs runs;
  for (const auto& path : paths) runs.push_back(read_run(path));
  make_names_unique(runs);
  std::vector<std::string> names;
  for (const auto& run : runs) names.push_back(run.name);

  const std::string title = runs.size() == 1 ? names[0] : str(runs.size(), " runs");
  std::string body = "<h1>" + html_escape(title) + "</h1>\n<p class=\"sub\">" +
                     html_escape(runs.size() == 1 ? "Training report, Shoal"
                                                  : "Training report, Shoal: " + join(names, ", ")) +
                     "</p>\n";
  body += report_warnings(runs) + report_summary(runs);
  body += training_charts(runs);
  if (runs.size() > 1) body += expert_overlays(runs);
  for (size_t i = 0; i < runs.size(); i++) body += expert_section(runs[i], i);
  const std::string configs = (runs.size() > 1 ? report_differences(runs) : "") + report_configs(runs);
  if (!configs.empty()) body += "<h2>Configs</h2>\n" + configs;
  return html_page(title, body);
}

void write_report(const std::vector<std::filesystem::path>& runs, const std::filesystem::path& output) {
  write_file(output.string(), render_report(runs));
}

}  // namespace shoal
