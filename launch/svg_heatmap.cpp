// The heat map of expert loads.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "launch/svg_axes.h"
#include "launch/svg_chart.h"

namespace shoal {

namespace {

// Left edge of each column in steps, and the right edge of the last one.
std::vector<int64_t> edges_of(const std::vector<LoadHistory::Column>& columns) {
  std::vector<int64_t> edges;
  for (const auto& column : columns) edges.push_back(column.first_step);
  const size_t n = columns.size();
  const int64_t spacing = n > 1 ? columns[n - 1].first_step - columns[n - 2].last_step : 1;
  edges.push_back(columns.back().last_step + std::max<int64_t>(1, spacing));
  return edges;
}

// One path per colour; a run of equal neighbours is one rectangle. Units: steps from the first one, experts.
std::string cells(const LoadHistory& load, const std::vector<int64_t>& edges) {
  std::vector<std::string> paths(kHeatLevels + 1);
  const auto& columns = load.columns();
  std::vector<double> means;
  for (const auto& column : columns) {
    double sum = 0;
    for (const double count : column.counts) sum += count;
    means.push_back(sum / static_cast<double>(column.counts.size()));
  }
  for (size_t e = 0; e < load.num_experts(); e++) {
    for (size_t begin = 0; begin < columns.size();) {
      auto level = [&](size_t i) { return means[i] > 0 ? heat_level(columns[i].counts[e] / means[i]) : -1; };
      const int current = level(begin);
      size_t end = begin + 1;
      while (end < columns.size() && level(end) == current) end++;
      const int64_t width = edges[end] - edges[begin];
      paths[static_cast<size_t>(current + 1)] +=
          fmt::format("M{} {}h{}v1h-{}z", edges[begin] - edges[0], e, width, width);
      begin = end;
    }
  }
  std::string svg;
  for (size_t i = 0; i < paths.size(); i++)
    if (!paths[i].empty()) svg += fmt::format("<path class=\"h{}\" d=\"{}\"/>", i, paths[i]);
  return svg;
}

std::string expert_axis(double num_experts, double plot_height) {
  std::string svg;
  for (const double e :
       nice_ticks(0, num_experts - 1, static_cast<int>(std::min(plot_height / 26, num_experts)))) {
    if (e != std::floor(e)) continue;
    svg += fmt::format("<text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">{:.0f}</text>",
                       kLeft - 7, kTop + (e + 0.5) * plot_height / num_experts + 4, e);
  }
  return svg + fmt::format(
                   "<text class=\"label\" text-anchor=\"middle\" transform=\"translate(13 {}) "
                   "rotate(-90)\">expert</text>",
                   kTop + plot_height / 2);
}

}  // namespace

int heat_level(double ratio) {
  if (!(ratio > 0)) return -1;
  const double octaves = std::clamp(std::log2(ratio), -2.0, 2.0);
  return static_cast<int>(std::lround((octaves + 2) / 4 * (kHeatLevels - 1)));
}

std::string render_heat_map(const std::string& title, const LoadHistory& full, size_t max_columns) {
  LoadHistory load = full;
  load.shrink(std::max<size_t>(1, max_columns));
  std::string html = fmt::format("<figure><figcaption><b>{}</b> <small>{} experts</small></figcaption>",
                                 html_escape(title), load.num_experts());
  if (load.columns().empty()) return html + "<p class=\"empty\">No expert counts.</p></figure>\n";
  const auto num_experts = static_cast<double>(load.num_experts());
  const double plot_height = std::clamp(num_experts * 9, 72.0, 320.0), bottom = kTop + plot_height;
  const auto edges = edges_of(load.columns());
  const Scale x{static_cast<double>(edges.front()), static_cast<double>(edges.back()), kLeft,
                kWidth - kRight};
  html += fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">", kWidth, bottom + kBottom,
                      html_escape(title));
  html +=
      fmt::format("<g class=\"cells\" transform=\"translate({} {}) scale({:.8g} {:.8g})\">{}</g>", kLeft,
                  kTop, (x.end - x.begin) / (x.high - x.low), plot_height / num_experts, cells(load, edges));
  html += expert_axis(num_experts, plot_height) + horizontal_axis(x, bottom, "step");
  return html + "</svg></figure>\n";
}

}  // namespace shoal
