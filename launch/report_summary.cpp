#include "launch/report_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "core/base/error.h"
#include "core/base/text.h"
#include "launch/metrics.h"
#include "launch/report_page.h"
#include "launch/svg_chart.h"

namespace shoal {

namespace {

using Runs = std::vector<RunData>;

std::vector<double> finite(const std::vector<double>& values) {
  std::vector<double> kept;
  std::copy_if(values.begin(), values.end(), std::back_inserter(kept),
               [](double v) { return std::isfinite(v); });
  return kept;
}

double median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string fixed(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

std::string with_step(double value, double step) {
  if (!std::isfinite(value)) return "-";
  return fmt::format("{:.4f} <small>at step {:.0f}</small>", value, step);
}

std::string last_point(const std::vector<Point>& points) {
  for (auto it = points.rbegin(); it != points.rend(); ++it)
    if (std::isfinite(it->y)) return with_step(it->y, it->x);
  return "-";
}

std::string lowest_point(const std::vector<Point>& points) {
  Point best{0, std::numeric_limits<double>::infinity()};
  for (const auto& point : points)
    if (point.y < best.y) best = point;
  return with_step(best.y, best.x);
}

std::string count(std::optional<int64_t> value) {
  return value ? human_count(static_cast<double>(*value)) : "-";
}

std::string highest_of(const RunData& run, const char* column,
                       const std::function<std::string(double)>& text) {
  const auto values = finite(run.column(column));
  return values.empty() ? "-" : text(*std::max_element(values.begin(), values.end()));
}

// A median that is zero throughout was not measured.
std::string median_of(const RunData& run, const char* column,
                      const std::function<std::string(double)>& text) {
  const double value = median(finite(run.column(column)));
  return value > 0 ? text(value) : "-";
}

struct SummaryRow {
  const char* label;
  std::function<std::string(const RunData&)> cell;  // HTML
};

std::vector<SummaryRow> summary_rows() {
  return {
      {"parameters, total", [](const RunData& r) { return count(r.params_total); }},
      {"parameters, active per token", [](const RunData& r) { return count(r.params_active); }},
      {"ranks", [](const RunData& r) { return r.world ? str(*r.world) : "-"; }},
      {"layout", [](const RunData& r) { return r.layout.empty() ? "-" : html_escape(r.layout); }},
      {"steps", [](const RunData& r) { return fixed(last_value(r, "step"), 0); }},
      {"tokens",
       [](const RunData& r) {
         const double tokens = last_value(r, "tokens");
         return std::isfinite(tokens) ? human_count(tokens) : "-";
       }},
      {"training loss, last", [](const RunData& r) { return last_point(r.points("loss")); }},
      {"training loss, lowest", [](const RunData& r) { return lowest_point(r.points("loss")); }},
      {"evaluation loss, last", [](const RunData& r) { return last_point(r.eval_loss); }},
      {"evaluation loss, lowest", [](const RunData& r) { return lowest_point(r.eval_loss); }},
      {"tokens/s, median",
       [](const RunData& r) {
         return median_of(r, "tokens_per_s", [](double v) { return human_count(v); });
       }},
      {"TFLOP/s, median",
       [](const RunData& r) { return median_of(r, "tflops", [](double v) { return short_number(v); }); }},
      {"MFU, median",
       [](const RunData& r) {
         return median_of(r, "mfu", [](double v) { return fixed(100 * v, 1) + " %"; });
       }},
      {"time in training steps",
       [](const RunData& r) {
         return r.training_seconds() > 0 ? human_duration(r.training_seconds()) : "-";
       }},
      {"peak memory per rank",
       [](const RunData& r) {
         return highest_of(r, "peak_bytes", [](double v) { return human_bytes(static_cast<int64_t>(v)); });
       }},
      {"sent in a step by rank 0",
       [](const RunData& r) {
         const std::string text = traffic_text(r.traffic);
         return text.empty() ? "-" : html_escape(text);
       }},
      {"steps skipped (non-finite)", [](const RunData& r) { return fixed(last_value(r, "skipped"), 0); }},
  };
}

std::string summary_tiles(const RunData& run) {
  std::string html = "<div class=\"tiles\">\n";
  for (const auto& row : summary_rows()) {
    const std::string cell = row.cell(run);
    if (cell != "-") html += fmt::format("<div><span>{}</span><b>{}</b></div>\n", row.label, cell);
  }
  return html + "</div>\n";
}

std::string summary_table(const Runs& runs) {
  std::string html = "<div class=\"card\"><table class=\"summary\">\n<thead><tr><th></th>";
  for (size_t i = 0; i < runs.size(); i++)
    html +=
        fmt::format("<th><i style=\"background:{}\"></i>{}</th>", run_colour(i), html_escape(runs[i].name));
  html += "</tr></thead>\n<tbody>\n";
  for (const auto& row : summary_rows()) {
    std::string cells;
    bool known = false;
    for (const auto& run : runs) {
      const std::string cell = row.cell(run);
      known = known || cell != "-";
      cells += "<td>" + cell + "</td>";
    }
    if (known) html += fmt::format("<tr><th>{}</th>{}</tr>\n", row.label, cells);
  }
  return html + "</tbody></table></div>\n";
}

}  // namespace

double last_value(const RunData& run, const char* column) {
  const auto values = finite(run.column(column));
  return values.empty() ? std::numeric_limits<double>::quiet_NaN() : values.back();
}

std::string report_summary(const Runs& runs) {
  return runs.size() == 1 ? summary_tiles(runs[0]) : summary_table(runs);
}

std::string report_warnings(const Runs& runs) {
  std::string html;
  auto warn = [&](const RunData& run, const std::string& text) {
    html +=
        fmt::format("<div class=\"warn\"><b>{}</b>: {}</div>\n", html_escape(run.name), html_escape(text));
  };
  for (const auto& run : runs) {
    if (run.num_bad_rows > 0)
      warn(run, str(run.num_bad_rows, " broken or torn line(s) of ", run.file.string(), " were left out."));
    if (run.num_steps() == 0) warn(run, "no training step has been logged yet.");
    const size_t lost = run.num_steps() - finite(run.column("loss")).size();
    if (lost > 0) warn(run, str(lost, " logged step(s) have no finite loss."));
  }
  return html;
}

// Config keys whose values differ between the runs.
std::string report_differences(const Runs& runs) {
  std::set<std::string> keys;
  for (const auto& run : runs)
    for (const auto& [key, _] : run.config) keys.insert(key);
  std::string rows;
  for (const auto& key : keys) {
    std::set<std::string> values;
    std::string cells;
    for (const auto& run : runs) {
      const auto it = run.config.find(key);
      values.insert(it == run.config.end() ? "-" : it->second);
      cells += "<td><code>" + html_escape(it == run.config.end() ? "-" : it->second) + "</code></td>";
    }
    if (values.size() > 1) rows += "<tr><th><code>" + html_escape(key) + "</code></th>" + cells + "</tr>\n";
  }
  if (rows.empty()) return "";
  std::string html =
      "<h3>What differs in the configs</h3>\n<div class=\"card\"><table>\n<thead><tr><th></th>";
  for (const auto& run : runs) html += "<th>" + html_escape(run.name) + "</th>";
  return html + "</tr></thead>\n<tbody>\n" + rows + "</tbody></table></div>\n";
}

std::string report_configs(const Runs& runs) {
  std::string html;
  for (const auto& run : runs) {
    if (run.config.empty()) continue;
    html += "<details><summary>Config of " + html_escape(run.name) +
            "</summary><div class=\"card\"><table><tbody>\n";
    for (const auto& [key, value] : run.config)
      html += "<tr><th><code>" + html_escape(key) + "</code></th><td><code>" + html_escape(value) +
              "</code></td></tr>\n";
    html += "</tbody></table></div></details>\n";
  }
  return html;
}

}  // namespace shoal
