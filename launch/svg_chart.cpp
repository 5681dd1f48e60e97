#include "launch/svg_chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "core/base/error.h"
#include "launch/svg_axes.h"

namespace shoal {

namespace {

constexpr size_t kMaxPoints = 1000, kMaxDots = 120;

bool drawable(const LineChart& chart, const Point& point) {
  return std::isfinite(point.x) && std::isfinite(point.y) && (!chart.log_y || point.y > 0);
}

struct Bounds {
  double x_low = std::numeric_limits<double>::infinity(), x_high = -x_low, y_low = x_low, y_high = -x_low;
};

Bounds bounds_of(const LineChart& chart) {
  Bounds b;
  for (const auto& series : chart.series) {
    for (const auto& point : series.points) {
      if (!drawable(chart, point)) continue;
      b.x_low = std::min(b.x_low, point.x), b.x_high = std::max(b.x_high, point.x);
      b.y_low = std::min(b.y_low, point.y), b.y_high = std::max(b.y_high, point.y);
    }
  }
  return b;
}

// Highest value after the first 3 % of the x range, where that is much lower than the highest of all.
double cropped_top(const LineChart& chart, const Bounds& b) {
  double top = b.y_low;
  for (const auto& series : chart.series)
    for (const auto& point : series.points)
      if (drawable(chart, point) && point.x >= b.x_low + 0.03 * (b.x_high - b.x_low))
        top = std::max(top, point.y);
  return top - b.y_low < 0.75 * (b.y_high - b.y_low) && top > b.y_low ? top : b.y_high;
}

// Some air around the values, and a range that is not empty.
Scale y_scale(const LineChart& chart, const Bounds& b) {
  Scale y{b.y_low, b.y_high, kChartHeight - kBottom, kTop, chart.log_y};
  if (y.log) {
    const double air = std::max(std::pow(y.high / y.low, 0.04), 1.1);
    y.low /= air, y.high *= air;
    return y;
  }
  if (chart.y_from_zero) y.low = std::min(y.low, 0.0);
  const double span = y.high - y.low;
  const double air =
      span > 0 ? 0.05 * span : std::max(std::abs(y.high) * 0.1, chart.y_from_zero ? 1.0 : 1e-6);
  y.high += air;
  if (!(chart.y_from_zero && y.low == 0)) y.low -= air;
  return y;
}

std::string axes(const LineChart& chart, const Scale& x, const Scale& y) {
  std::string svg;
  const auto y_ticks = y.log ? log_ticks(y.low, y.high) : nice_ticks(y.low, y.high, 5);
  const auto y_labels = y.log ? std::vector<std::string>{} : tick_labels(y_ticks);
  for (size_t i = 0; i < y_ticks.size(); i++) {
    const double at = y(y_ticks[i]);
    svg += fmt::format("<path class=\"grid\" d=\"M{} {:.1f}H{}\"/>", kLeft, at, kWidth - kRight);
    svg += fmt::format("<text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">{}</text>", kLeft - 7,
                       at + 4, y.log ? short_number(y_ticks[i]) : y_labels[i]);
  }
  svg += horizontal_axis(x, kChartHeight - kBottom, chart.x_label);
  return svg;
}

std::string draw(const LineChart& chart, const Series& series, const Scale& x, const Scale& y) {
  const bool dots = series.style == Series::Style::dots;
  std::vector<Point> visible = series.points;
  for (auto& point : visible)
    if (!drawable(chart, point) || point.y > y.high) point.y = std::numeric_limits<double>::quiet_NaN();
  std::string path, circles;
  bool pen_down = false;
  const auto points = downsample(visible, dots ? kMaxDots : kMaxPoints);
  for (size_t i = 0; i < points.size(); i++) {
    if (std::isnan(points[i].y)) {
      pen_down = false;
      continue;
    }
    const double px = x(points[i].x), py = y(points[i].y);
    path += fmt::format("{}{:.1f} {:.1f}", pen_down ? "L" : "M", px, py);
    const bool alone = !pen_down && (i + 1 == points.size() || std::isnan(points[i + 1].y));
    if (dots || alone) circles += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>", px, py);
    pen_down = true;
  }
  const char* style = dots ? "dots" : series.style == Series::Style::faint ? "faint" : "line";
  return fmt::format("<g class=\"{}\" style=\"--c:{}\" data-name=\"{}\"><path d=\"{}\"/>{}</g>", style,
                     series.colour, html_escape(series.label), path, circles);
}

std::string legend(const LineChart& chart) {
  std::vector<const Series*> shown;
  std::set<std::string> labels;
  for (const auto& series : chart.series)
    if (series.style == Series::Style::line && labels.insert(series.label).second) shown.push_back(&series);
  if (shown.size() < 2) return "";
  std::string html = "<div class=\"legend\">";
  for (const auto* series : shown)
    html += fmt::format("<span><i style=\"background:{}\"></i>{}</span>", series->colour,
                        html_escape(series->label));
  return html + "</div>";
}

}  // namespace

std::string render_line_chart(const LineChart& chart) {
  std::string html = fmt::format("<figure><figcaption><b>{}</b> <small>{}</small></figcaption>",
                                 html_escape(chart.title), html_escape(chart.y_label));
  Bounds b = bounds_of(chart);
  const double highest = b.y_high;
  if (chart.crop_start) b.y_high = cropped_top(chart, b);
  std::string note = chart.note;
  if (b.y_high < highest)
    note += str(note.empty() ? "" : " ", "The start goes up to ", short_number(highest), ".");
  if (!(b.x_low <= b.x_high)) return html + "<p class=\"empty\">No values to draw.</p></figure>\n";
  Scale x{b.x_low, b.x_high, kLeft, kWidth - kRight, false};
  if (x.low == x.high) x.low -= 1, x.high += 1;
  const Scale y = y_scale(chart, b);
  html += legend(chart);
  html += fmt::format(
      "<svg class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" data-x=\"{} {} {} {}\" "
      "data-y=\"{} {} {} {} {}\" data-xlabel=\"{}\">",
      kWidth, kChartHeight, html_escape(chart.title), x.low, x.high, x.begin, x.end, y.low, y.high, y.begin,
      y.end, y.log ? 1 : 0, html_escape(chart.x_label));
  html += axes(chart, x, y);
  for (const auto style : {Series::Style::faint, Series::Style::line, Series::Style::dots})
    for (const auto& series : chart.series)
      if (series.style == style) html += draw(chart, series, x, y);
  html += "</svg>";
  if (!note.empty()) html += fmt::format("<p class=\"note\">{}</p>", html_escape(note));
  return html + "</figure>\n";
}

}  // namespace shoal
