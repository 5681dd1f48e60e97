// Ticks, number texts, the horizontal axis, downsampling and escaping for the charts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "data/utf8.h"
#include "launch/svg_axes.h"
#include "launch/svg_chart.h"

namespace shoal {

namespace {

struct Unit {
  double value;
  const char* suffix;
};
Unit unit_of(double size) {
  for (const auto& unit : {Unit{1e12, "T"}, Unit{1e9, "G"}, Unit{1e6, "M"}})
    if (size >= unit.value) return unit;
  return size >= 1e4 ? Unit{1e3, "k"} : Unit{1, ""};
}

}  // namespace

std::vector<double> nice_ticks(double low, double high, int wanted) {
  if (!(high > low) || wanted < 1) return {low};
  const double raw = (high - low) / wanted;
  const double magnitude = std::pow(10.0, std::floor(std::log10(raw)));
  const double fraction = raw / magnitude;
  const double step = magnitude * (fraction < 1.5 ? 1 : fraction < 3.5 ? 2 : fraction < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  const auto first = static_cast<int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<int64_t>(std::floor(high / step + 1e-9));
  for (int64_t i = first; i <= last; i++) ticks.push_back(static_cast<double>(i) * step);
  return ticks;
}

std::vector<double> log_ticks(double low, double high) {
  const int first = static_cast<int>(std::floor(std::log10(low))),
            last = static_cast<int>(std::ceil(std::log10(high)));
  const bool few = std::log10(high / low) < 3;
  const int every = std::max(1, (last - first) / 8);
  std::vector<double> ticks;
  for (int exponent = first; exponent <= last; exponent += every) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10.0, exponent);
      if ((factor == 1 || few) && tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9))
        ticks.push_back(tick);
    }
  }
  // A narrow range may hold hardly any of them.
  return ticks.size() < 3 ? nice_ticks(low, high, 4) : ticks;
}

std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  const double size = std::abs(value);
  char buffer[40];
  if (size == 0) return "0";
  if (size >= 1e15 || size < 1e-3) {
    std::snprintf(buffer, sizeof buffer, "%.3g", value);
    std::string text = buffer;
    // 1e-05 -> 1e-5
    if (const auto e = text.find('e'); e != std::string::npos) {
      const size_t digits = e + 2;
      while (digits + 1 < text.size() && text[digits] == '0') text.erase(digits, 1);
      if (text[e + 1] == '+') text.erase(e + 1, 1);
    }
    return text;
  }
  const auto [unit, suffix] = unit_of(size);
  std::snprintf(buffer, sizeof buffer, "%.4g%s", value / unit, suffix);
  return buffer;
}

std::vector<std::string> tick_labels(const std::vector<double>& ticks) {
  std::vector<std::string> labels;
  if (ticks.size() < 2) {
    for (const double tick : ticks) labels.push_back(short_number(tick));
    return labels;
  }
  const double largest = std::max(std::abs(ticks.front()), std::abs(ticks.back()));
  const auto [unit, suffix] = unit_of(largest);
  const double step = (ticks[1] - ticks[0]) / unit;
  const int decimals = std::max(0, static_cast<int>(std::ceil(-std::log10(step) - 1e-6)));
  for (const double tick : ticks) {
    char buffer[40];
    std::snprintf(buffer, sizeof buffer, "%.*f%s", decimals, tick / unit, tick == 0 ? "" : suffix);
    labels.push_back(decimals <= 5 && largest < 1e15 ? buffer : short_number(tick));
  }
  return labels;
}

std::vector<Point> downsample(const std::vector<Point>& points, size_t max_points) {
  if (points.size() <= max_points) return points;
  const size_t groups = std::max<size_t>(1, max_points / 2);
  std::vector<Point> kept;
  for (size_t g = 0; g < groups; g++) {
    const size_t begin = points.size() * g / groups, end = points.size() * (g + 1) / groups;
    size_t low = end, high = end, gap = end;
    for (size_t i = begin; i < end; i++) {
      if (std::isnan(points[i].y)) {
        gap = i;
        continue;
      }
      if (low == end || points[i].y < points[low].y) low = i;
      if (high == end || points[i].y > points[high].y) high = i;
    }
    std::vector<size_t> picked = {low, high, gap};
    std::sort(picked.begin(), picked.end());
    picked.erase(std::unique(picked.begin(), picked.end()), picked.end());
    for (const size_t i : picked)
      if (i != end) kept.push_back(points[i]);
  }
  return kept;
}

std::vector<Point> smooth(const std::vector<Point>& points, size_t window) {
  std::vector<double> sums = {0};
  std::vector<size_t> counts = {0};
  for (const auto& point : points) {
    const bool known = std::isfinite(point.y);
    sums.push_back(sums.back() + (known ? point.y : 0));
    counts.push_back(counts.back() + (known ? 1 : 0));
  }
  std::vector<Point> out = points;
  for (size_t i = 0; i < points.size(); i++) {
    if (!std::isfinite(points[i].y)) continue;
    const size_t half = std::min(window / 2, i);
    const size_t begin = i - half, end = std::min(i + half + 1, points.size());
    out[i].y = (sums[end] - sums[begin]) / static_cast<double>(counts[end] - counts[begin]);
  }
  return out;
}

std::string html_escape(const std::string& text) {
  std::string out;
  const char* const end = text.data() + text.size();
  for (const char* p = text.data(); p < end;) {
    uint32_t code = 0;
    const int length = decode_utf8(p, end, code);
    if (length == 0 || (code < 32 && code != '\n' && code != '\t') || code == 127) {
      out += '?';
      p += std::max(length, 1);
      continue;
    }
    switch (code) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out.append(p, static_cast<size_t>(length));
    }
    p += length;
  }
  return out;
}

std::string horizontal_axis(const Scale& x, double bottom, const std::string& label) {
  std::string svg;
  const auto ticks = nice_ticks(x.low, x.high, 6);
  const auto labels = tick_labels(ticks);
  for (size_t i = 0; i < ticks.size(); i++) {
    const double at = x(ticks[i]);
    svg += fmt::format("<path class=\"axis\" d=\"M{:.1f} {}v5\"/>", at, bottom);
    svg += fmt::format("<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{}\">{}</text>", at,
                       bottom + 18, labels[i]);
  }
  svg += fmt::format("<path class=\"axis\" d=\"M{} {}H{}\"/>", kLeft, bottom, kWidth - kRight);
  svg += fmt::format("<text class=\"label\" text-anchor=\"middle\" x=\"{}\" y=\"{}\">{}</text>",
                     (kLeft + kWidth - kRight) / 2, bottom + kBottom - 5, html_escape(label));
  return svg;
}

}  // namespace shoal
