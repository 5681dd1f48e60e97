// Line charts and heat maps as inline SVG. Colours are CSS classes and variables of the page (report_page.h),
// so charts follow its light or dark theme. Pure functions of their arguments.
#pragma once

#include <string>
#include <vector>

#include "launch/report_data.h"

namespace shoal {

struct Series {
  enum class Style {
    line,
    faint,  // raw values behind a smoothed line; not listed in the legend
    dots,   // circles joined by a dashed line
  };
  std::string label;
  std::string colour;  // CSS, "var(--c0)"
  std::vector<Point> points;
  Style style = Style::line;
};

struct LineChart {
  std::string title, x_label, y_label;
  std::string note = {};  // one sentence below, or ""
  bool log_y = false;
  bool y_from_zero = false;
  bool crop_start =
      false;  // the first 3 % of the x range may lie above the drawing, when that saves much of it
  std::vector<Series> series = {};
};

/// The chart as a <figure> with title, legend (for more than one label) and SVG. Points that cannot be drawn
/// (NaN, not positive on a log axis) leave a gap. At most about 1000 points per line are drawn, and every
/// extreme value is among them. A chart without any point says so.
std::string render_line_chart(const LineChart& chart);

/// Load of each expert (y) over the steps (x), coloured by count / mean count; see heat_level. `max_columns`
/// limits the size of the page.
std::string render_heat_map(const std::string& title, const LoadHistory& load, size_t max_columns);

/// Colour step 0..kHeatLevels-1 of a load ratio: log2 scale from 1/4 to 4, the middle is 1; -1 for an expert
/// without tokens.
constexpr int kHeatLevels = 17;
int heat_level(double ratio);

/// Ticks at 1, 2 or 5 times powers of ten within [low, high], about `wanted` of them.
std::vector<double> nice_ticks(double low, double high, int wanted);
/// The same for a logarithmic axis: powers of ten, with 2 and 5 between when they are few.
std::vector<double> log_ticks(double low, double high);
/// A value with at most four significant digits: "0.0025", "1.5e-5", "12k", "3.2M".
std::string short_number(double value);
/// Texts of evenly spaced ticks, all with the same number of decimals and the same unit.
std::vector<std::string> tick_labels(const std::vector<double>& ticks);

/// Keeps the smallest and the largest value of each of max_points / 2 groups, in order; gaps stay.
std::vector<Point> downsample(const std::vector<Point>& points, size_t max_points);
/// Mean over the `window` points around each, fewer at the start so that it does not lag there; gaps
/// stay.
std::vector<Point> smooth(const std::vector<Point>& points, size_t window);

/// Text for HTML and SVG, also in attributes: markup and quotes escaped, bytes that are no UTF-8 and control
/// characters replaced.
std::string html_escape(const std::string& text);

}  // namespace shoal
